"""A fleet for GPUs, each of which runs many clients at a time, as CUDA graphs on separate streams.

A client's work runs the same sequence of kernels as it would alone. So the bits of its results do
not depend on how many clients run at a time, nor on which of several equal GPUs runs them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch

from fedshot.core.graphs import Graphs, Result
from fedshot.core.tree import Tree
from fedshot.fleets.host import ClientCall, Host
from fedshot.fleets.sequential import Sequential
from fedshot.protocol.exchange import Arrival, Exchange, Reply


class Streams(Sequential):
    """A fleet that distributes its clients over the devices of `host`.

    Args:
        host: holds the clients' data and private states, and runs the method's client functions.
        most: maximum number of clients that a device runs at a time; fewer if memory is short.
    """

    def __init__(self, host: Host, most: int = 16) -> None:
        super().__init__(host)
        self.graphs = {device: Graphs(device, most) for device in host.devices}
        self._ahead = most * len(host.devices)
        self._methods: dict[int, Any] = {}

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the replies in the order of the cohort."""
        placed = {device: self.host.placed(exchange, device) for device in self.graphs}
        waiting: deque[Callable[[], Arrival]] = deque()
        for client, (device, own) in zip(exchange.to, cycle(placed.items()), strict=False):
            if len(waiting) == self._ahead:
                yield waiting.popleft()()
            waiting.append(self._start(own, self.host.prepare(own, client, device), device))
        for arrival in waiting:
            yield arrival()

    def _start(
        self, exchange: Exchange, call: ClientCall, device: torch.device
    ) -> Callable[[], Arrival]:
        work, checks = exchange.work, self.host.checks

        def run(inputs: Tree) -> Result:
            return checks.run(work, *(inputs[name] for name in ClientCall._fields[1:])).split()

        inputs = dict(zip(ClientCall._fields[1:], call[1:], strict=True))
        # The episodes of a test differ from one evaluation to the next: not worth recording.
        name = None
        if exchange.phase == "train":
            self._methods[id(work.method)] = work.method  # kept, so that the number stays its own
            name = id(work.method), work.name
        result = self.graphs[device].start(name, run, inputs)
        return lambda: self.host.finish(exchange, call, Reply.joined(*result()))
