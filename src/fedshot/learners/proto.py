"""Prototypical networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.learners.learner import EpisodeLoss, EvalEpisode, check_body, episode_features
from fedshot.nn.kernels.proto_loss import prototype_loss
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.prototypes import nearest_prototypes


@dataclass(frozen=True)
class Proto:
    """Prototypical network: the logit of a class is minus the squared distance to its mean.

    Source: Snell et al. 2017, eqs. (1) and (2). In training, support and queries are one batch.
    """

    max_way: ClassVar[None] = None

    model: Model

    def __post_init__(self) -> None:
        check_body(self.model, "prototypes")

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """Return a random encoder and its running statistics; the model's head is not used."""
        params, stats = self.model.init(key)
        return {"body": params["body"]}, stats

    def episode_loss(
        self, params: Tree, stats: Tree, episode: Episode, seed: Tensor
    ) -> EpisodeLoss:
        """Return the cross-entropy of the queries."""
        n, way = len(episode.support_y), len(episode.classes)
        both = torch.cat([episode.support_x, episode.query_x])
        h, stats = self.model.features(params, stats, both, Mode(True, "batch", seed=seed))
        y = torch.cat([episode.support_y, episode.query_y])
        loss, right = prototype_loss(h, y, n, way)
        return EpisodeLoss(loss, stats, right)

    def embed(self, params: Tree, stats: Tree, x: Tensor) -> Tensor:
        """Return the features [n, d] of x, with batch norm under running statistics.

        The features of an example therefore do not depend on the rest of its batch.
        """
        return self.model.features(params, stats, x, Mode(norm="given"))[0]

    def answer(self, params: Tree, stats: Tree, eval_episode: EvalEpisode) -> Tensor:
        """Return the logits [queries, way]: minus the squared distances to the prototypes."""
        support, query = episode_features(self.model, params, stats, eval_episode)
        return nearest_prototypes(support, eval_episode.support_y, query, len(eval_episode.classes))
