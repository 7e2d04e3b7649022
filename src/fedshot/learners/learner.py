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
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fedshot.core.errors import ConfigError, check_word
from fedshot.core.ranges import Above0, AtLeast0
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.data.episodes.spec import Labels
from fedshot.nn.gradients import descend
from fedshot.nn.kernels.proto_loss import prototype_loss
from fedshot.nn.losses import accuracy, cross_entropy
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.prototypes import nearest_prototypes


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


@dataclass(frozen=True)
class Proto:
    """Prototypical networks: the logit of a class is minus the squared distance to its mean.

    Source: Snell et al. 2017, eqs. (1) and (2). Support and queries pass the encoder together.
    """

    model: Model

    def __post_init__(self) -> None:
        check_body(self.model, "prototypes")

    @property
    def max_way(self) -> None:
        """Any number of classes."""
        return None

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """Draw the encoder; a head of the model plays no part."""
        params, stats = self.model.init(key)
        return {"body": params["body"]}, stats

    def episode_loss(
        self, params: Tree, stats: Tree, episode: Episode, seed: Tensor
    ) -> EpisodeLoss:
        """Return the cross-entropy of the queries under their distances to the prototypes."""
        n, way = len(episode.support_y), len(episode.classes)
        both = torch.cat([episode.support_x, episode.query_x])
        h, stats = self.model.features(params, stats, both, Mode(True, "batch", seed=seed))
        y = torch.cat([episode.support_y, episode.query_y])
        loss, right = prototype_loss(h, y, n, way)
        return EpisodeLoss(loss, stats, right)

    def embed(self, params: Tree, stats: Tree, x: Tensor) -> Tensor:
        """Return features under running statistics: they do not depend on the rest of the batch."""
        return self.model.features(params, stats, x, Mode(norm="given"))[0]

    def answer(self, params: Tree, stats: Tree, eval_episode: EvalEpisode) -> Tensor:
        """Return minus the squared distances of the queries to the prototypes."""
        support, query = episode_features(self.model, params, stats, eval_episode)
        return nearest_prototypes(support, eval_episode.support_y, query, len(eval_episode.classes))


@dataclass(frozen=True)
class InnerLoop:
    """How MAML adapts to an episode.

    Args:
        lr: inner step size, alpha.
        steps: gradient steps in training; 0 leaves the initialisation as it is.
        test_steps: gradient steps at test.
        order: "second" differentiates through the steps, "first" does not (FOMAML).
        adapts: "all" parameters, or the "head" alone on features computed once (ANIL; Raghu et al.
            2020). With dropout, the steps of "head" share one mask.
    """

    lr: Above0 = 0.01
    steps: AtLeast0 = 5
    test_steps: AtLeast0 = 10
    order: Literal["first", "second"] = "second"
    adapts: Literal["all", "head"] = "all"

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"inner.lr is {self.lr}; expected a finite number above 0.")
        if self.steps < 0 or self.test_steps < 0:
            raise ConfigError(
                f"inner.steps is {self.steps} and inner.test_steps is {self.test_steps}; expected "
                "whole numbers from 0."
            )
        check_word("inner.order", self.order, ("first", "second"))
        check_word("inner.adapts", self.adapts, ("all", "head"))


