"""MAML: gradient steps on the support set of an episode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.ranges import Above0, AtLeast0, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.data.episodes.spec import Labels
from fedshot.learners.learner import EpisodeLoss, EvalEpisode, test_modes
from fedshot.nn.gradients import descend
from fedshot.nn.losses import accuracy, cross_entropy
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model


@dataclass(frozen=True)
class InnerLoop:
    """The inner loop: how MAML adapts to an episode.

    Args:
        lr: inner step size, alpha.
        steps: gradient steps in training; 0 does not adapt.
        test_steps: gradient steps at test.
        order: "second" differentiates through the steps, "first" does not (FOMAML).
        adapts: "all" parameters adapt, or only the "head", on features computed once (ANIL; Raghu
            et al. 2020). With dropout, all inner steps of the head share one mask.
    """

    lr: Above0 = 0.01
    steps: AtLeast0 = 5
    test_steps: AtLeast0 = 10
    order: Literal["first", "second"] = "second"
    adapts: Literal["all", "head"] = "all"

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Maml:
    """Model-agnostic meta-learning: adapts on the support set; the loss is that of the queries.

    Source: Finn et al. 2017; in the notation of the FedFSL papers, w' = w - a grad f_S(w) and
    l_T(w) = f_Q(w'). If the head is wider than the episode's way, its first outputs are used; with
    global labels, output c belongs to class c of the dataset.
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
        """Return a random backbone and head, and the running statistics."""
        return self.model.init(key)

    def episode_loss(
        self, params: Tree, stats: Tree, episode: Episode, seed: Tensor
    ) -> EpisodeLoss:
        """Return the cross-entropy of the queries after adapting to the support set.

        The forward pass over the queries updates the running statistics.
        """
        adapted, y = self.adapt(params, stats, episode, seed), episode.query_y
        logits, stats = self.predict(adapted, stats, episode.query_x, episode.classes, seed)
        return EpisodeLoss(cross_entropy(logits, y), stats, accuracy(logits.detach(), y))

    def adapt(
        self, params: Tree, stats: Tree, episode: Episode, seed: Tensor, lr: Tree | None = None
    ) -> Tree:
        """Return the parameters after `inner.steps` steps on the support set, in training mode.

        `lr` is a tree of step sizes with the structure of the adapted parameters; None uses
        `inner.lr`.
        """
        mode, second = Mode(True, "batch", seed=seed), self.inner.order == "second"
        return self._adapt(
            params, stats, _eval_episode_of(episode), mode, self.inner.steps, second, lr
        )

    def predict(
        self, params: Tree, stats: Tree, x: Tensor, classes: Tensor, seed: Tensor, site: int = -1
    ) -> tuple[Tensor, Tree]:
        """Return (logits [n, way], updated running statistics) of a batch in training.

        `classes` are the episode's classes, int64 [way], as class indices of the dataset. `site`
        selects the dropout mask of this forward pass; inner step s uses site s, counted from 0.
        """
        h, stats = self.features(params, stats, x, seed, site)
        return self.logits(params, h, classes), stats

    def features(
        self, params: Tree, stats: Tree, x: Tensor, seed: Tensor, site: int
    ) -> tuple[Tensor, Tree]:
        """Return (features [n, d], updated running statistics) of a batch in training."""
        return self.model.features(params, stats, x, Mode(True, "batch", seed=seed).layer(site))

    def logits(self, params: Tree, h: Tensor, classes: Tensor) -> Tensor:
        """Return the logits [n, way] of features h [n, d] for an episode's classes, int64 [way]."""
        found = self.model.logits(params, h)
        return found[:, classes] if self.labels == "global" else found[:, : len(classes)]

    def adapt_head(self, params: Tree, h: Tensor, episode: Episode) -> Tree:
        """Return the parameters after `inner.steps` steps of the head alone, in training mode.

        `h` are the features [n, d] of the support set; several heads may share them.
        """
        task, second = _eval_episode_of(episode), self.inner.order == "second"
        return self._adapt_head(params, h, task, self.inner.steps, second, None)

    def answer(
        self, params: Tree, stats: Tree, eval_episode: EvalEpisode, lr: Tree | None = None
    ) -> Tensor:
        """Return the logits [queries, way] after adapting to the support set, without dropout."""
        adapted, h = self.adapt_at_test(params, stats, eval_episode, lr)
        with torch.no_grad():
            return self.logits(adapted, h, eval_episode.classes)

    def adapt_at_test(
        self, params: Tree, stats: Tree, eval_episode: EvalEpisode, lr: Tree | None = None
    ) -> tuple[Tree, Tensor]:
        """Return the adapted parameters, and the queries' features [queries, d] under them."""
        steps, x = self.inner.test_steps, eval_episode.support_x
        support, query = test_modes(self.model)
        if self.inner.adapts == "head":  # one pass gives the features and the statistics
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


def _eval_episode_of(episode: Episode) -> EvalEpisode:
    return EvalEpisode(episode.support_x, episode.support_y, episode.query_x, episode.classes)
