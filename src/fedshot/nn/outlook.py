"""What a MAML model predicts of an episode in training, for losses that compare two models.

The papers write p(w) and leave open on which examples, and whether w has adapted to the episode's
support before. Where the labels of an episode are shuffled, a head that has not adapted cannot know
which class is which: the default is the queries, after adapting.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedshot import tree
from fedshot.data import Episode
from fedshot.nn.learners import Maml
from fedshot.tree import Tree

Predictions = Literal["adapted_query", "unadapted_query", "adapted_both"]
PREDICTIONS = ("adapted_query", "unadapted_query", "adapted_both")

_QUERY, _SUPPORT = -1, -2  # sites of the dropout masks


class Outlook(NamedTuple):
    """One model on one episode."""

    query: Tensor  # logits [queries, way] after adapting, for the task loss
    stats: Tree  # running statistics, moved by the pass of the queries
    p: dict[str, Tensor]  # logits [rows, way] of p(w), by the kind of prediction


def outlook(
    learner: Maml,
    params: Tree,
    stats: Tree,
    episode: Episode,
    seed: Tensor,
    kinds: Collection[Predictions] = (),
) -> Outlook:
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
    adapted = learner.adapt(params, stats, episode, seed)
    classes = episode.classes
    query, moved = learner.predict(adapted, stats, episode.query_x, classes, seed, _QUERY)
    p = {"adapted_query": query}
    if "unadapted_query" in kinds:
        before, _ = learner.predict(params, stats, episode.query_x, classes, seed, _QUERY)
        p["unadapted_query"] = before
    if "adapted_both" in kinds:
        support, _ = learner.predict(adapted, stats, episode.support_x, classes, seed, _SUPPORT)
        p["adapted_both"] = torch.cat([query, support])
    return Outlook(query, moved, p)


def reference_logits(
    learner: Maml, params: Tree, stats: Tree, episode: Episode, seed: Tensor, kind: Predictions
) -> Tensor:
    """Return the logits of p(w) for a model that is a constant, its adapting included.

    First-order steps, because nobody differentiates them: the same values to rounding, for less
    work.
    """
    steps = 0 if kind == "unadapted_query" else learner.inner.steps
    still = replace(learner, inner=replace(learner.inner, order="first", steps=steps))
    return outlook(still, tree.detach(params), stats, episode, seed, (kind,)).p[kind].detach()
