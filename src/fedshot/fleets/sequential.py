"""One client after another, in the order asked: the reference that other fleets must equal."""

from __future__ import annotations

from collections.abc import Iterator

from fedshot.fleets.host import Host
from fedshot.protocol import Arrival, Exchange


class Sequential:
    """A loop over the cohort."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the replies in the order of the cohort."""
        for client in exchange.to:
            yield Arrival(client, self.host.serve(exchange, client))

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Keep the private states of the accepted clients."""
        self.host.settle(exchange, accepted)

    def void(self, round: int) -> None:
        """Drop the private states of a round that does not count."""
        self.host.store.void(round)
