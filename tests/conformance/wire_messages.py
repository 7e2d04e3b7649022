"""Clients that are asked by letter, as on Flower, with the postman left out.

What goes to a node and back is written down and read again, so whatever a method sends must survive
that; what the node does with it is what it does on a host of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from fedshot.conformance.small import CLIENTS, FederationHost
from fedshot.deploy.flower.client_runtime import ClientRuntime
from fedshot.deploy.flower.codec import LIMITS
from fedshot.deploy.flower.fleet import FlowerFleet
from fedshot.deploy.flower.messages import Incoming, WireMessage
from fedshot.deploy.flower.setup import Setup
from fedshot.deploy.flower.worker import do_work
from fedshot.fleets.sequential import Sequential
from fedshot.protocol.exchange import Exchange

_NUMBER = 7


class Direct:
    """Carries letters to one node that lives in this process."""

    def __init__(self, member: ClientRuntime) -> None:
        self.member = member

    def there(self) -> dict[int, str]:
        return {_NUMBER: "home"}

    def ask(self, wire_messages: Mapping[int, WireMessage], seconds: float) -> Iterator[Incoming]:
        for number, wire_message in wire_messages.items():
            yield Incoming(number, written(self.answer(written(wire_message))))

    def answer(self, wire_message: WireMessage) -> WireMessage:
        reply, head = WireMessage({"seconds": 0.0}), wire_message.head
        if head.get("hello"):
            reply.head |= {"name": "home", "clients": list(range(CLIENTS))}
            return reply
        self.member.arrive(head["life"], tuple(head["base"]))
        self.member.obey(head["orders"])
        if "work" in head:
            do_work(self.member, wire_message, reply, LIMITS)
        reply.head |= self.member.state
        return reply


def written(wire_message: WireMessage) -> WireMessage:
    """Return the letter after a journey."""
    return WireMessage(json.loads(json.dumps(wire_message.head)), dict(wire_message.blocks))


class Prompt(FlowerFleet):
    """A fleet whose orders do not wait for the next letter: these tests look at states at once."""

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        super().settle(exchange, accepted)
        list(self._tell_all(1.0))

    def void(self, round: int) -> None:
        super().void(round)
        list(self._tell_all(1.0))


def by_letter(home: FederationHost) -> FlowerFleet:
    """Return a fleet whose clients live in `home` and are asked by letter."""
    member = ClientRuntime(home.method, home.host, range(CLIENTS), home.folder / "node")
    setup = Setup("0" * 32, "", (), CLIENTS, {})
    fleet = Prompt(Sequential(home.host), Direct(member), setup, life=1, keeps=True, deadline=1.0)
    fleet.rewind(-1, "")
    return fleet
