"""A wrapper that measures, and can bound, the influence of each client on an average.

The guard checks replies one by one, so a client may send an update a thousand times as large as
other clients' updates. This wrapper compares the norm of each part of an upload that `Mean`
averages with the median over the cohort. The result does not depend on the order of arrival.
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
_FEWEST = 3  # fewest replies with a meaningful median


def check_norms(policy: str, multiple: float) -> None:
    """Raise ConfigError for an unknown policy or a multiple below 1."""
    check_word("norms", policy, get_args(NormPolicy))
    if not 1 <= multiple < math.inf:
        raise ConfigError(f"norm_multiple is {multiple}; expected a finite number of at least 1.")


class Influence(Wrapper):
    """A fleet that measures, records and optionally bounds the norms of the clients' updates.

    Args:
        fleet: the fleet whose replies are measured.
        policy: what to do with a part of an upload whose norm exceeds the bound. "off" measures
            nothing, "warn" reports the client, "clip" scales the part down to the bound, and
            "refuse" discards the reply. "clip" and "refuse" keep all replies of a cohort in memory.
        multiple: the bound, as a multiple of the cohort's median norm. With fewer than three
            replies there is no bound.
        record: called once per training exchange with each client's weight, norms and share. The
            share is the client's weight times its norm, divided by the sum of these products over
            the cohort.
        tell: called with a message for each part above the bound.

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
        """Yield the fleet's arrivals.

        With the policy "clip" or "refuse", valid replies are yielded once all have arrived.
        """
        means = [name for name, reducer in exchange.reduce.items() if isinstance(reducer, Mean)]
        if self._policy == "off" or exchange.phase != "train" or not means:
            yield from self.fleet.replies(exchange)
            return
        norms: dict[int, dict[str, float]] = {}
        weights: dict[int, float] = {}
        held: list[tuple[int, Reply]] = []
        for arrival in self.fleet.replies(exchange):
            client, reply, _ = arrival
            if client in norms:
                continue  # only a client's first reply counts
            if reply is None or fault(exchange, client, reply):
                yield arrival  # the guard handles such replies
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
                    self._tell(f"client {client}: {self._excess(name, found[name])}")
        for client, reply in held:
            yield self._bounded(client, reply, norms[client], bounds)
        self._write(exchange, norms, weights, bounds)

    def _bounds(
        self, norms: Mapping[int, Mapping[str, float]], parts: list[str]
    ) -> dict[str, float]:
        """Return the bound on the norm of each part of an upload, by the part's name.

        Parts without a bound are left out.
        """
        if len(norms) < _FEWEST:
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
            return Arrival(client, None, Fault("refused", self._excess(over[0], norms[over[0]])))
        clipped = {}
        for name in over:
            by = bounds[name] / norms[name]
            clipped[name] = tree.map(lambda leaf, by=by: leaf * by, reply.up[name])
        return Arrival(client, reply._replace(up={**reply.up, **clipped}))

    def _excess(self, part: str, norm: float) -> str:
        return (
            f"part {part!r} has norm {norm:.3g}, above {self._multiple:g} times the median of the "
            "cohort"
        )

    def _write(
        self,
        exchange: Exchange,
        norms: Mapping[int, Mapping[str, float]],
        weights: Mapping[int, float],
        bounds: Mapping[str, float],
    ) -> None:
        pull = {client: weights[client] * math.hypot(*found.values())
                for client, found in sorted(norms.items())}  # fmt: skip
        total = math.fsum(pull.values())
        clients = {
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
            "policy": self._policy, "bounds": dict(bounds), "clients": clients,
        })  # fmt: skip


def _norm(part: Tree) -> float:
    """Return the Euclidean norm of all leaves of a part of an upload together."""
    return math.hypot(
        *(float(torch.linalg.vector_norm(leaf.detach(), dtype=torch.float64))
          for leaf in tree.leaves(part))
    )  # fmt: skip
