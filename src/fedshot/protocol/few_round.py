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

from fedshot import tree
from fedshot.errors import ConfigError, QuorumError
from fedshot.keys import Key
from fedshot.nn import Local, Mode, Prototypes, Question, Share, in_order, shares_of, test_modes
from fedshot.protocol.averaging import OF_EXAMPLES
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Outcome, Reply
from fedshot.protocol.group import Group
from fedshot.protocol.method import Answer
from fedshot.protocol.reducers import Mean, Sum
from fedshot.tree import Tree

Asked: TypeAlias = Clients | Group
Work: TypeAlias = Callable[..., Reply]

_LARGEST = 2.0**20  # of a class's summed features


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
    local: Local, down: Tree, private: Tree, share: Share, *, equal: bool = False
) -> Reply:
    """Answer with a client's local steps, lines 12 to 16; `equal` weighs all clients alike."""
    learnt = local.learn(down["theta"], share, told_by(down))
    up: dict[str, Tree] = {"theta": tree.sub(learnt.theta, tree.detach(down["theta"]))}
    if not local.linear:
        up |= {"sums": learnt.sums, "counts": learnt.counts}
    metrics = {"support_loss": learnt.loss, "support_accuracy": learnt.accuracy}
    return Reply(up, private, 1 if equal else len(share.support_y), metrics)


def census_reply(local: Local, down: Tree, private: Tree, share: Share) -> Reply:
    """Answer with what prototypes are summed of, under the model that came down."""
    with torch.no_grad():
        sums, counts = local.census(down["theta"], share, down.get("stats"))
    return Reply({"sums": sums, "counts": counts}, private, len(share.support_y))


def check_rounds(*rounds: int | None) -> None:
    """Refuse a number of rounds below 0."""
    for count in rounds:
        if count is not None and count < 0:
            raise ConfigError(f"the number of rounds is {count}; expected a whole number from 0.")


def check_decay(decay: float, decay_round: int) -> None:
    """Refuse a factor or a round of the decay that cannot be."""
    if not 0 < decay <= 1 or decay_round < 0:
        raise ConfigError(
            f"decay is {decay} after round {decay_round}; expected a factor in (0, 1] and a round "
            "from 0."
        )


def slowed(decay: float, decay_round: int, exchanges: Tensor) -> float:
    """Return what a step is multiplied by after so many communication rounds."""
    return decay if decay_round and int(exchanges) >= decay_round else 1.0


def told_by(down: Tree) -> Prototypes | None:
    """Return the global prototypes that a message holds."""
    told: Prototypes | None = down.get("prototypes")
    return told


def message(theta: Tree, told: Prototypes | None, **parts: Tree) -> Tree:
    """Return the message of a round."""
    return {"theta": theta, **({} if told is None else {"prototypes": told}), **parts}


def few_rounds(
    asked: Asked,
    to: Sequence[int],
    works: tuple[Work, Work],
    local: Local,
    theta: Tree,
    numbers: int,
    rounds: int,
    key: Key,
    *,
    refresh: bool,
    stats: Tree | None = None,
) -> Adapted:
    """Let clients learn together for some rounds.

    Args:
        asked: who is asked: the population, or the group of a question.
        to: the cohort.
        works: the method's client work for a round and for a census, which answer by
            `update_reply` and `census_reply`.
        local: how a client learns.
        theta: theta_0.
        numbers: that there are for classes.
        rounds: R.
        key: of the episode.
        refresh: make the prototypes anew with theta_R, by an exchange of their own, in place of
            P_{R-1}, whose features are theta_{R-1}'s. Without a round there is always one.
        stats: statistics of batch norm that the census goes by; None for the supports' own.
    """
    update, census = works
    told, trail, loss = None, [], float("nan")
    for r in range(rounds):
        down = message(theta, told)
        reduce = {"theta": Mean(theta, OF_EXAMPLES)} | _sums(local, numbers, theta)
        got = asked.exchange(update, down, to=to, reduce=reduce, key=key.at("step", r))
        next_told, divisor = _joined(local, got, numbers)
        trail.append(Round(theta, told, got.weight, divisor, got.accepted))
        theta, told = tree.add(theta, got["theta"]), next_told
        loss = got.metrics["support_loss"]
    last = None
    if not local.linear and (refresh or not rounds):
        down = {"theta": theta} | ({} if stats is None else {"stats": stats})
        got = asked.exchange(
            census, down, to=to, reduce=_sums(local, numbers, theta), key=key.at("step", rounds)
        )
        told, divisor = _joined(local, got, numbers)
        last = Round(theta, None, got.weight, divisor, got.accepted)
    return Adapted(theta, told, tuple(trail), last, loss)


