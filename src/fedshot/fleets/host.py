"""Where clients live: their data, their private states, and the kernel that runs their work.

Every fleet on a CPU calls this same kernel, which is why they agree to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from fedshot.core import shutdown, tree
from fedshot.core.errors import MethodError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import ClientData
from fedshot.data.partitions.partition import Partition
from fedshot.fleets.client_checks import WorkChecks
from fedshot.fleets.private import PrivateStore
from fedshot.protocol.exchange import Arrival, Exchange, Fault, Reply
from fedshot.protocol.method import Method
from fedshot.protocol.reducers import NOT_FINITE


class ClientCall(NamedTuple):
    """What the work of one client starts from: the message, its own state, what it has drawn."""

    client: int
    down: Tree
    private: Tree
    drawn: Tree


class Host:
    """Clients of one partition on one machine.

    Args:
        method: the method whose work they run.
        dataset: the samples of all of them.
        partition: which samples each client has.
        store: their private states.
        key: root of the keys of their first private states.
        device: where their work runs; states and replies are on the CPU before and after it.
    """

    def __init__(
        self,
        method: Method[Any],
        dataset: Dataset,
        partition: Partition,
        store: PrivateStore,
        key: Key,
        device: str = "cpu",
    ) -> None:
        self._method, self._dataset, self._partition = method, dataset, partition
        self.store, self._key = store, key
        self._like: Tree | None = None
        self.device = torch.device(device)
        self.checks = WorkChecks()

    def data(self, client: int) -> ClientData:
        """Return the client's samples."""
        return self._partition.data(self._dataset, client)

    def private(self, client: int, upto: tuple[int, int]) -> Tree:
        """Return the client's private state as of `upto` (round, exchange), or its first one."""
        if self._like is None:
            self._like = self._first(client)
        if not tree.leaves(self._like):
            return self._like
        held = self.store.load(client, upto)
        return self._first(client) if held is None else tree.rebuild(self._like, held)

    def serve(self, exchange: Exchange, client: int) -> Arrival:
        """Run the work of one client and keep its private state as a version yet to be settled.

        A private state that is not finite is refused here, where it lives; the client goes on from
        its last sound one.
        """
        visit = self.prepare(exchange, client)
        return self.finish(exchange, visit, self.checks.run(exchange.work, *visit[1:]))

    def prepare(self, exchange: Exchange, client: int) -> ClientCall:
        """Return what the work of one client starts from."""
        private = self.private(client, exchange.version)
        drawn = self.checks.draw(exchange.work, self.data(client), exchange.client_key(client))
        parts = (exchange.message(client), private, drawn)
        if self.device.type != "cpu":
            parts = tuple(tree.to(part, self.device) for part in parts)
        return ClientCall(client, *parts)

    def finish(self, exchange: Exchange, visit: ClientCall, reply: Reply) -> Arrival:
        """Keep what stays with the client; return what goes up."""
        shutdown.check()  # the folder may be another process's by now
        client, private = visit.client, visit.private
        if self.device.type != "cpu":
            up, kept, metrics = (
                tree.to(dict(part) if isinstance(part, Mapping) else part, torch.device("cpu"))
                for part in (reply.up, reply.private, reply.metrics)
            )
            reply = reply._replace(up=up, private=kept, metrics=metrics)
        changed = tree.difference(private, reply.private)
        if changed:
            raise MethodError(
                f"{exchange.work.name} returned a private state of another form than init_client "
                f"gives: {changed}."
            )
        if exchange.phase == "train" and tree.leaves(reply.private):
            if not _finite(reply.private):
                reason = f"its private state {NOT_FINITE}"
                return Arrival(client, None, Fault("refused", reason))
            self.store.save(client, exchange.version, tree.detach(reply.private))
        return Arrival(client, reply._replace(up=tree.detach(dict(reply.up)), private={}))

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Forget the new private states of the clients that were not accepted."""
        for client in exchange.to:
            if client not in accepted:
                self.store.drop(client, exchange.version)

    def _first(self, client: int) -> Tree:
        return self._method.init_client(client, self._key.at("client", client))


def _finite(private: Tree) -> bool:
    """Whether a state is worth keeping."""
    return all(
        bool(torch.isfinite(leaf).all())
        for leaf in tree.leaves(private)
        if leaf.is_floating_point()
    )
