"""Meta-SGD: MAML with a learned inner step size for every parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.data.episodes.spec import Labels
from fedshot.learners.learner import EpisodeLoss, EvalEpisode
from fedshot.learners.maml import InnerLoop, Maml
from fedshot.nn.losses import accuracy, cross_entropy
from fedshot.nn.models.model import Model


@dataclass(frozen=True)
class MetaSgd:
    """Learns the initial weights and the inner step sizes together, by gradient descent.

    w' = w - alpha * grad f_S(w), elementwise; the loss of the queries at w' is differentiated with
    respect to w and alpha. With `inner.order="first"` the inner gradients are constants, so the
    gradient with respect to alpha is minus their sum times the gradient of the loss.

    Source: Li et al. 2017, Meta-SGD, eqs. (3) and (4). Parameters are `{"start": w, "alpha": ...}`.
    Alpha starts at `inner.lr` everywhere (the paper draws it at random) and may become negative.
    """

    model: Model
    inner: InnerLoop
    labels: Labels = "shuffled"

    @property
    def maml(self) -> Maml:
        """MAML with the same model and inner loop."""
        return Maml(self.model, self.inner, self.labels)

    @property
    def max_way(self) -> int:
        """The width of the head."""
        return self.maml.max_way

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """Return MAML's random weights with the initial step sizes, and the running statistics."""
        start, stats = self.maml.init(key)
        adapts = start if self.inner.adapts == "all" else start["head"]
        alpha = tree.map(lambda leaf: torch.full_like(leaf, self.inner.lr), adapts)
        return {"start": start, "alpha": alpha}, stats

    def episode_loss(
        self, params: Tree, stats: Tree, episode: Episode, seed: Tensor
    ) -> EpisodeLoss:
        """Return the cross-entropy of the queries after adaptation with the step sizes alpha."""
        maml, y = self.maml, episode.query_y
        adapted = maml.adapt(params["start"], stats, episode, seed, params["alpha"])
        logits, stats = maml.predict(adapted, stats, episode.query_x, episode.classes, seed)
        return EpisodeLoss(cross_entropy(logits, y), stats, accuracy(logits.detach(), y))

    def answer(self, params: Tree, stats: Tree, eval_episode: EvalEpisode) -> Tensor:
        """Return the logits [queries, way] after adapting to the support set with alpha."""
        return self.maml.answer(params["start"], stats, eval_episode, params["alpha"])
