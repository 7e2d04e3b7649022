"""Clients stacked under `torch.func.vmap`: one launch of each operator for a whole chunk of them.

For GPUs, where a small model's step is too short to fill the device, and for small heads on a CPU;
for convolutions on a CPU it is three to four times slower than a loop. The arithmetic is regrouped,
so results agree with the other fleets in float64, and to rounding after one step in float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.fleets.host import ClientCall, Host
from fedshot.fleets.threads import Threads
from fedshot.protocol.exchange import Arrival, Exchange, PerClient, Reply


class Vectorised(Threads):
    """Chunks of clients, each chunk at once.

    Clients whose trees differ in shape, such as those with fewer queries, are stacked among
    themselves.

    Args:
        host: where the clients live.
        chunk: the most clients in one stack, which are as large as one another as can be; its
            memory is that of so many batches, and of so many models once they train. What all are
            sent alike is there once.
        workers: threads that run stacks; on a GPU, one.
        intra_op: threads that torch uses inside each of them.
    """

    def __init__(self, host: Host, chunk: int = 32, workers: int = 1, intra_op: int = 1) -> None:
        super().__init__(host, workers, intra_op)
        self.chunk = chunk

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the replies, stack by stack."""
        if not isinstance(exchange.down, PerClient):  # on the device once, not for each client
            exchange = replace(exchange, down=tree.to(exchange.down, self.host.device))
        n, stacks = len(exchange.to), -(-len(exchange.to) // self.chunk)
        cuts = [n * i // stacks for i in range(stacks + 1)]
        cohorts = (exchange.to[first:last] for first, last in pairwise(cuts))
        for arrivals in self.each(partial(self._serve, exchange), cohorts, stacks):
            yield from arrivals

    def _serve(self, exchange: Exchange, clients: Sequence[int]) -> list[Arrival]:
        """Run the work of clients, those of one shape at once."""
        alike: dict[tuple[Any, ...], list[ClientCall]] = defaultdict(list)
        for client in clients:
            visit = self.host.prepare(exchange, client)
            alike[_shapes(visit)].append(visit)
        return [arrival for visits in alike.values() for arrival in self._run(exchange, visits)]

    def _run(self, exchange: Exchange, visits: Sequence[ClientCall]) -> Iterator[Arrival]:
        apart = isinstance(exchange.down, PerClient)  # one message for all is not stacked
        stacked = {"private": _stack([v.private for v in visits]),
                   "drawn": _stack([v.drawn for v in visits])}  # fmt: skip
        if apart:
            stacked["down"] = _stack([v.down for v in visits])
        weights: list[Any] = []

        def one(mapped: dict[str, Tree]) -> tuple[Any, ...]:
            down = mapped["down"] if apart else visits[0].down
            reply = self.host.checks.run(exchange.work, down, mapped["private"], mapped["drawn"])
            weight = reply.weight
            if isinstance(weight, torch.Tensor):
                return dict(reply.up), reply.private, dict(reply.metrics), weight
            weights.append(weight)
            return dict(reply.up), reply.private, dict(reply.metrics)

        got = torch.func.vmap(one)(stacked) if tree.leaves(stacked) else _repeat(one, visits)
        each = (_apart(part, len(visits)) for part in got)
        for visit, (up, private, metrics, *weight) in zip(
            visits, zip(*each, strict=True), strict=True
        ):
            reply = Reply(up, private, weight[0] if weight else weights[0], metrics)
            yield self.host.finish(exchange, visit, reply)


class _WholeStack(NamedTuple):
    """A part that is the same for all clients of a stack."""

    part: Any


def _repeat(one: Any, visits: Sequence[ClientCall]) -> tuple[Any, ...]:
    """Answer for clients that have nothing of their own: once for all of them."""
    del visits
    return tuple(_WholeStack(part) for part in one({"private": {}, "drawn": {}, "down": {}}))


def _apart(part: Any, n: int) -> list[Any]:
    """Return each client's share of what a stack came to."""
    if isinstance(part, _WholeStack):
        return [part.part] * n
    leaves = zip(*(leaf.unbind() for leaf in tree.leaves(part)), strict=True)
    return [tree.unflatten(part, own) for own in leaves] if tree.leaves(part) else [part] * n


def _stack(trees: Sequence[Tree]) -> Tree:
    return tree.map(lambda *leaves: torch.stack(leaves), *trees)


def _shapes(visit: ClientCall) -> tuple[Any, ...]:
    return tuple(_form(part) for part in (visit.down, visit.private, visit.drawn))


def _form(part: Tree) -> tuple[Any, ...]:
    """Return names, shapes and types."""
    if isinstance(part, torch.Tensor):
        return part.shape, part.dtype
    if isinstance(part, tuple):
        return type(part), *map(_form, part)
    return tuple((name, _form(part[name])) for name in sorted(part, key=str))
