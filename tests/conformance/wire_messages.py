"""A Flower fleet without the network: messages go through JSON to one node in this process.

Whatever a method sends must survive serialisation; the node handles messages as a real node does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping

from fedshot.conformance.small import CLIENTS
from fedshot.core.serialised import LIMITS
from fedshot.deploy.flower.fleet import FlowerFleet
from fedshot.deploy.flower.messages import Incoming, WireMessage
from fedshot.deploy.flower.node_registry import Following
from fedshot.deploy.flower.setup import Setup
from fedshot.deploy.flower.worker import ClientRuntime, run_work
from fedshot.fleets.host import Host
from fedshot.fleets.sequential import Sequential
from fedshot.protocol.exchange import Exchange

_NUMBER = 7


class Direct:
    """Transport to one node in this process."""

    def __init__(self, runtime: ClientRuntime) -> None:
        self.runtime = runtime

    def connected(self) -> dict[int, str]:
        return {_NUMBER: "node"}

    def send_and_receive(
        self,
        wire_messages: Mapping[int, WireMessage],
        seconds: float,
        following: Following = lambda _: None,
    ) -> Iterator[Incoming]:
        for number, first in wire_messages.items():
            wire_message: WireMessage | None = first
            while wire_message is not None:
                reply = self.answer(written(wire_message))
                wire_message = following(number)
                yield Incoming(number, written(reply))

    def answer(self, wire_message: WireMessage) -> WireMessage:
        return answer(self.runtime, range(CLIENTS), wire_message)


def answer(
    runtime: ClientRuntime, clients: Collection[int], wire_message: WireMessage
) -> WireMessage:
    """Return the reply of a node that holds these clients."""
    reply, head = WireMessage({"seconds": 0.0}), wire_message.head
    if head.get("hello"):
        reply.head["clients"] = list(clients)
        return reply
    runtime.start_session(head["life"], tuple(head["base"]))
    runtime.apply_orders(head["orders"])
    if "work" in head:
        run_work(runtime, wire_message, reply, LIMITS)
    reply.head |= runtime.state
    return reply


def written(wire_message: WireMessage) -> WireMessage:
    """Return the message as it is received."""
    return WireMessage(json.loads(json.dumps(wire_message.head)), dict(wire_message.blocks))


class Prompt(FlowerFleet):
    """A fleet that sends orders at once: these tests look at states after each exchange."""

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        super().settle(exchange, accepted)
        list(self._send_orders(1.0))

    def void(self, round: int) -> None:
        super().void(round)
        list(self._send_orders(1.0))


def on_one_node(host: Host) -> FlowerFleet:
    """Return a Flower fleet with one node that holds all clients."""
    folder = host.store.folder.with_name("node")
    runtime = ClientRuntime(host.method, Sequential(host), range(CLIENTS), folder)
    setup = Setup("0" * 32, "", (), CLIENTS, {}, "")
    fleet = Prompt(
        Sequential(host), Direct(runtime), setup, session=1, keeps_state=True, deadline=1.0,
        names_reducers=host.liars is not None or host.compressing is not None,
    )  # fmt: skip
    fleet.rewind(-1, "")
    return fleet
