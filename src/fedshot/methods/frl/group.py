"""Clients in the caller's own process: for groups of test clients, and for proxy data.

A method exchanges with a `Group` as with `Clients`, and gets bit-identical results. There is no
fleet, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from fedshot.core import tree
from fedshot.core.errors import QuorumError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.protocol.clients import reduce_replies
from fedshot.protocol.exchange import (
    Arrival,
    ClientWork,
    Exchange,
    Fault,
    Outcome,
    PerClient,
    Reply,
)
from fedshot.protocol.reducers import Reducer


class Group:
    """A few clients without private states.

    Args:
        drawn: `drawn(exchange, k)` returns the random inputs of the exchange's client function for
            client k.
        clients: number of clients.
    """

    def __init__(self, drawn: Callable[[Exchange, int], Tree], clients: int) -> None:
        self._drawn, self.ids = drawn, tuple(range(clients))

    @classmethod
    def of_shares(cls, shares: Sequence[Tree]) -> Group:
        """Return a group in which client k always works on `shares[k]`, without random draws."""
        return cls(lambda _, k: shares[k], len(shares))

    @classmethod
    def of_data(cls, data: Sequence[ClientData]) -> Group:
        """Return a group of clients with these data; they draw from it as remote clients do."""
        return cls(lambda one, k: one.work.draw(data[k], one.client_key(k)), len(data))

    def sample(self, key: Key) -> tuple[int, ...]:
        """Return all clients of the group."""
        del key
        return self.ids

    def exchange(
        self,
        work: Callable[..., Reply],
        down: Tree | PerClient,
        *,
        to: Sequence[int],
        reduce: Mapping[str, Reducer],
        key: Key,
    ) -> Outcome:
        """Run the client function `work` for the clients `to`, and reduce their replies.

        This is `Clients.exchange` without a fleet. A reply that a reducer rejects is a fault.
        Raises QuorumError if no reply is usable.
        """
        exchange = Exchange(ClientWork.of(work), down, tuple(to), reduce, key, (0, 0))
        outcome = reduce_replies(self, exchange)  # type: ignore[arg-type]
        device = self._device(down)
        if device.type != "cpu":  # sums are made on the CPU, as those of clients are
            outcome = replace(outcome, parts=tree.to(dict(outcome.parts), device))
        if not outcome.accepted:
            reasons = "; ".join(f"client {c}: {f.reason}" for c, f in outcome.faults.items())
            raise QuorumError(f"no client of the group gave a usable reply: {reasons}")
        return outcome

    @staticmethod
    def _device(down: Tree | PerClient) -> torch.device:
        first = [] if isinstance(down, PerClient) else tree.leaves(down)
        return first[0].device if first else torch.device("cpu")

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the clients' replies; it is all of a fleet that `reduce_replies` needs."""
        for client in exchange.to:
            message = exchange.message(client)
            reply = exchange.work(message, {}, self._drawn(exchange, client)).on_cpu()
            faults = (
                reducer.fault(client, reply.up[name], float(reply.weight))
                for name, reducer in exchange.reduce.items()
            )
            reason = next((text for text in faults if text), None)
            if reason:
                yield Arrival(client, None, Fault("refused", reason))
            else:
                yield Arrival(client, reply)
