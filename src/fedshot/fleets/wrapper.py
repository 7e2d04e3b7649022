"""The base class of fleets that wrap another fleet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from fedshot.protocol.exchange import Bank, Exchange, Fleet

T = TypeVar("T")
R = TypeVar("R")


class Wrapper:
    """Forwards everything to the wrapped fleet; subclasses define `replies`."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    @property
    def bank(self) -> Bank:
        """The bank: the models that the server stores on disk, one for each client."""
        return self.fleet.bank

    def parallel_map(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return `fn(item)` for every item, in order."""
        return self.fleet.parallel_map(fn, items)

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Keep the new private states of accepted clients, and delete those of other clients."""
        self.fleet.settle(exchange, accepted)

    def void(self, round: int) -> None:
        """Delete the private states of a discarded round."""
        self.fleet.void(round)

    def seal(self, round: int, keep: Collection[int]) -> str:
        """Commit the private states of this round; return their hash."""
        return self.fleet.seal(round, keep)

    def open(self, round: int, sha: str) -> None:
        """Make the private states of a committed round readable; `sha` is what `seal` returned."""
        self.fleet.open(round, sha)

    def rewind(self, round: int, sha: str) -> None:
        """Roll back to the private states of a committed round: delete later ones.

        `sha` is what `seal` returned for the round.
        """
        self.fleet.rewind(round, sha)
