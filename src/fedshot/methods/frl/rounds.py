"""R rounds of federated learning inside an episode, as Park et al.'s algorithm 1 has them.

Lines 5 to 21: a client is sent theta_r and, from the second round on, P_{r-1}; it sends its change
of theta and what the prototypes are summed of; the server averages the one and divides the other.
The methods that do so share these functions; each names its own client work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.methods.frl.client_share import EpisodeShare
from fedshot.methods.frl.group import Group
from fedshot.methods.frl.local_steps import FewRoundLearner, Prototypes
from fedshot.protocol.averaging import OF_EXAMPLES, OF_FEATURES
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Outcome, Reply
from fedshot.protocol.reducers import Mean, Sum

Asked: TypeAlias = Clients | Group
Work: TypeAlias = Callable[..., Reply]
Norms: TypeAlias = Callable[[Tree], Tree | None]
"""From a model to the statistics of its batch norm for everyone; None for each client's own."""


def own_norms(theta: Tree) -> None:
    """Leave every client to the statistics of its own examples."""
    del theta


class Round(NamedTuple):
    """What a round started from, and how its replies were joined."""

    theta: Tree
    told: Prototypes | None
    weight: float  # sum of the clients' weights
    divisor: Tensor  # [numbers], of the summed features
    accepted: tuple[int, ...]


class Adapted(NamedTuple):
    """Where the rounds ended: theta_R, the global prototypes, and how they came about."""

    theta: Tree
    told: Prototypes | None
    trail: tuple[Round, ...]  # of the rounds
    census: Round | None  # of the exchange for prototypes alone
    loss: float  # of the supports in the last round, nats; NaN without one


def update_reply(
    local: FewRoundLearner, down: Tree, private: Tree, share: EpisodeShare, *, equal: bool = False
) -> Reply:
    """Answer with a client's local steps, lines 12 to 16; `equal` weighs all clients alike."""
    learnt = local.learn(down["theta"], share, told_metrics(down))
    up: dict[str, Tree] = {"theta": tree.sub(learnt.theta, tree.detach(down["theta"]))}
    if not local.linear:
        up |= {"sums": learnt.sums, "counts": learnt.counts}
    metrics = {"support_loss": learnt.loss, "support_accuracy": learnt.accuracy}
    return Reply(up, private, 1 if equal else len(share.support_y), metrics)


def prototype_reply(
    local: FewRoundLearner, down: Tree, private: Tree, share: EpisodeShare
) -> Reply:
    """Answer with what prototypes are summed of, under the model that came down."""
    with torch.no_grad():
        sums, counts = local.census(down["theta"], share, down.get("stats"))
    return Reply({"sums": sums, "counts": counts}, private, len(share.support_y))


def told_metrics(down: Tree) -> Prototypes | None:
    """Return the global prototypes that a message holds."""
    told: Prototypes | None = down.get("prototypes")
    return told


def message(theta: Tree, told: Prototypes | None, **parts: Tree) -> Tree:
    """Return the message of a round."""
    return {"theta": theta, **({} if told is None else {"prototypes": told}), **parts}


def few_rounds(
    asked: Asked,
    to: Sequence[int],
    works: tuple[Work | None, Work | None],
    local: FewRoundLearner,
    theta: Tree,
    numbers: int,
    rounds: int,
    key: Key,
    *,
    refresh: bool,
    norms: Norms = own_norms,
) -> Adapted:
    """Let clients learn together for some rounds.

    Args:
        asked: who is asked: the population, or the group of a question.
        to: the cohort.
        works: the method's client work for a round and for a census, which answer by
            `update_reply` and `prototype_reply`; None for one that is never asked.
        local: how a client learns.
        theta: theta_0.
        numbers: that there are for classes.
        rounds: R.
        key: of the episode.
        refresh: make the prototypes anew with theta_R, by an exchange of their own, in place of
            P_{R-1}, whose features are theta_{R-1}'s. Without a round there is always one.
        norms: the statistics of batch norm that the census goes by.
    """
    update, census = works
    told, trail, loss = None, [], float("nan")
    for r in range(rounds):
        assert update is not None
        down = message(theta, told)
        reduce = {"theta": Mean(theta, OF_EXAMPLES)} | _sums(local, numbers, theta)
        got = asked.exchange(update, down, to=to, reduce=reduce, key=key.at("step", r))
        next_told, divisor = _joined(local, got, numbers)
        trail.append(Round(theta, told, got.weight, divisor, got.accepted))
        theta, told = tree.add(theta, got["theta"]), next_told
        loss = got.metrics["support_loss"]
    last = None
    if not local.linear and (refresh or not rounds):
        assert census is not None
        stats = norms(theta)
        down = {"theta": theta} | ({} if stats is None else {"stats": stats})
        got = asked.exchange(
            census, down, to=to, reduce=_sums(local, numbers, theta), key=key.at("step", rounds)
        )
        told, divisor = _joined(local, got, numbers)
        last = Round(theta, None, got.weight, divisor, got.accepted)
    return Adapted(theta, told, tuple(trail), last, loss)


def _sums(local: FewRoundLearner, numbers: int, theta: Tree) -> dict[str, Sum]:
    if local.linear:
        return {}
    like = tree.leaves(theta)[0].new_zeros(numbers, local.d)
    return {"sums": Sum(like, OF_FEATURES), "counts": Sum(like[:, 0], OF_FEATURES)}


def _joined(local: FewRoundLearner, got: Outcome, numbers: int) -> tuple[Prototypes | None, Tensor]:
    if local.linear:
        return None, torch.zeros(numbers)
    return local.join(got["sums"], got["counts"])
