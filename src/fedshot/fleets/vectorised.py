"""A fleet that stacks clients and runs them together under `torch.func.vmap`.

It suits GPUs, where a step of one small model leaves most of the device idle, and small heads on a
CPU; convolutions on a CPU are three to four times slower than with `Threads`. Operations are
regrouped, so in float32 the results differ from those of other fleets by rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.fleets.host import ClientCall, Host
from fedshot.fleets.threads import Threads
from fedshot.protocol.exchange import Arrival, Exchange, PerClient, Reply


class Vectorised(Threads):
    """A fleet that runs a cohort in chunks, each as stacked tensors.

    Clients of a chunk whose inputs differ in shape, for example in the number of queries, form
    separate stacks.

    Args:
        host: holds the clients' data and private states, and runs the method's client functions.
        chunk: maximum number of clients in a chunk; chunks have nearly equal sizes. A stack needs
            memory for one batch and one model per client. A message that is the same for all
            clients is stored once.
        workers: number of threads that run chunks; use 1 on a GPU.
        intra_op: number of torch threads within each worker.
    """

    def __init__(self, host: Host, chunk: int = 32, workers: int = 1, intra_op: int = 1) -> None:
        super().__init__(host, workers, intra_op)
        self.chunk = chunk

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the replies, chunk by chunk."""
        exchange = self.host.placed(exchange)
        n, stacks = len(exchange.to), -(-len(exchange.to) // self.chunk)
        cuts = [n * i // max(1, stacks) for i in range(stacks + 1)]
        cohorts = (exchange.to[first:last] for first, last in pairwise(cuts))
        for arrivals in self.each(partial(self._serve, exchange), cohorts, stacks):
            yield from arrivals

    def _serve(self, exchange: Exchange, clients: Sequence[int]) -> list[Arrival]:
        """Run an exchange's client function for a chunk of clients; return their replies.

        Clients whose inputs have equal shapes are stacked.
        """
        stacks: dict[tuple[Any, ...], list[ClientCall]] = defaultdict(list)
        for client in clients:
            call = self.host.prepare(exchange, client)
            stacks[tuple(_form(part) for part in call[1:])].append(call)
        return [arrival for calls in stacks.values() for arrival in self._run(exchange, calls)]

    def _run(self, exchange: Exchange, calls: Sequence[ClientCall]) -> Iterator[Arrival]:
        per_client = isinstance(exchange.down, PerClient)  # a common message is not stacked
        stacked = {"private": tree.stack([call.private for call in calls]),
                   "drawn": tree.stack([call.drawn for call in calls])}  # fmt: skip
        if per_client:
            stacked["down"] = tree.stack([call.down for call in calls])
        stacked = tree.to(stacked, self.host.device)
        weights: list[float | None] = []

        def one(mapped: dict[str, Tree]) -> dict[str, Tree]:
            down = mapped["down"] if per_client else calls[0].down
            reply = self.host.checks.run(exchange.work, down, mapped["private"], mapped["drawn"])
            tensors, weight = reply.split()
            weights.append(weight)
            return tensors

        differ = bool(tree.leaves(stacked))  # else all clients have the same inputs
        run = torch.func.vmap(one) if differ else one
        found = tree.to(run(stacked), torch.device("cpu"))
        for i, call in enumerate(calls):
            own = tree.index(found, i) if differ else found
            yield self.host.finish(exchange, call, Reply.joined(own, weights[0]))


def _form(part: Tree) -> tuple[Any, ...]:
    """Return the structure of a tree: the names, shapes and dtypes of its leaves."""
    if isinstance(part, torch.Tensor):
        return part.shape, part.dtype
    if isinstance(part, tuple):
        return type(part), *map(_form, part)
    return tuple((name, _form(part[name])) for name in sorted(part, key=str))
