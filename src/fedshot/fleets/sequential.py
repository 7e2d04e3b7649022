"""The sequential fleet, whose results are the reference for all other fleets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from fedshot.fleets.host import Host
from fedshot.fleets.private import PrivateStore
from fedshot.protocol.exchange import Arrival, Exchange

T = TypeVar("T")
R = TypeVar("R")


class Sequential:
    """A fleet that runs one client after another, in the order of the cohort.

    Args:
        host: holds the clients' data and private states, and runs the method's client functions.
    """

    def __init__(self, host: Host) -> None:
        self.host = host

    @property
    def bank(self) -> PrivateStore:
        """The bank: the models that the server stores on disk, one for each client.

        They are versioned by round, like the private states. Only methods whose server keeps a
        model for every client use the bank.
        """
        return self.host.bank

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the replies in the order of the cohort."""
        exchange = self.host.placed(exchange)
        for client in exchange.to:
            yield self.host.serve(exchange, client)

    def parallel_map(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return `fn(item)` for every item, in order."""
        return [fn(item) for item in items]

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Keep the new private states of accepted clients, and delete those of other clients."""
        self.host.settle(exchange, accepted)

    def void(self, round: int) -> None:
        """Delete the private states and the stored client models of a discarded round."""
        self.host.store.void(round)
        self.bank.void(round)

    def seal(self, round: int, keep: Collection[int]) -> str:
        """Commit this round's private states and stored client models; return both hashes.

        They are one string, "private/bank", or only the first if no client model is stored.
        """
        private, bank = self.host.store.seal(round, keep), self.bank.seal(round, keep)
        return f"{private}/{bank}" if bank else private

    def open(self, round: int, sha: str) -> None:
        """Make the private states and stored client models of a committed round readable.

        `sha` is the string that `seal` returned for the round.
        """
        private, _, bank = sha.partition("/")
        self.host.store.open(round, private)
        self.bank.open(round, bank)

    def rewind(self, round: int, sha: str) -> None:
        """Roll back to a committed round: delete later private states and stored client models.

        `sha` is the string that `seal` returned for the round.
        """
        private, _, bank = sha.partition("/")
        self.host.store.rewind(round, private)
        self.bank.rewind(round, bank)
