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

from fedshot.core.errors import check_word
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
OWN_SAMPLE = ("with", "without")
_TINY = 1e-12  # added to squared distances, because the square root has an infinite slope at 0


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Return the Euclidean distances [n, m] of rows of a [n, d] and b [m, d].

    Computed as |a|^2 - 2ab + |b|^2 in float64, centred at the mean of b, in n * m numbers of memory
    instead of n * m * d. Equal rows have a distance of 1e-6 and a gradient of 0.
    """
    centre = b.detach().double().mean(0)
    a64, b64 = a.double() - centre, b.double() - centre
    squared = a64.square().sum(1)[:, None] + b64.square().sum(1) - 2 * (a64 @ b64.T)
    return (squared.clamp_min(0) + _TINY).sqrt().to(a.dtype)


def average_distance_logits(query: Tensor, support: Tensor, y: Tensor, way: int) -> Tensor:
    """Return minus the mean distances [queries, way] to the support of each class, eq. (3).

    A class without support is never predicted.
    """
    member = members(y, way).to(query.dtype)
    return _negative_means(distances(query, support) @ member.T, member.sum(1))


def own_logits(h: Tensor, y: Tensor, way: int, own_sample: OwnSample) -> Tensor:
    """Return minus the mean distances [n, way] of examples h [n, d] to the examples of each class.

    Own sample "with": an example counts among those of its class, at a distance of 0 from itself.
    "without": it is left out of its class, unless it is the only one, whose distance to its class
    is 0.
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
        model: backbone; a head is not used.
        classes: number of classes; labels of a batch are below it.
        own_sample: whether, in training, an example counts among those of its class ("with") or is
            left out ("without").
        alone: under own_sample "without", what to do with the only example of a class. "include":
            it counts, at a distance of 0 from itself; "drop": the mean loss leaves it out.
    """

    max_way: ClassVar[None] = None

    model: Model
    classes: int
    own_sample: OwnSample = "without"
    alone: Literal["include", "drop"] = "include"

    def __post_init__(self) -> None:
        check_body(self.model, "average distances")
        check_word("own_sample", self.own_sample, OWN_SAMPLE)
        check_word("alone", self.alone, ("include", "drop"))

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """Draw the encoder; a head of the model is not used."""
        params, stats = self.model.init(key)
        return {"body": params["body"]}, stats

    def episode_loss(self, params: Tree, stats: Tree, batch: Batch, seed: Tensor) -> EpisodeLoss:
        """Return the mean of -log p(y | x), where each example is compared with the whole batch."""
        h, stats = self.model.features(params, stats, batch.x, Mode(True, "batch", seed=seed))
        loss, right = self._loss(h, batch.y)
        return EpisodeLoss(loss, stats, right)

    def loss(self, params: Tree, stats: Tree, batch: Batch) -> Tensor:
        """Return the loss as at test: no dropout, the model's batch-norm policy, no gradient."""
        with torch.no_grad():
            h, _ = self.model.features(params, stats, batch.x, test_modes(self.model)[0])
            return self._loss(h, batch.y)[0]

    def answer(self, params: Tree, stats: Tree, eval_episode: EvalEpisode) -> Tensor:
        """Return minus the mean distances of the queries to the support of each class."""
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
