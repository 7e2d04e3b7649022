"""Learners: how one model learns an episode, on one machine, federated or not.

A learner gives the loss of an episode, to be minimised in training, and the logits of the queries
of a new episode at test. Methods decide who trains it and what is exchanged.

Batch norm follows the model's policy:

| policy | training | test |
|---|---|---|
| running | statistics of the batch; one pass an episode moves the running ones | running |
| support | statistics of the batch | those of the support set, for support and queries |
| transductive | statistics of the batch | each batch its own, the queries' included |

Under `running`, MAML adapts with the statistics of the support set at test as in training, and the
running ones serve the pass that made them, that of the queries after adaptation. Adapting under
running statistics, which belong to adapted weights, makes the inner steps diverge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model


class EpisodeLoss(NamedTuple):
    """What an episode taught: the loss (nats, mean over queries), and what came with it."""

    loss: Tensor
    stats: Tree  # running statistics after the episode
    accuracy: Tensor  # on the queries, in [0, 1]
    extra: Mapping[str, Tensor] = {}  # other scalars to report, such as terms of the loss


class Held(NamedTuple):
    """Who holds the examples of a question that a group of clients answers together.

    Spare clients are further ones, with supports of the same classes and no queries: only a method
    that chooses among more clients than the group has looks at them.
    """

    support: Tensor  # int64 [supports], the number of a client from 0
    query: Tensor  # int64 [queries]
    spare: Tensor  # int64 [spare supports]; numbers go on from those of the group
    spare_x: Tensor  # uint8 [spare supports, height, width, channels]
    spare_y: Tensor  # int64 [spare supports]


class EvalEpisode(NamedTuple):
    """An episode without the answers: the labels of the queries stay with the examiner."""

    support_x: Tensor  # uint8 [way * shot, height, width, channels]
    support_y: Tensor  # int64 [way * shot], 0..way-1
    query_x: Tensor  # uint8 [queries, height, width, channels]
    classes: Tensor  # int64 [way], the dataset's class numbers
    held: Held | tuple[()] = ()  # by whom, where a group of clients holds it


class Learner(Protocol):
    """What `local_sgd` trains and what answers a question."""

    @property
    def max_way(self) -> int | None:
        """The most classes an episode may have; None for any number."""
        ...

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """Draw (parameters, running statistics)."""
        ...

    def episode_loss(
        self, params: Tree, stats: Tree, episode: Episode, seed: Tensor
    ) -> EpisodeLoss:
        """Return the loss of an episode in training; `seed` makes its dropout masks."""
        ...

    def answer(self, params: Tree, stats: Tree, eval_episode: EvalEpisode) -> Tensor:
        """Return logits [queries, way] at test."""
        ...


def check_body(model: Model, learner: str) -> None:
    """Refuse a backbone without a layer."""
    if getattr(model.backbone, "hidden", None) == ():
        raise ConfigError(
            f"model.backbone.hidden is []: without a layer there is nothing that {learner} "
            "could train. Give it a width at least, such as [64]."
        )


def episode_features(
    model: Model, params: Tree, stats: Tree, eval_episode: EvalEpisode
) -> tuple[Tensor, Tensor]:
    """Return the features (support, queries) of a question, by the model's batch-norm policy."""
    support, query = test_modes(model)
    h, seen = model.features(params, stats, eval_episode.support_x, support)
    return h, model.features(params, seen, eval_episode.query_x, query)[0]


def test_modes(model: Model) -> tuple[Mode, Mode]:
    """Return how support and queries pass the network at test, by the model's policy."""
    if model.norm_policy == "running":
        return Mode(norm="given"), Mode(norm="given")
    if model.by_support:
        return Mode(norm="capture"), Mode(norm="given")
    return Mode(norm="batch"), Mode(norm="batch")
