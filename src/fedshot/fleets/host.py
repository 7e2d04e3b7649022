"""The host, which holds the clients' data and private states and runs their work.

The work of a client is the client function (a function of the method, marked with `client_work`)
that an exchange runs for it. `Sequential` and `Threads` both call `serve`, so on a CPU their
results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fedshot.core import shutdown, tree
from fedshot.core.devices import CPU
from fedshot.core.errors import MethodError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import ClientData
from fedshot.data.partitions.partition import Partition
from fedshot.fleets.client_checks import WorkChecks
from fedshot.fleets.liars import Liars
from fedshot.fleets.private import PrivateStore
from fedshot.protocol.exchange import Arrival, Exchange, Fault, PerClient, Reply
from fedshot.protocol.method import Method
from fedshot.protocol.reducers import NOT_FINITE


class ClientCall(NamedTuple):
    """The inputs of a client function for one client: message, private state, random draws."""

    client: int
    down: Tree
    private: Tree
    drawn: Tree


class Host:
    """Clients of one partition on one machine.

    Args:
        method: the method whose client functions the clients run.
        dataset: the examples of all clients.
        partition: which examples each client has.
        store: the clients' private states.
        key: root of the keys for initial private states.
        devices: devices that the client functions run on; stored states and the returned replies
            are on the CPU.
        liars: the clients that send dishonest replies; None if there are none.
    """

    def __init__(
        self,
        method: Method[Any],
        dataset: Dataset,
        partition: Partition,
        store: PrivateStore,
        key: Key,
        devices: Sequence[torch.device] = (CPU,),
        liars: Liars | None = None,
    ) -> None:
        self.liars = liars
        self._method, self._dataset, self._partition = method, dataset, partition
        self.store, self._key = store, key
        self._like: Tree | None = None
        self.devices = tuple(devices)
        self._resident: dict[torch.device, Dataset] = {}
        self.checks = WorkChecks()

    @property
    def device(self) -> torch.device:
        """The first of the devices, on which `serve` runs the client function."""
        return self.devices[0]

    def data(self, client: int, device: torch.device = CPU) -> ClientData:
        """Return the client's examples; for a GPU, from a copy of all data in the GPU's memory."""
        if device.type != "cuda":
            return self._partition.data(self._dataset, client)
        if device not in self._resident:
            self._resident[device] = self._dataset.on_gpu(device)
        return self._partition.data(self._resident[device], client)

    def private(self, client: int, upto: tuple[int, int]) -> Tree:
        """Return the client's newest private state up to `upto` (round, exchange).

        If no state is stored, return the client's initial state.
        """
        if self._like is None:
            self._like = self._first(client)
        if not tree.leaves(self._like):
            return self._like
        held = self.store.load(client, upto)
        return self._first(client) if held is None else tree.rebuild(self._like, held)

    def serve(self, exchange: Exchange, client: int) -> Arrival:
        """Run an exchange's client function for one client, and return the reply.

        The client's new private state is stored. If the server does not accept the reply, `settle`
        deletes the new state. If the new state is not finite, the reply is rejected at once, and
        the client keeps its previous state.
        """
        call = self.prepare(exchange, client)
        return self.finish(exchange, call, self._run_work(exchange, call))

    def placed(self, exchange: Exchange, device: torch.device | None = None) -> Exchange:
        """Return the exchange with its message on a device (by default, the first of `devices`).

        The exchange is returned as it is if clients get different messages.
        """
        device = device or self.device
        if device.type == "cpu" or isinstance(exchange.down, PerClient):
            return exchange
        return replace(exchange, down=tree.to(exchange.down, device))

    def prepare(
        self, exchange: Exchange, client: int, device: torch.device | None = None
    ) -> ClientCall:
        """Return the inputs of an exchange's client function for one client.

        `device` is where the function will run. If it is a GPU, the examples are drawn from the
        copy of the data in its memory. The private state is on the CPU, and so is the message
        unless `placed` has moved it.
        """
        private = self.private(client, exchange.version)
        data = self.data(client, device or self.device)
        if self.liars is not None:
            data = self.liars.data(exchange, client, data)
        drawn = self.checks.draw(exchange.work, data, exchange.client_key(client))
        return ClientCall(client, exchange.message(client), private, drawn)

    def _run_work(self, exchange: Exchange, call: ClientCall) -> Reply:
        """Run an exchange's client function for one client, on the first of `devices`."""
        if self.device.type == "cpu":
            return self.checks.run(exchange.work, *call[1:])
        return self.checks.run(exchange.work, *tree.to(call[1:], self.device)).on_cpu()

    def finish(self, exchange: Exchange, call: ClientCall, reply: Reply) -> Arrival:
        """Store the client's new private state, and return the reply without it.

        A private state that is not finite makes the arrival a fault. Raises MethodError if its
        structure differs from that of the previous state.
        """
        shutdown.check()  # once a stop is requested, another process may own the folder
        client, private = call.client, call.private
        changed = tree.difference(private, reply.private)
        if changed:
            raise MethodError(
                f"{exchange.work.name} returned a private state that differs in structure from "
                f"that of init_client: {changed}."
            )
        if exchange.phase == "train" and tree.leaves(reply.private):
            leaves = [leaf for leaf in tree.leaves(reply.private) if leaf.is_floating_point()]
            if not all(bool(torch.isfinite(leaf).all()) for leaf in leaves):
                return Arrival(client, None, Fault("refused", f"its private state {NOT_FINITE}"))
            self.store.save(client, exchange.version, tree.detach(reply.private))
        sent = reply._replace(up=tree.detach(dict(reply.up)), private={})
        if self.liars is not None:
            sent = self.liars.reply(exchange, client, call.down, sent)
        return Arrival(client, sent)

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Delete the new private states of the clients whose replies were not accepted."""
        for client in exchange.to:
            if client not in accepted:
                self.store.drop(client, exchange.version)

    def _first(self, client: int) -> Tree:
        return self._method.init_client(client, self._key.at("client", client))
