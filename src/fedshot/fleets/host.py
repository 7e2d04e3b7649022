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
from torch import Tensor

from fedshot.core import shutdown, tree
from fedshot.core.devices import CPU
from fedshot.core.errors import MethodError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import ClientData
from fedshot.data.partitions.partition import Partition
from fedshot.fleets.client_checks import WorkChecks, checked_init_client
from fedshot.fleets.compressing import ClientSide
from fedshot.fleets.liars import Liars
from fedshot.fleets.private import PrivateStore
from fedshot.protocol.exchange import Arrival, Exchange, Fault, PerClient, Reply
from fedshot.protocol.method import Method
from fedshot.protocol.reducers import NOT_FINITE, all_finite

_MEMORY = "compress.memory"  # beside the private state in a file: the errors of compression


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
        compressing: decodes messages and encodes uploads; None if they are not compressed.
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
        compressing: ClientSide | None = None,
    ) -> None:
        self.liars, self.compressing = liars, compressing
        self.method, self._dataset, self._partition = method, dataset, partition
        self.store, self._key = store, key
        self.bank = PrivateStore(store.folder.with_name("bank"), "model in the server's bank")
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
        if held is None:
            return self._first(client)
        own = {path: leaf for path, leaf in held.items() if not path.startswith(_MEMORY)}
        if len(own) == len(held):
            return tree.rebuild(self._like, held)
        return tree.rebuild({"private": self._like}, own)["private"]

    def serve(self, exchange: Exchange, client: int) -> Arrival:
        """Run an exchange's client function for one client, and return the reply.

        The client's new private state is stored. If the server does not accept the reply, `settle`
        deletes the new state. If the new state is not finite, the reply is rejected at once, and
        the client keeps its previous state.
        """
        call = self.prepare(exchange, client)
        if self.device.type == "cpu":
            reply = self.checks.run(exchange.work, *call[1:])
        else:
            reply = self.checks.run(exchange.work, *tree.to(call[1:], self.device)).on_cpu()
        return self.finish(exchange, call, reply)

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
        return ClientCall(client, self.message(exchange, client), private, drawn)

    def message(self, exchange: Exchange, client: int) -> Tree:
        """Return an exchange's message, decoded; call it once for each client."""
        message = exchange.message(client)
        return message if self.compressing is None else self.compressing.received(message)

    def finish(self, exchange: Exchange, call: ClientCall, reply: Reply) -> Arrival:
        """Store the client's new private state, and return the reply without it.

        If uploads are compressed, the reply is encoded, and the state includes the errors that the
        client remembers. A state that is not finite makes the arrival a fault. Raises MethodError
        if the structure of the private state differs from that of the previous one.
        """
        shutdown.check()  # once a stop is requested, another process may own the folder
        client, private = call.client, call.private
        changed = tree.difference(private, reply.private)
        if changed:
            raise MethodError(
                f"{exchange.work.name} returned a private state that differs in structure from "
                f"that of init_client: {changed}."
            )
        sent = reply._replace(up=tree.detach(dict(reply.up)), private={})
        if self.liars is not None:
            sent = self.liars.reply(exchange, client, call.down, sent)
        state = reply.private
        if self.compressing is not None and exchange.phase == "train":
            remembers = self.compressing.options.remembers
            memory = self._memory(client, exchange.version) if remembers else {}
            up, memory = self.compressing.upload(exchange, client, sent, memory)
            sent = sent._replace(up=up)
            state = {"private": state, _MEMORY: memory} if memory else state
        if exchange.phase == "train" and (leaves := tree.leaves(state)):
            if not all_finite(leaves):
                return Arrival(client, None, Fault("refused", f"its private state {NOT_FINITE}"))
            self.store.save(client, exchange.version, state)
        return Arrival(client, sent)

    def _memory(self, client: int, upto: tuple[int, int]) -> dict[str, Tensor]:
        """Return the errors of compression that a client remembers."""
        held = self.store.load(client, upto) or {}
        return {path.partition("/")[2]: leaf for path, leaf in held.items()
                if path.startswith(_MEMORY)}  # fmt: skip

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Delete the new private states of the clients whose replies were not accepted."""
        for client in exchange.to:
            if client not in accepted:
                self.store.drop(client, exchange.version)

    def _first(self, client: int) -> Tree:
        return checked_init_client(self.method, client, self._key.at("client", client))
