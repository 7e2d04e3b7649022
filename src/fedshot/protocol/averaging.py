"""Federated averaging: the server adds the mean of the clients' changes to its weights.

Source: McMahan et al. 2017, algorithm 1. Clients upload w_k - w, so the server averages changes:
w + sum_k n_k (w_k - w) / n = sum_k n_k w_k / n. Changes are smaller than
weights, so they lose less to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.learner import EpisodeLoss
from fedshot.learners.local_training import LocalSteps, local_sgd
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Outcome, Reply
from fedshot.protocol.reducers import Mean, Reducer

E = TypeVar("E")

# Largest n_k * |change| that a mean accepts, where n_k counts examples, not episodes.
OF_EXAMPLES = 2.0**26
OF_FEATURES = 2.0**20  # limit on a class's summed features, and on its number of examples


def changes(new: Mapping[str, Tree], old: Tree) -> dict[str, Tree]:
    """Return `new` minus `old`, tree by tree; `old` is the message that the client received."""
    return {name: tree.sub(part, old[name]) for name, part in new.items()}


def local_reply(
    episode_loss: Callable[[Tree, Tree, E, Tensor], EpisodeLoss],
    optimizer: Optimizer,
    down: Tree,
    private: Tree,
    drawn: LocalSteps[E],
    weight: int | None = None,
) -> Reply:
    """Train from "theta" and "stats" in the message `down`; reply with their changes.

    The reply's weight is `weight`, or the client's number of examples if that is None.
    """
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
) -> tuple[dict[str, Tree], Outcome]:
    """Add the cohort's mean change to each part; return the parts and the exchange's outcome.

    Args:
        clients: the population; `key` decides the cohort.
        work: client function that receives the parts and uploads their `changes` under the same
            names.
        parts: the trees of floats to average, by name; "stats" are running statistics.
        key: key of the round.
        max_weight: replies with a larger weight are rejected. None if the weights that `work`
            returns are the clients' numbers of examples.
        down: trees that clients receive besides the parts.
        reduce: reducers for parts that clients upload besides the changes.
    """
    bound: dict[str, Any] = {"limit": OF_EXAMPLES, "of_examples": True}
    if max_weight is not None:
        bound = {"max_weight": max_weight}
    got = clients.exchange(
        work,
        {**parts, **down},
        to=clients.sample(key),
        reduce={
            **{n: Mean(part, **bound, of_statistics=n == "stats") for n, part in parts.items()},
            **reduce,
        },
        key=key,
    )
    return {name: tree.add(part, got[name]) for name, part in parts.items()}, got
