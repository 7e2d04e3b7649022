"""A process per core, each running one client after another: for work that threads would hold up.

Python lets one thread of a process at a time run Python. Where a client's step is short, threads
wait for one another between its operators; processes do not. Each exchange forks its workers, which
find everything in memory as it stands: data, method, message, private states. What comes back from
a client goes through a pipe as arrays, names and numbers (`fedshot.codec`). Kept and counted is it
by the process that asked, so ledger, guard and private states are as in `Threads`, to the bit.

The server's own work (`spread`) is done by threads of that process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from fedshot import tree
from fedshot.codec import Limits, pack, unpack
from fedshot.errors import ConfigError
from fedshot.fleets.crew import Crew, Packet
from fedshot.fleets.host import Host, Visit
from fedshot.fleets.threads import Threads
from fedshot.protocol import Arrival, Exchange, Reply

_ANY = Limits(message=2**63, head=2**63, leaves=2**31)  # it comes from this program itself


class Processes(Threads):
    """A crew of forked processes for each exchange.

    Args:
        host: where the clients live.
        workers: processes that run clients, each with one intra-op thread. One alone is this one.
        intra_op: threads that torch uses where there is one worker.

    Raises ConfigError for several workers of several threads: those of OpenMP do not survive a
    fork.
    """

    def __init__(self, host: Host, workers: int, intra_op: int = 1) -> None:
        super().__init__(host, workers, intra_op)
        if workers > 1 and intra_op > 1:
            raise ConfigError(
                f"run.threads is {intra_op} with run.fleet 'processes', whose {workers} workers "
                "have one thread each. Set run.threads to 1, or run.fleet to 'threads'."
            )

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the replies as they come in."""
        if min(self.workers, len(exchange.to)) == 1:
            yield from super().replies(exchange)
            return
        quiet = replace(exchange, on_send=None)  # what a worker counted would be lost with it
        for client in exchange.to:
            exchange.message(client)
        with Crew(self.workers, partial(self._work, quiet), exchange.to) as crew:
            for client, packet in crew:
                before = self.host.private(client, exchange.version)
                visit = Visit(client, {}, before, {})
                yield self.host.finish(exchange, visit, _opened(packet))

    def _work(self, exchange: Exchange, client: int) -> Packet:
        """Run the work of one client, in a worker."""
        torch.set_num_threads(1)
        visit = self.host.prepare(exchange, client)
        reply = exchange.work(visit.down, visit.private, visit.drawn)
        tensor = isinstance(reply.weight, torch.Tensor)
        content = {"up": dict(reply.up), "private": reply.private, "metrics": dict(reply.metrics)}
        form, data = pack(tree.detach(content | ({"weight": reply.weight} if tensor else {})))
        return Packet({"form": form, "weight": None if tensor else reply.weight}, data)


def _opened(packet: Packet) -> Reply:
    content = unpack(packet.head["form"], packet.data, _ANY, trusted=True)
    weight = content.get("weight", packet.head["weight"])
    return Reply(content["up"], content["private"], weight, content["metrics"])
