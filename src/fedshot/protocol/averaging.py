"""Federated averaging: the server's parts move by the mean of how far they moved at the clients.

Source: McMahan et al. 2017, algorithm 1. Clients upload w_k - w, so the mean is of changes:
w + sum_k n_k (w_k - w) / n = sum_k n_k w_k / n. Small numbers keep more of their digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.learner import EpisodeLoss
from fedshot.learners.local_training import LocalSteps, local_sgd
from fedshot.learners.prediction_drift import divergence
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Outcome, Reply
from fedshot.protocol.reducers import Gather, Mean, Reducer

E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)

# What a mean admits of n_k times a change where n_k is a number of examples, not of episodes.
OF_EXAMPLES = 2.0**26
OF_FEATURES = 2.0**20  # limit of a class's summed features, and of its examples


def changes(new: Mapping[str, Tree], old: Tree) -> dict[str, Tree]:
    """Return how far each named part of `new` moved; `old` is the message that came down."""
    return {name: tree.sub(part, old[name]) for name, part in new.items()}


class WeightedSteps(LocalSteps[E_co], Protocol[E_co]):
    """What a visit learns from, and how many examples the client holds."""

    @property
    def n(self) -> Tensor:
        """n_k."""
        ...


def local_reply(
    episode_loss: Callable[[Tree, Tree, E, Tensor], EpisodeLoss],
    optimizer: Optimizer,
    down: Tree,
    private: Tree,
    drawn: WeightedSteps[E],
    weight: int | None = None,
) -> Reply:
    """Take local steps from "theta" and "stats"; send the changes with weight n_k, or `weight`."""
    new = local_sgd(episode_loss, optimizer, down["theta"], down["stats"], drawn)
    up = changes({"theta": new.params, "stats": new.stats}, down)
    return Reply(up, private, drawn.n if weight is None else weight, new.metrics)


def average(
    clients: Clients,
    work: Callable[..., Reply],
    parts: Mapping[str, Tree],
    key: Key,
    *,
    max_weight: int | None,
    down: Mapping[str, Tree] = {},
    reduce: Mapping[str, Reducer] = {},
    common: Mapping[str, Tensor] = {},
) -> tuple[dict[str, Tree], Outcome]:
    """Return each part moved by the mean change at a cohort, and how the exchange went.

    Args:
        clients: the population; `key` decides the cohort.
        work: client work that is sent the parts and uploads their `changes` under the same names.
        parts: trees of floats, by name.
        key: of the round.
        heaviest: the most episodes that a client can use, where these are its weight; None where
            its weight is the number of its examples.
        down: what is sent beside the parts.
        reduce: reducers of what is uploaded beside the changes.
        common: the `common_form` of questions that the work answers by `answer_common`; the metrics
            then tell the `divergence` of the answers.
    """
    bound: dict[str, Any] = {"limit": OF_EXAMPLES, "of_examples": True}
    if max_weight is not None:
        bound = {"max_weight": max_weight}
    got = clients.exchange(
        work,
        {**parts, **down},
        to=clients.sample(key),
        reduce={
            **{name: Mean(part, **bound) for name, part in parts.items()},
            **{name: Gather(form) for name, form in common.items()},
            **reduce,
        },
        key=key,
    )
    new = {name: tree.add(part, got[name]) for name, part in parts.items()}
    return new, replace(got, metrics={**got.metrics, **divergence(got)})
