"""What a secure sum of 100,000 parameters costs a client and the server: bytes and CPU seconds.

    python benchmarks/secure_sums.py [CLIENTS ...]

prints the table of docs/privacy.md; by default for 10, 100 and 1,000 clients. Seconds are those of
one core, of the protocol alone: the clients do no work, and are lost when they upload.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch

from fedshot.core.seeds import Key
from fedshot.fleets.meter import Meter
from fedshot.fleets.unreliable import Unreliable
from fedshot.fleets.wrapper import Wrapper
from fedshot.privacy.secure_sums.masking_clients import MaskingClients
from fedshot.privacy.secure_sums.server_sum import SecureSums
from fedshot.protocol.clients import reduce_replies
from fedshot.protocol.exchange import Arrival, ClientWork, Exchange, Reply
from fedshot.protocol.reducers import Mean

PARAMETERS, THRESHOLD = 100_000, 0.66


class Work:
    name = "no work"


class Replies(Wrapper):
    """Clients that all reply with the same update."""

    def __init__(self) -> None:
        self.update = torch.randn(PARAMETERS, generator=Key(0).torch())

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        metrics = {"loss": torch.tensor(0.5), "accuracy": torch.tensor(0.5)}
        for client in exchange.to:
            exchange.message(client)
            yield Arrival(client, Reply({"theta": self.update}, {}, 20, metrics))


class Timed(Wrapper):
    """Measures the CPU time that the wrapped fleet takes."""

    seconds = 0.0

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        arrivals = self.fleet.replies(exchange)
        while True:
            begun = time.process_time()
            arrival = next(arrivals, None)
            self.seconds += time.process_time() - begun
            if arrival is None:
                return
            yield arrival


def measured(clients: int, lost: int, *, secure: bool = True) -> list[str]:
    """Return a row of the table."""
    at_clients = Timed(MaskingClients(Replies()) if secure else Replies())
    fleet = Meter(at_clients)
    names = [*range(0, clients, clients // lost)][:lost] if lost else []
    around = Unreliable(
        fleet, lambda one, c: "drop" if one.work.method is not None and c in names else None
    )
    like = {"theta": Mean(torch.zeros(PARAMETERS))}
    work = ClientWork(Work(), "train")
    exchange = Exchange(work, {}, tuple(range(clients)), like, Key(0), (1, 0))
    begun = time.process_time()
    outcome = (SecureSums(THRESHOLD) if secure else reduce_replies)(around, exchange)
    whole = time.process_time() - begun
    assert len(outcome.accepted) == clients - lost
    up, down = (fleet.total("train", to) / clients for to in ("up", "down"))
    kind = f"{lost} lost" if lost else "all there"
    return [
        f"{clients:,}", kind if secure else "plain sum", f"{up / 1e3:,.0f} kB",
        f"{down / 1e3:,.1f} kB", f"{1e3 * at_clients.seconds / clients:,.0f} ms",
        f"{whole - at_clients.seconds:,.2f} s",
    ]  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    measured(10, 1)  # compiles and imports
    head = ["clients", "", "a client sends", "receives", "takes", "the server takes"]
    print("|", " | ".join(head), "|\n|---:|---|---:|---:|---:|---:|", flush=True)
    for clients in map(int, sys.argv[1:] or (10, 100, 1000)):
        for lost, secure in ((0, False), (0, True), (clients // 10, True)):
            print("|", " | ".join(measured(clients, lost, secure=secure)), "|", flush=True)


if __name__ == "__main__":
    main()
