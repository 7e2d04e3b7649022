"""Learners: how one model learns from an episode, federated or not.

A learner computes the loss of an episode in training, and the logits of the queries of a new
episode at test. A method decides which clients train it and what they exchange.

Batch norm follows the policy of the model:

| policy | training | test |
|---|---|---|
| running | batch statistics; each episode updates the running ones | running statistics |
| support | batch statistics | statistics of the support set, for support and queries |
| transductive | batch statistics | support and queries each use their own batch statistics |

Under `running`, MAML adapts with batch statistics of the support set, in training and at test. The
forward pass over the queries, after adaptation, updates the running statistics in training and uses
them at test. They describe activations under adapted weights; the inner steps, which begin with
unadapted weights, would diverge if they used them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, overload

from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.models.module_backbone import ModuleBackbone


class EpisodeLoss(NamedTuple):
    """The loss of an episode, with the accuracy, running statistics and scalars to report."""

    loss: Tensor  # nats, mean over queries
    stats: Tree  # running statistics after the episode
    accuracy: Tensor  # on the queries, in [0, 1]
    extra: Mapping[str, Tensor] = {}  # other scalars to report, such as terms of the loss


class Held(NamedTuple):
    """Which client holds each example of an evaluation episode that a group of clients shares.

    Spare clients are additional clients with support examples of the same classes and no queries,
    for methods that choose among more clients than the group has.
    """

    support: Tensor  # int64 [supports], index of the client in the group
    query: Tensor  # int64 [queries]
    spare: Tensor  # int64 [spare supports]; indices continue those of the group
    spare_x: Tensor  # uint8 [spare supports, height, width, channels]
    spare_y: Tensor  # int64 [spare supports]


class EvalEpisode(NamedTuple):
    """A test episode without the labels of its queries, which only the evaluation has."""

    support_x: Tensor  # uint8 [way * shot, height, width, channels]
    support_y: Tensor  # int64 [way * shot], 0..way-1
    query_x: Tensor  # uint8 [queries, height, width, channels]
    classes: Tensor  # int64 [way], the dataset's class numbers
    held: Held | tuple[()] = ()  # set if a group of clients shares the episode


class LazyEpisodes(Sequence[EvalEpisode]):
    """A sequence of evaluation episodes, each built when it is accessed."""

    @overload
    def __getitem__(self, u: int) -> EvalEpisode: ...
    @overload
    def __getitem__(self, u: slice) -> list[EvalEpisode]: ...
    def __getitem__(self, u: int | slice) -> EvalEpisode | list[EvalEpisode]:
        if isinstance(u, slice):
            return [self[i] for i in range(*u.indices(len(self)))]
        if not 0 <= u < len(self):
            raise IndexError(u)
        return self._build(u)

    @abstractmethod
    def _build(self, u: int) -> EvalEpisode: ...


class Learner(Protocol):
    """A model with a loss that `local_sgd` minimises and a way to classify queries."""

    @property
    def model(self) -> Model:
        """The network."""
        ...

    @property
    def max_way(self) -> int | None:
        """The largest number of classes of an episode; None for no limit."""
        ...

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """Return random initial parameters, and the initial running statistics."""
        ...

    def episode_loss(
        self, params: Tree, stats: Tree, episode: Episode, seed: Tensor
    ) -> EpisodeLoss:
        """Return the training loss of an episode; `seed` seeds the dropout masks."""
        ...

    def answer(self, params: Tree, stats: Tree, eval_episode: EvalEpisode) -> Tensor:
        """Return the logits [queries, way] of an evaluation episode."""
        ...


def check_body(model: Model, learner: str) -> None:
    """Raise ConfigError if the backbone has no parameters to train."""
    if model.trains_backbone:
        return
    if isinstance(model.backbone, ModuleBackbone):
        raise ConfigError(
            f"model.backbone.tune is 'none': {learner} has no parameters to train. Set it to "
            "'head', 'lora' or 'all', or use a method without training: fedncm."
        )
    raise ConfigError(
        f"model.backbone.hidden is []: without a layer, {learner} would have no parameters to "
        "train. Give at least one width, such as [64], or use fedncm, which does not train."
    )


def episode_features(
    model: Model, params: Tree, stats: Tree, eval_episode: EvalEpisode
) -> tuple[Tensor, Tensor]:
    """Return the features (support [n, d], queries [m, d]) of an episode.

    Batch norm follows the model's policy.
    """
    support, query = test_modes(model)
    h, seen = model.features(params, stats, eval_episode.support_x, support)
    return h, model.features(params, seen, eval_episode.query_x, query)[0]


def test_modes(model: Model) -> tuple[Mode, Mode]:
    """Return the modes of the forward passes over (support, queries) at test.

    They follow the model's batch-norm policy.
    """
    if model.norm_policy == "running":
        return Mode(norm="given"), Mode(norm="given")
    if model.by_support:
        return Mode(norm="capture"), Mode(norm="given")
    return Mode(norm="batch"), Mode(norm="batch")
