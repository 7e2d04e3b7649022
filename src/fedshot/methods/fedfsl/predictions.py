"""Predictions of a MAML model on a training episode, for losses that compare two models.

The papers write p(w) and leave open whether w has adapted to the episode's support set. If the
labels of an episode are shuffled, a head that has not adapted cannot know which class is which, so
the default is to adapt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.learners.maml import Maml
from fedshot.nn.models.layers import needs_gradient
from fedshot.nn.stacks import stacked

Predictions = Literal["adapted_query", "unadapted_query"]

_QUERY = -1  # site of the dropout masks


class EpisodePredictions(NamedTuple):
    """Predictions of one model on one episode."""

    query: Tensor  # logits [queries, way] after adapting, for the task loss
    stats: Tree  # running statistics, updated by the forward pass over the queries
    p: dict[str, Tensor]  # logits [queries, way] of p(w), keyed by the kind of prediction


class SharedFeatures:
    """Features of the current episode under a fixed body, each computed once and then cached.

    Models that have the same body use it, such as a reference and a model with another head.
    Nothing is cached for other bodies, for a body that needs gradients, or under `vmap`.
    """

    def __init__(self, learner: Maml, body: Tree) -> None:
        self._learner = learner
        self._body = body
        self._stats: Tree = {}  # a new object after each episode, which empties the cache
        # The value holds x and the seed, so that their ids in the key stay unique.
        self._known: dict[tuple[int, int, int], tuple[Tensor, Tensor, tuple[Tensor, Tree]]] = {}

    def __call__(
        self, body: Tree, stats: Tree, x: Tensor, seed: Tensor, site: int
    ) -> tuple[Tensor, Tree]:
        """Return (features [n, d] of examples x, running statistics after the forward pass).

        `seed` and `site` select the dropout masks.
        """
        if body is not self._body or stacked() or needs_gradient(body):
            return self._learner.features({"body": body}, stats, x, seed, site)
        if stats is not self._stats:
            self._stats, self._known = stats, {}
        key = (id(x), id(seed), site)
        if key not in self._known:
            found = self._learner.features({"body": body}, stats, x, seed, site)
            self._known[key] = x, seed, found
        return self._known[key][2]


def paired_predictions(
    learner: Maml,
    body: Tree,
    heads: Sequence[Tree],
    stats: Tree,
    episode: Episode,
    seed: Tensor,
    kinds: Collection[Predictions] = (),
    features: SharedFeatures | None = None,
) -> list[EpisodePredictions]:
    """Return the predictions of several models that differ only in their heads.

    Each model adapts to the support set by itself. The result is differentiable through the inner
    steps. If only heads adapt, the body computes each example's features once for all heads.

    Args:
        learner: MAML, which adapts the models.
        body: the body that the models share.
        heads: one per model, before adapting.
        stats: running statistics.
        episode: the episode.
        seed: seed of the dropout masks, which are the same for all heads.
        kinds: predictions on the queries to return: "adapted_query", those after adapting, and
            "unadapted_query", those before.
        features: cache of the body's features, used if only heads adapt.
    """
    models = [{"body": body, "head": head} for head in heads]
    if learner.inner.adapts == "all":
        return [_of_whole(learner, w, stats, episode, seed, kinds) for w in models]

    def embed(x: Tensor, site: int) -> tuple[Tensor, Tree]:
        if features is None:
            return learner.features(models[0], stats, x, seed, site)
        return features(body, stats, x, seed, site)

    with torch.set_grad_enabled(torch.is_grad_enabled() and learner.inner.order == "second"):
        h, _ = embed(episode.support_x, 0)
    query, moved = embed(episode.query_x, _QUERY)
    found = []
    for w in models:
        adapted = learner.adapt_head(w, h, episode)
        p = {"adapted_query": learner.logits(adapted, query, episode.classes)}
        if "unadapted_query" in kinds:
            p["unadapted_query"] = learner.logits(w, query, episode.classes)
        found.append(EpisodePredictions(p["adapted_query"], moved, p))
    return found


def _of_whole(
    learner: Maml,
    params: Tree,
    stats: Tree,
    episode: Episode,
    seed: Tensor,
    kinds: Collection[Predictions],
) -> EpisodePredictions:
    """Return the predictions of a model whose parameters all adapt."""

    def predict(w: Tree) -> tuple[Tensor, Tree]:
        return learner.predict(w, stats, episode.query_x, episode.classes, seed, _QUERY)

    query, moved = predict(learner.adapt(params, stats, episode, seed))
    p = {"adapted_query": query}
    if "unadapted_query" in kinds:
        p["unadapted_query"], _ = predict(params)
    return EpisodePredictions(query, moved, p)
