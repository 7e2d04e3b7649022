"""How much each client moves a mean, and a bound on it by what the others of its cohort send.

The guard judges a reply by itself, so a client may send what is finite and a thousand times as
large as the others' changes. Here a part that goes into a `Mean` is held against the median norm
of the cohort's. What is refused or clipped does not depend on the order of arrival.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import torch

from fedshot.core import tree
from fedshot.core.errors import ConfigError, check_word
from fedshot.core.tree import Tree
from fedshot.fleets.guard import fault
from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol.exchange import Arrival, Exchange, Fault, Fleet, Reply
from fedshot.protocol.reducers import Mean

NormPolicy = Literal["off", "warn", "clip", "refuse"]
_FEW = 3  # replies of which a median says nothing, less one


def check_norms(policy: str, multiple: float) -> None:
    """Raise ConfigError for another policy, and for a multiple below 1."""
    check_word("norms", policy, get_args(NormPolicy))
    if not 1 <= multiple < math.inf:
        raise ConfigError(f"norm_multiple is {multiple}; expected a number from 1 on.")


class Influence(Wrapper):
    """A fleet whose clients' norms are measured, recorded and, on demand, bounded.

    Args:
        fleet: whose replies are measured.
        policy: what is done with a part whose norm is above the bound: "off", nothing, and no norm
            is measured; "warn", it is named; "clip", it is scaled down to the bound; "refuse", the
            reply does not count. The last two hold all replies of a cohort in memory.
        multiple: the bound, in medians of the norms of the cohort; from three replies on.
        record: told the weight, the norms and the share in the sum of weight times norm of every
            client, once for each exchange of training.
        tell: told who is above the bound.

    Raises ConfigError as `check_norms` does.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: NormPolicy,
        multiple: float,
        record: Callable[[dict[str, Any]], None],
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(fleet)
        check_norms(policy, multiple)
        self._policy, self._multiple = policy, multiple
        self._record, self._tell = record, tell

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the arrivals of the fleet; where norms are bounded, all after the last one."""
        means = [name for name, reducer in exchange.reduce.items() if isinstance(reducer, Mean)]
        if self._policy == "off" or exchange.phase != "train" or not means:
            yield from self.fleet.replies(exchange)
            return
        norms: dict[int, dict[str, float]] = {}
        weights: dict[int, float] = {}
        held: list[tuple[int, Reply]] = []
        for arrival in self.fleet.replies(exchange):
            client, reply, _ = arrival
            if reply is None or client in norms or fault(exchange, client, reply):
                yield arrival  # for the guard
                continue
            norms[client] = {name: _norm(reply.up[name]) for name in means}
            weights[client] = float(reply.weight)
            if self._policy == "warn":
                yield arrival
            else:
                held.append((client, reply))
        bounds = self._bounds(norms, means)
        for client, found in sorted(norms.items()):
            for name, most in bounds.items():
                if found[name] > most:
                    self._tell(f"client {client}: {self._words(name, found[name])}")
        for client, reply in held:
            yield self._bounded(client, reply, norms[client], bounds)
        self._note(exchange, norms, weights, bounds)

    def _bounds(
        self, norms: Mapping[int, Mapping[str, float]], parts: list[str]
    ) -> dict[str, float]:
        """Return the largest norm of each part; {} where there is none."""
        if len(norms) < _FEW:
            return {}
        medians = {name: statistics.median(found[name] for found in norms.values())
                   for name in parts}  # fmt: skip
        return {name: self._multiple * median for name, median in medians.items() if median > 0}

    def _bounded(
        self, client: int, reply: Reply, norms: Mapping[str, float], bounds: Mapping[str, float]
    ) -> Arrival:
        over = [name for name, most in bounds.items() if norms[name] > most]
        if not over:
            return Arrival(client, reply)
        if self._policy == "refuse":
            return Arrival(client, None, Fault("refused", self._words(over[0], norms[over[0]])))
        clipped = {name: _scaled(reply.up[name], bounds[name] / norms[name]) for name in over}
        return Arrival(client, reply._replace(up={**reply.up, **clipped}))

    def _words(self, part: str, norm: float) -> str:
        return (
            f"part {part!r} has norm {norm:.3g}, above {self._multiple:g} times the median of the "
            "cohort"
        )

    def _note(
        self,
        exchange: Exchange,
        norms: Mapping[int, Mapping[str, float]],
        weights: Mapping[int, float],
        bounds: Mapping[str, float],
    ) -> None:
        pull = {client: weights[client] * math.hypot(*found.values())
                for client, found in sorted(norms.items())}  # fmt: skip
        total = math.fsum(pull.values())
        told = {
            str(client): {
                "weight": weights[client],
                "norms": dict(norms[client]),
                "share": pull[client] / total if total else 0.0,
            }
            for client in pull
        }
        round, number = exchange.version
        self._record({
            "round": round, "exchange": number, "work": exchange.work.name,
            "policy": self._policy, "bounds": dict(bounds), "clients": told,
        })  # fmt: skip


def _norm(part: Tree) -> float:
    """Return the Euclidean norm of all leaves together, as they were sent."""
    return math.hypot(
        *(float(torch.linalg.vector_norm(leaf.detach(), dtype=torch.float64))
          for leaf in tree.leaves(part))
    )  # fmt: skip


def _scaled(part: Tree, by: float) -> Tree:
    return tree.map(lambda leaf: leaf * by, part)
