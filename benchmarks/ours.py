"""fedshot as its users run it: a host, a fleet, the ledger and the guard, and the method's round.

`FLEETS` is the table of what takes part; another fleet joins by a line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plain import State
from work import PreparedWork, named

from fedshot.core.machine import arithmetic, cores
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.meter import Meter
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.threads import Threads
from fedshot.fleets.vectorised import Vectorised
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Fleet
from fedshot.protocol.method import ModelState


@dataclass(frozen=True)
class Plan:
    """How a fleet is made, and how many threads torch has in each of its workers."""

    make: Callable[[Host], Fleet]
    threads: int
    cores: int  # that it uses altogether
    nets: tuple[str, ...] | None = None  # those in whose rounds it takes part; None for all


N = cores()
FLEETS: dict[str, Plan] = {
    "threads": Plan(lambda host: Threads(host, N, 1), 1, N),
    "sequential": Plan(Sequential, N, N),
    # Stacked convolutions are slow on a CPU; torch's recurrent kernel cannot be stacked.
    "vectorised": Plan(lambda host: Vectorised(host, 32, N, 1), 1, N, ("mlp",)),
    "vectorised, one stack": Plan(lambda host: Vectorised(host, 64, 1, N), N, N, ("mlp",)),
}


def taking(net: str) -> tuple[str, ...]:
    """Return the fleets that take part in the rounds of a net."""
    return tuple(name for name, plan in FLEETS.items() if plan.nets is None or net in plan.nets)


REFERENCE = "fedshot, threads"


class Round:
    """The same round over and over; `threads` are those of torch, by default the fleet's."""

    def __init__(
        self, bench: PreparedWork, fleet: str, folder: Path, threads: int | None = None
    ) -> None:
        self.bench, plan = bench, FLEETS[fleet]
        self.threads = threads or plan.threads
        store = PrivateStore(folder / fleet)
        host = Host(bench.method, bench.dataset, bench.partition, store, bench.key)
        self.meter = Meter(plan.make(host))
        self.fleet = Guard(self.meter)

    def __call__(self) -> ModelState:
        """Return the server's state after the round."""
        bench = self.bench
        clients = Clients(self.fleet, range(bench.work.clients), quorum=1.0, round=1)
        with arithmetic(self.threads):
            server, _ = bench.method.round(bench.server, clients, bench.key)
        assert self.meter.total("train", "up") > 0
        return server

    def state(self) -> State:
        """Return the state after the round under the names of the peers."""
        after = self()
        return named(after.theta, after.stats)