def _sums(local: Local, numbers: int, theta: Tree) -> dict[str, Sum]:
    if local.linear:
        return {}
    like = tree.leaves(theta)[0].new_zeros(numbers, local.d)
    return {"sums": Sum(like, _LARGEST), "counts": Sum(like[:, 0], _LARGEST)}


def _joined(local: Local, got: Outcome, numbers: int) -> tuple[Prototypes | None, Tensor]:
    if local.linear:
        return None, torch.zeros(numbers)
    return local.join(got["sums"], got["counts"])


def predict(local: Local, theta: Tree, told: Prototypes | None, h: Tensor, way: int) -> Tensor:
    """Return logits [n, way] of the maps, or flat features, of queries."""
    if told is None:
        used = torch.ones(local.model.head.way if local.model.head else 0, dtype=torch.bool)
        return local.head_logits(theta, h, used.to(h.device))[:, :way]
    return local.logits(local.rows(h), told)[:, :way]


def query_maps(local: Local, theta: Tree, stats: Tree, shares: Sequence[Share]) -> list[Tensor]:
    """Return what the network makes of every client's queries, by the model's batch-norm policy.

    "support": a client's queries go by the statistics of its own supports; "running": by those of
    training; "transductive": all clients' queries are one batch.
    """
    if local.model.norm_policy == "transductive":
        both = torch.cat([share.query_x for share in shares])
        h, _ = local.maps(theta, {}, both, Mode(norm="batch"))
        return list(torch.split(h, [len(share.query_x) for share in shares]))
    support, query = test_modes(local.model)
    found = []
    for share in shares:
        seen = stats
        if local.model.norm_policy == "support":
            _, seen = local.maps(theta, stats, share.support_x, support)
        found.append(local.maps(theta, seen, share.query_x, query)[0])
    return found


def answer_group(
    local: Local,
    stats: Tree,
    learn: Callable[[Group, Question, Key], Adapted],
    questions: Sequence[Question],
    clients: Clients,
    key: Key,
) -> list[Answer]:
    """Let the group of each question learn from its supports, and its one model answer.

    A group that diverges answers with NaN, which the examiner counts as wrong.

    Args:
        local: how a client learns.
        stats: running statistics of batch norm.
        learn: `learn(group, question, key)` gives what the group's rounds end in.
        questions: the questions; one that nobody has dealt is in the hand of one client.
        clients: their fleet spreads the questions over its cores.
        key: of this evaluation.
    """

    def answer(question: Question, key: Key) -> Tensor:
        way = len(question.classes)
        shares = shares_of(question, local.slots(way))
        learnt = learn(Group.of_shares(shares), question, key)
        with torch.no_grad():
            maps = query_maps(local, learnt.theta, stats, shares)
            parts = [predict(local, learnt.theta, learnt.told, h, way) for h in maps]
        return in_order(question, parts)

    return in_group(answer, questions, clients, key)


def in_group(
    answer: Callable[[Question, Key], Tensor],
    questions: Sequence[Question],
    clients: Clients,
    key: Key,
) -> list[Answer]:
    """Answer each question by `answer(question, key)`, with a key of its own."""

    def one(u: int) -> Answer:
        question = questions[u]
        try:
            logits = answer(question, key.at("question", u))
        except QuorumError:
            logits = torch.full((len(question.query_x), len(question.classes)), torch.nan)
        return Answer(u, None, logits.detach().float().cpu())

    return clients.spread(one, range(len(questions)))
