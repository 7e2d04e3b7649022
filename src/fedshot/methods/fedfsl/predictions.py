"""What a MAML model predicts of an episode in training, for losses that compare two models.

The papers write p(w) and leave open on which examples, and whether w has adapted to the episode's
support before. Where the labels of an episode are shuffled, a head that has not adapted cannot know
which class is which: the default is the queries, after adapting.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.learners.maml import Maml
from fedshot.nn.models.layers import needs_gradient
from fedshot.nn.stacks import stacked

Predictions = Literal["adapted_query", "unadapted_query", "adapted_both"]
PREDICTIONS: tuple[Predictions, ...] = ("adapted_query", "unadapted_query", "adapted_both")

_QUERY, _SUPPORT = -1, -2  # sites of the dropout masks


class EpisodePredictions(NamedTuple):
    """One model on one episode."""

    query: Tensor  # logits [queries, way] after adapting, for the task loss
    stats: Tree  # running statistics, moved by the pass of the queries
    p: dict[str, Tensor]  # logits [rows, way] of p(w), by the kind of prediction


class SharedFeatures:
    """The features of an episode under a body that stays as it is, each made once.

    For models that share the body, such as a reference and one whose heads alone have moved, while
    they look at one episode. Any other body looks for itself, as does one that is differentiated,
    and every one under `vmap`, where what one gradient made is not there any more in the next.
    """

    def __init__(self, learner: Maml, body: Tree) -> None:
        self._learner = learner
        self._body = body
        self._stats: Tree = {}  # which are other ones after each episode
        # What a key's number belongs to is kept with it, so that nothing else gets it.
        self._known: dict[tuple[int, int, int], tuple[Tensor, tuple[Tensor, Tree]]] = {}

    def __call__(
        self, body: Tree, stats: Tree, x: Tensor, seed: Tensor, site: int
    ) -> tuple[Tensor, Tree]:
        """Return (features [n, d], running statistics moved)."""
        if body is not self._body or stacked() or needs_gradient(body):
            return self._learner.features({"body": body}, stats, x, seed, site)
        if stats is not self._stats:
            self._stats, self._known = stats, {}
        key = (id(x), int(seed), site)
        if key not in self._known:
            self._known[key] = x, self._learner.features({"body": body}, stats, x, seed, site)
        return self._known[key][1]


def episode_predictions(
    learner: Maml,
    params: Tree,
    stats: Tree,
    episode: Episode,
    seed: Tensor,
    kinds: Collection[Predictions] = (),
) -> EpisodePredictions:
    """Let a model adapt to the support and predict; differentiable, the inner steps included.

    Args:
        learner: how it adapts.
        params: its parameters before adapting.
        stats: running statistics.
        episode: the episode.
        seed: makes the dropout masks; two models of one seed have the same masks.
        kinds: which predictions are asked for: "adapted_query", "unadapted_query" (the parameters
            as they are), "adapted_both" (queries and support, after adapting).
    """
    (found,) = paired_predictions(
        learner, params["body"], [params["head"]], stats, episode, seed, kinds
    )
    return found


def paired_predictions(
    learner: Maml,
    body: Tree,
    heads: Sequence[Tree],
    stats: Tree,
    episode: Episode,
    seed: Tensor,
    kinds: Collection[Predictions] = (),
    looks: SharedFeatures | None = None,
) -> list[EpisodePredictions]:
    """Return the outlook of every head on one body, each adapting by itself.

    Where heads alone adapt, the body looks at every example once, for all heads, and for all who
    share `looks`.
    """
    models = [{"body": body, "head": head} for head in heads]
    if learner.inner.adapts == "all":
        return [_of_whole(learner, w, stats, episode, seed, kinds) for w in models]

    def look(x: Tensor, site: int) -> tuple[Tensor, Tree]:
        if looks is None:
            return learner.features(models[0], stats, x, seed, site)
        return looks(body, stats, x, seed, site)

    with torch.set_grad_enabled(torch.is_grad_enabled() and learner.inner.order == "second"):
        h, _ = look(episode.support_x, 0)
    query, moved = look(episode.query_x, _QUERY)
    again = look(episode.support_x, _SUPPORT)[0] if "adapted_both" in kinds else None
    found = []
    for w in models:
        adapted = learner.adapt_head(w, h, episode)
        p = {"adapted_query": learner.logits(adapted, query, episode.classes)}
        if "unadapted_query" in kinds:
            p["unadapted_query"] = learner.logits(w, query, episode.classes)
        if again is not None:
            support = learner.logits(adapted, again, episode.classes)
            p["adapted_both"] = torch.cat([p["adapted_query"], support])
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
    """Return the outlook of a model that adapts as a whole."""

    def predict(w: Tree, x: Tensor, site: int) -> tuple[Tensor, Tree]:
        return learner.predict(w, stats, x, episode.classes, seed, site)

    adapted = learner.adapt(params, stats, episode, seed)
    query, moved = predict(adapted, episode.query_x, _QUERY)
    p = {"adapted_query": query}
    if "unadapted_query" in kinds:
        p["unadapted_query"], _ = predict(params, episode.query_x, _QUERY)
    if "adapted_both" in kinds:
        p["adapted_both"] = torch.cat([query, predict(adapted, episode.support_x, _SUPPORT)[0]])
    return EpisodePredictions(query, moved, p)


def reference_logits(
    learner: Maml,
    params: Tree,
    stats: Tree,
    episode: Episode,
    seed: Tensor,
    kind: Predictions,
    looks: SharedFeatures | None = None,
) -> Tensor:
    """Return the logits of p(w) for a model that is a constant, its adapting included.

    First-order steps, because nobody differentiates them: the same values to rounding, for less
    work. `looks` are those of its body, where others look with it.
    """
    steps = 0 if kind == "unadapted_query" else learner.inner.steps
    still = replace(learner, inner=replace(learner.inner, order="first", steps=steps))
    w = tree.detach(params)
    body = w["body"] if looks is None else params["body"]  # which they know by what it is
    (found,) = paired_predictions(still, body, [w["head"]], stats, episode, seed, (kind,), looks)
    return found.p[kind].detach()
