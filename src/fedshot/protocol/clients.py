"""The clients as a method sees them: sample a cohort, exchange messages, repeat.

This module knows neither where the clients run (the fleet does) nor what they exchange (the method
does).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Literal, TypeVar

from fedshot.core import tree
from fedshot.core.errors import DivergenceError, MethodError, QuorumError, RefusedError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.protocol.exchange import ClientWork, Exchange, Fault, Fleet, Outcome, PerClient, Reply
from fedshot.protocol.reducers import Reducer
from fedshot.protocol.robust_reducers import Aggregation

T = TypeVar("T")
R = TypeVar("R")

LAST = 10**6  # greater than any exchange number in a round


class Clients:
    """The population of clients during one round.

    Args:
        fleet: runs the clients.
        ids: clients that take part in this run.
        cohort: number of clients sampled per round; None for all.
        quorum: share of a cohort, in [0, 1], that must send usable replies; at least one must.
        round: number of the round, from 1; 0 is before training.
        phase: whether the round's traffic counts as training or evaluation.
        combine: runs an exchange and combines the replies; by default `reduce_replies`.
        aggregation: how parts are aggregated in training; None for the method's own reducers.
        buffer: number of replies that end an asynchronous exchange: see `Exchange`.
    """

    def __init__(
        self,
        fleet: Fleet,
        ids: Sequence[int],
        *,
        cohort: int | None = None,
        quorum: float = 0.5,
        round: int = 0,
        phase: Literal["train", "evaluate"] = "train",
        combine: Callable[[Fleet, Exchange], Outcome] | None = None,
        aggregation: Aggregation | None = None,
        buffer: int | None = None,
    ) -> None:
        self._buffer = buffer
        self._fleet, self.ids, self._cohort = fleet, ids, cohort
        self._aggregation = aggregation if phase == "train" else None
        self._quorum, self._round, self._phase = quorum, round, phase
        self._combine = combine or reduce_replies
        self._keys: set[tuple[Key, str]] = set()
        self.faults: list[tuple[int, Fault]] = []

    @property
    def exchanges(self) -> int:
        """Number of exchanges in this round."""
        return len(self._keys)

    def sample(self, key: Key) -> tuple[int, ...]:
        """Sample this round's cohort uniformly without replacement, in the order of the ids."""
        n = len(self.ids)
        if self._cohort is None or self._cohort >= n:
            return tuple(self.ids)
        chosen = key.at("cohort").numpy().choice(n, size=self._cohort, replace=False)
        return tuple(self.ids[i] for i in sorted(chosen.tolist()))

    def parallel_map(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Apply `fn` to every item on the server, on the fleet's cores; return results in order."""
        return self._fleet.parallel_map(fn, items)

    def recall(self, client: int, first: Tree) -> Tree:
        """Return the tree that the server keeps for a client; `first` if there is none yet.

        `first` has the structure of the stored trees. A tree stored during a round is only returned
        after that round.
        """
        last = self._round - (self._phase == "train")
        flat = self._fleet.bank.load(client, (last, LAST))
        return first if flat is None else tree.rebuild(first, flat)

    def remember(self, client: int, content: Tree) -> None:
        """Keep a tree for a client on the server's disk, for `recall` in later rounds."""
        self._fleet.bank.save(client, (self._round, 0), content)

    def exchange(
        self,
        work: Callable[..., Reply],
        down: Tree | PerClient,
        *,
        to: Sequence[int],
        reduce: Mapping[str, Reducer],
        key: Key,
    ) -> Outcome:
        """Run the client function `work` on the clients `to`, and reduce their uploads.

        Args:
            work: a client function (marked with `client_work`) as a bound method: `self.train`.
            down: the message; a tree, or `PerClient(fn)`.
            to: ids of the clients.
            reduce: one reducer for each part that the client function uploads.
            key: seeds all random draws; two exchanges of the same client function in one round need
                different keys.

        Raises:
            QuorumError: the usable replies are fewer than the quorum.
            DivergenceError: the usable replies are fewer than the quorum, and most of the faults
                are values that are not finite or too large.
            MethodError: `work` is not a client function, a client occurs twice in `to`, or the same
                function has been run with the same key in this round.
        """
        asked = ClientWork.of(work)
        if len(set(to)) != len(to):
            raise MethodError(
                f"{asked.name!r} is sent to a client twice; expected each client once."
            )
        if (key, asked.name) in self._keys:
            raise MethodError(
                f"a second exchange of {asked.name!r} in one round with the same key would draw "
                "the same episodes again; use key.at('step', r)."
            )
        # An evaluation reads the states at the end of its round, so its version is above theirs.
        version = (self._round, len(self._keys) if self._phase == "train" else LAST)
        self._keys.add((key, asked.name))
        if self._aggregation is not None:
            reduce = self._aggregation.reducers(asked.name, version[1], reduce)
        exchange = Exchange(
            asked, down, tuple(to), reduce, key, version, self._phase, buffer=self._buffer
        )
        outcome = self._reduce(exchange)
        self._fleet.settle(exchange, frozenset(outcome.accepted))
        self.faults += sorted(outcome.faults.items())
        self._check_quorum(outcome, exchange.expected)
        return outcome

    def _reduce(self, exchange: Exchange) -> Outcome:
        return self._combine(self._fleet, exchange)

    def _check_quorum(self, outcome: Outcome, asked: int) -> None:
        quorum = max(1, math.ceil(Fraction(str(self._quorum)) * asked))
        if len(outcome.accepted) >= quorum:
            return
        shown = [f"client {c}: {f.kind}, {f.reason}" for c, f in sorted(outcome.faults.items())]
        more = f"; and {len(shown) - 5} more" if len(shown) > 5 else ""
        text = (
            f"round {self._round}: {len(outcome.accepted)} of {asked} clients gave a usable reply, "
            f"the quorum is {quorum}."
        )
        if shown:
            text += f" {'; '.join(shown[:5])}{more}."
        if sum(f.diverged for f in outcome.faults.values()) > len(shown) / 2:
            raise DivergenceError(
                text,
                "Values that are not finite or too large mean that training diverges: lower the "
                "step sizes, in a new run.",
            )
        faults = outcome.faults.values()
        if faults and not outcome.accepted and all(fault.malformed for fault in faults):
            raise RefusedError(
                text,
                "Every reply was refused for its form. Correct the method: what it uploads must be "
                "what its exchange declares, its weight above 0 and at most 2**20, and a metric "
                "one number.",
            )
        raise QuorumError(
            text,
            f"To continue, {'lower run.quorum, or ' if quorum > 1 else ''}set run.below_quorum to "
            "'skip', in the run's config.yaml or in your own settings, and resume the run.",
        )


def reduce_replies(fleet: Fleet, exchange: Exchange) -> Outcome:
    """Stream the replies of `exchange` into its reducers; return the outcome.

    The result does not depend on the order of arrival.
    """
    sums = {name: reducer.start(exchange.expected) for name, reducer in exchange.reduce.items()}
    seen: dict[int, tuple[float, dict[str, float]]] = {}
    faults: dict[int, Fault] = {}
    for client, reply, fault in fleet.replies(exchange):
        if reply is None:
            faults[client] = fault or Fault("lost", "no reply")
            continue
        weight = float(reply.weight)
        for name, accumulator in sums.items():
            accumulator.add(client, reply.up[name], weight)
        seen[client] = (weight, {name: float(v) for name, v in reply.metrics.items()})
    total = math.fsum(weight for weight, _ in seen.values())
    names = sorted({name for _, metrics in seen.values() for name in metrics})
    return Outcome(
        parts={name: s.result() for name, s in sums.items()} if seen else {},
        accepted=tuple(sorted(seen)),
        faults=dict(sorted(faults.items())),
        weight=total,
        metrics={name: _mean(seen, name) for name in names},
    )


def _mean(seen: Mapping[int, tuple[float, dict[str, float]]], name: str) -> float:
    held = [(weight, metrics[name]) for weight, metrics in seen.values() if name in metrics]
    return math.fsum(w * v for w, v in held) / math.fsum(w for w, _ in held)
