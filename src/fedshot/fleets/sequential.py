"""One client after another, in the order asked: the reference that other fleets must equal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from fedshot.fleets.host import Host
from fedshot.protocol import Arrival, Exchange

T = TypeVar("T")
R = TypeVar("R")


class Sequential:
    """A loop over the cohort."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the replies in the order of the cohort."""
        for client in exchange.to:
            yield self.host.serve(exchange, client)

    def spread(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return `fn` of every item, in their order."""
        return [fn(item) for item in items]

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Keep the private states of the accepted clients."""
        self.host.settle(exchange, accepted)

    def void(self, round: int) -> None:
        """Drop the private states of a round that does not count."""
        self.host.store.void(round)

    def seal(self, round: int, keep: Collection[int]) -> str:
        """Make this round's private states last."""
        return self.host.store.seal(round, keep)

    def open(self, round: int, sha: str) -> None:
        """Make the private states of a sealed round readable."""
        self.host.store.open(round, sha)

    def rewind(self, round: int, sha: str) -> None:
        """Go back to the private states of a sealed round."""
        self.host.store.rewind(round, sha)