@dataclass(frozen=True)
class Maml:
    """Model-agnostic meta-learning: gradient steps on the support, the loss on the queries.

    Source: Finn et al. 2017; as the FedFSL papers write it, w' = w - a grad f_S(w) and
    l_T(w) = f_Q(w'). A head wider than the episode's way uses its first outputs, with global labels
    those of the episode's classes: output c is class c of the dataset.
    """

    model: Model
    inner: InnerLoop = InnerLoop()
    labels: Labels = "shuffled"

    def __post_init__(self) -> None:
        if self.model.head is None:
            raise ConfigError("MAML adapts a head; set model.head to linear, two_layer or cosine.")

    @property
    def max_way(self) -> int:
        """The width of the head."""
        assert self.model.head is not None
        return self.model.head.way

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """Draw backbone and head."""
        return self.model.init(key)

    def episode_loss(
        self, params: Tree, stats: Tree, episode: Episode, seed: Tensor
    ) -> EpisodeLoss:
        """Return the cross-entropy of the queries after adapting to the support.

        The pass of the queries moves the running statistics.
        """
        adapted = self.adapt(params, stats, episode, seed)
        logits, stats = self.predict(adapted, stats, episode.query_x, episode.classes, seed)
        return _episode_loss(logits, episode, stats)

    def adapt(
        self, params: Tree, stats: Tree, episode: Episode, seed: Tensor, lr: Tree | None = None
    ) -> Tree:
        """Return the parameters after the inner steps of training on the support, eq. (4).

        `lr` is a tree of step sizes, shaped like what adapts; None takes `inner.lr`.
        """
        mode, second = Mode(True, "batch", seed=seed), self.inner.order == "second"
        return self._adapt(
            params, stats, _eval_episode_of(episode), mode, self.inner.steps, second, lr
        )

    def predict(
        self, params: Tree, stats: Tree, x: Tensor, classes: Tensor, seed: Tensor, site: int = -1
    ) -> tuple[Tensor, Tree]:
        """Return (logits [n, way], running statistics moved) of a batch in training.

        `classes` are those of the episode, int64 [way]. `site` tells the dropout masks of several
        passes of one episode apart; the inner steps have those from 0 up.
        """
        h, stats = self.look(params, stats, x, seed, site)
        return self.logits(params, h, classes), stats

    def look(
        self, params: Tree, stats: Tree, x: Tensor, seed: Tensor, site: int
    ) -> tuple[Tensor, Tree]:
        """Return (features [n, d], running statistics moved) of a batch in training."""
        return self.model.features(params, stats, x, Mode(True, "batch", seed=seed).layer(site))

    def logits(self, params: Tree, h: Tensor, classes: Tensor) -> Tensor:
        """Return the logits [n, way] of features for the classes of an episode."""
        found = self.model.logits(params, h)
        return found[:, classes] if self.labels == "global" else found[:, : len(classes)]

    def adapt_head(self, params: Tree, h: Tensor, episode: Episode, lr: Tree | None = None) -> Tree:
        """Return the parameters after the inner steps of the head in training.

        `h` are the features of the support, which several heads may share.
        """
        task, second = _eval_episode_of(episode), self.inner.order == "second"
        return self._adapt_head(params, h, task, self.inner.steps, second, lr)

    def answer(
        self, params: Tree, stats: Tree, eval_episode: EvalEpisode, lr: Tree | None = None
    ) -> Tensor:
        """Return the logits of the queries after adapting to the support, without dropout."""
        adapted, h = self.read(params, stats, eval_episode, lr)
        with torch.no_grad():
            return self.logits(adapted, h, eval_episode.classes)

    def read(
        self, params: Tree, stats: Tree, eval_episode: EvalEpisode, lr: Tree | None = None
    ) -> tuple[Tree, Tensor]:
        """Return the adapted parameters, and the features of the queries under them, at test."""
        steps, x = self.inner.test_steps, eval_episode.support_x
        support, query = test_modes(self.model)
        if self.inner.adapts == "head":  # one pass of the support for both ends
            mode = support if self.model.by_support else Mode(norm="batch")
            with torch.no_grad():
                h, seen = self.model.features(params, stats, x, mode)
            adapted = self._adapt_head(params, h, eval_episode, steps, False, lr)
            stats = seen if self.model.by_support else stats
        else:
            adapted = self._adapt(params, stats, eval_episode, Mode(norm="batch"), steps, False, lr)
            if self.model.by_support:
                with torch.no_grad():
                    _, stats = self.model.features(adapted, stats, x, support)
        with torch.no_grad():
            h, _ = self.model.features(adapted, stats, eval_episode.query_x, query)
        return adapted, h

    def _adapt(
        self,
        params: Tree,
        stats: Tree,
        task: EvalEpisode,
        mode: Mode,
        steps: int,
        second: bool,
        lr: Tree | None,
    ) -> Tree:
        x = self.model.prepare(task.support_x)
        if self.inner.adapts == "head":
            h, _ = self.model.features(params, stats, x, mode.layer(0))
            return self._adapt_head(params, h, task, steps, second, lr)

        def loss(w: Tree, step: int) -> Tensor:
            h, _ = self.model.features(w, stats, x, mode.layer(step))
            return cross_entropy(self.logits(w, h, task.classes), task.support_y)

        lr = self.inner.lr if lr is None else lr
        return descend(loss, params, lr=lr, steps=steps, second_order=second)

    def _adapt_head(
        self, params: Tree, h: Tensor, task: EvalEpisode, steps: int, second: bool, lr: Tree | None
    ) -> Tree:
        h = h if second else h.detach()

        def loss(head: Tree, step: int) -> Tensor:
            del step
            logits = self.logits(params | {"head": head}, h, task.classes)
            return cross_entropy(logits, task.support_y)

        lr = self.inner.lr if lr is None else lr
        head = descend(loss, params["head"], lr=lr, steps=steps, second_order=second)
        return params | {"head": head}


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


def _eval_episode_of(episode: Episode) -> EvalEpisode:
    return EvalEpisode(episode.support_x, episode.support_y, episode.query_x, episode.classes)


def _episode_loss(logits: Tensor, episode: Episode, stats: Tree) -> EpisodeLoss:
    y = episode.query_y
    return EpisodeLoss(cross_entropy(logits, y), stats, accuracy(logits.detach(), y))
