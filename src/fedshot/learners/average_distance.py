"""Classification by the average distance to the examples of each class.

p(y = l | x) is the softmax over classes of minus the mean Euclidean distance (not squared) from x
to the examples of class l: Zhao et al. 2024, pFedFSL, eq. (3). Features are not averaged, and no
head is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedshot.core.ranges import check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.classification import Batch
from fedshot.learners.learner import (
    EpisodeLoss,
    EvalEpisode,
    check_body,
    episode_features,
    test_modes,
)
from fedshot.nn.losses import accuracy
from fedshot.nn.masking import mask_logits
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.prototypes import members

OwnSample = Literal["with", "without"]
_TINY = 1e-12  # added to squared distances, because the square root has an infinite slope at 0


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Return the Euclidean distances [n, m] between the rows of a [n, d] and b [m, d].

    They are computed as |a|^2 - 2ab + |b|^2 in float64, centred at the mean of b. This needs memory
    for n * m numbers instead of n * m * d. Equal rows have a distance of 1e-6 and a gradient of 0.
    """
    centre = b.detach().double().mean(0)
    a64, b64 = a.double() - centre, b.double() - centre
    squared = a64.square().sum(1)[:, None] + b64.square().sum(1) - 2 * (a64 @ b64.T)
    return (squared.clamp_min(0) + _TINY).sqrt().to(a.dtype)


def average_distance_logits(query: Tensor, support: Tensor, y: Tensor, way: int) -> Tensor:
    """Return the logits [queries, way]: minus the mean distance to each class's support, eq. (3).

    `query` is [queries, d], `support` is [n, d] and `y` is int64 [n]. A class without support
    examples is never predicted.
    """
    member = members(y, way).to(query.dtype)
    return _negative_means(distances(query, support) @ member.T, member.sum(1))


def own_logits(h: Tensor, y: Tensor, way: int, own_sample: OwnSample) -> Tensor:
    """Return the logits [n, way] of a batch: minus the mean distance to each class's examples.

    `h` are the features [n, d] and `y` the labels, int64 [n]. With `own_sample` "with", the mean
    over an example's own class includes the example itself, at a distance of 0. With "without", it
    leaves the example out; the only example of a class has a distance of 0 to that class.
    """
    member = members(y, way).to(h.dtype)
    # The distance of an example to itself is exactly 0, without a gradient through the root.
    itself = torch.eye(len(h), dtype=torch.bool, device=h.device)
    sums = distances(h, h).masked_fill(itself, 0.0) @ member.T
    counts = member.sum(1).expand(len(h), way)
    if own_sample == "without":
        counts = torch.where(counts > 0, (counts - member.T).clamp_min(1.0), counts)
    return _negative_means(sums, counts)


def _negative_means(sums: Tensor, counts: Tensor) -> Tensor:
    return mask_logits(-sums / counts.clamp_min(1.0), counts > 0)


@dataclass(frozen=True)
class AverageDistance:
    """An encoder trained so that examples are near those of their own class: eqs. (3) to (5).

    Args:
        model: the encoder; its head, if it has one, is not used.
        classes: number of classes; the labels of a batch are 0..classes-1.
        own_sample: in training, whether an example's mean distance to its own class includes the
            example itself ("with") or not ("without").
        alone: under own_sample "without", how to treat the only example of a class. "include" sets
            its distance to its class to 0; "drop" leaves it out of the mean loss.
    """

    max_way: ClassVar[None] = None

    model: Model
    classes: int
    own_sample: OwnSample = "without"
    alone: Literal["include", "drop"] = "include"

    def __post_init__(self) -> None:
        check_body(self.model, "average distances")
        check_options(self)

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """Return a random encoder and its running statistics; the model's head is not used."""
        params, stats = self.model.init(key)
        return {"body": params["body"]}, stats

    def episode_loss(self, params: Tree, stats: Tree, batch: Batch, seed: Tensor) -> EpisodeLoss:
        """Return the mean of -log p(y | x), with distances to the other examples of the batch."""
        h, stats = self.model.features(params, stats, batch.x, Mode(True, "batch", seed=seed))
        loss, right = self._loss(h, batch.y)
        return EpisodeLoss(loss, stats, right)

    def loss(self, params: Tree, stats: Tree, batch: Batch) -> Tensor:
        """Return the loss of a batch in test mode, a scalar in nats without a gradient.

        There is no dropout, and batch norm follows the model's policy.
        """
        with torch.no_grad():
            h, _ = self.model.features(params, stats, batch.x, test_modes(self.model)[0])
            return self._loss(h, batch.y)[0]

    def answer(self, params: Tree, stats: Tree, eval_episode: EvalEpisode) -> Tensor:
        """Return the logits [queries, way]: minus the mean distance to each class's support."""
        with torch.no_grad():
            support, query = episode_features(self.model, params, stats, eval_episode)
            y, way = eval_episode.support_y, len(eval_episode.classes)
            return average_distance_logits(query, support, y, way)

    def _loss(self, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = own_logits(h, y, self.classes, self.own_sample)
        each = -logits.log_softmax(-1).gather(1, y[:, None])[:, 0]
        right = accuracy(logits.detach(), y)
        if self.alone == "include" or self.own_sample == "with":
            return each.mean(), right
        not_alone = ((y[:, None] == y).sum(1) > 1).to(h.dtype)
        return (each * not_alone).sum() / not_alone.sum().clamp_min(1.0), right
