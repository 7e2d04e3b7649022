"""What the server knows of the nodes: their numbers now, who lives there, what they have sealed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedshot.core.errors import ConfigError
from fedshot.deploy.flower.admission import Entry
from fedshot.deploy.flower.codec import short
from fedshot.deploy.flower.messages import Incoming, WireMessage
from fedshot.deploy.flower.setup import Setup

HELLO = 60.0  # seconds for a node to read its data and say who lives there
AGAIN = 30.0  # seconds until a node that stays away is asked again
_SHA = re.compile(r"[0-9a-f]{0,64}")
_MOST = 1 << 40  # of the rounds and seconds that a node may speak of
_ABOUT = 4000  # characters of what a node says of its machine

Seal = tuple[int, str]  # a round, and the hash of the states that were sealed with it
NO_SEAL: Seal = (-1, "")
_NOBODY = Entry(frozenset())


def checked_seal(seal: list[Any]) -> list[Any]:
    """Return a seal as JSON has it. Raises ValueError for anything else."""
    if [type(part) for part in seal] != [int, str]:
        raise ValueError("expected a round and a hash")
    return seal


class Carrier(Protocol):
    """What brings letters to nodes, as `Messenger` does."""

    def there(self) -> dict[int, str]:
        """Return the nodes that are connected, with the names they are registered by."""
        ...

    def ask(self, wire_messages: Mapping[int, WireMessage], seconds: float) -> Iterator[Incoming]:
        """Send letters, and yield what comes back within so many seconds, each node once."""
        ...


@dataclass
class Node:
    """What the server knows of a node, by its name; its number may change."""

    name: str
    number: int
    clients: frozenset[int]
    base: Seal  # that the server can go back to
    orders: list[list[Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    examples: int | None = None  # the most that one of its clients holds, as the operator says


class NodeRegistry:
    """The nodes of a run.

    A node has the clients that the operator has written down for its key. Without keys a client is
    the node's that first said it lives there. Once a round is sealed it stays there for the rest of
    the run, since its private states do.

    Args:
        post: carries letters to them.
        setup: what they are told of the run.
        life: number of this life of the run, above all that were before.
        tell: where it is said who comes and who stays away.
        patience: seconds that a word with a new node may take.
        entries: returns what the operator has written, by the nodes' names; None without keys.
    """

    def __init__(
        self,
        post: Carrier,
        setup: Setup,
        life: int,
        tell: Callable[[str], None],
        patience: float = HELLO,
        entries: Callable[[], Mapping[str, Entry]] | None = None,
    ) -> None:
        self._post, self._setup, self._life, self._tell = post, setup, life, tell
        self._patience, self._entries = patience, entries
        self.nodes: dict[str, Node] = {}
        self.bases: dict[str, Seal] = {}
        self.owners: dict[int, str] = {}  # of clients that have sealed states, by the node's name
        self._away: dict[int, tuple[str, float]] = {}  # why, and when to ask again
        self._orders = 0

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def by_number(self, number: int) -> Node | None:
        """Return the node that has this number now."""
        return next((node for node in self if node.number == number), None)

    def there(self) -> dict[int, Node]:
        """Return the nodes that are connected, after a word with those that are new."""
        there, now = self._post.there(), time.monotonic()
        self._away = {number: why for number, why in self._away.items() if number in there}
        new = {
            number: name
            for number, name in there.items()
            if self.by_number(number) is None and self._away.get(number, ("", now))[1] <= now
        }
        if new:
            self._greet(new, there)
        return {node.number: node for node in self if node.number in there}

    def homes(self) -> dict[int, Node]:
        """Return the node of each client."""
        return {client: node for node in self for client in node.clients}

    def begin_life(self, bases: Mapping[str, Seal], owners: Mapping[int, str] = {}) -> None:
        """Let every node begin anew with what it had sealed; those with others' clients leave."""
        self._life, self.bases, self.owners = self._life + 1, dict(bases), dict(owners)
        for node in [*self]:
            moved = self._moved(node.name, node.clients)
            if moved:
                del self.nodes[node.name]
                self._stay_away(node.number, node.name, moved)
            node.base, node.orders = self.bases.get(node.name, NO_SEAL), []

    def bind(self, owners: Mapping[int, str]) -> None:
        """Note to which node clients belong."""
        self.owners = {**owners, **self.owners}

    def order(self, node: Node, *words: Any) -> None:
        """Give a node an order, which goes along with its next letter."""
        self._orders += 1
        if words[0] == "seal" and node.orders and node.orders[-1][1] == "seal":
            del node.orders[-1]  # of a node that is away; nothing came between the two
        node.orders.append([self._orders, *words])

    def wire_message(self, node: Node) -> WireMessage:
        """Return a letter with all that a node must know before it reads on."""
        return WireMessage(
            {
                "setup": self._setup.to_json(),
                "life": self._life,
                "base": list(node.base),
                "orders": list(node.orders),
            }
        )

    def note(self, mail: Incoming) -> float:
        """Take in what a node says of orders and seals; return the seconds that it worked."""
        node = self.by_number(mail.node)
        if node is None or mail.wire_message is None or mail.reason:
            return 0.0
        head = mail.wire_message.head
        done, sealed = head.get("done"), _seal(head.get("sealed"))
        seconds: Any = head.get("seconds")
        if type(done) is not int or not 0 <= done <= self._orders or sealed is None:
            return 0.0
        node.orders = [order for order in node.orders if order[0] > done]
        node.base = sealed
        timed = isinstance(seconds, int | float) and 0 <= seconds <= _MOST
        return float(seconds) if timed else 0.0

    def _greet(self, new: Mapping[int, str], there: Collection[int]) -> None:
        """Ask nodes that are new who lives there."""
        wire_messages = {}
        for number, name in new.items():
            wire_messages[number] = self.wire_message(Node(name, number, frozenset(), NO_SEAL))
            wire_messages[number].head["hello"] = True
        for mail in self._post.ask(wire_messages, self._patience):
            name, reason = new[mail.node], mail.reason
            if mail.wire_message is not None and not reason:
                # The name of the key, where there are keys.
                name = name or short(mail.wire_message.head.get("name"), 100)
                reason = self._admit(mail.node, name, mail.wire_message, there)
            if reason:
                self._stay_away(mail.node, name, reason)

    def _stay_away(self, number: int, name: str, reason: str) -> None:
        if self._away.get(number, ("", 0.0))[0] != reason:
            self._tell(f"node {name or number} stays away: {reason}")
        self._away[number] = reason, time.monotonic() + AGAIN

    def _admit(
        self, number: int, name: str, wire_message: WireMessage, there: Collection[int]
    ) -> str:
        """Take a node in; return why not, "" when it is."""
        claimed, most = wire_message.head.get("clients"), self._setup.clients
        if not isinstance(claimed, list) or not all(type(c) is int for c in claimed):
            return "it does not say who lives there"
        strange = next((c for c in claimed if not 0 <= c < most), None)
        if strange is not None:
            return f"it says client {short(strange, 20)} lives there; the run has 0 to {most - 1}"
        clients = frozenset(claimed)
        try:
            own = None if self._entries is None else self._entries().get(name, _NOBODY)
        except ConfigError as error:
            return str(error)
        if own is _NOBODY:
            return (
                "the server's folder does not say which clients live there. Say it with `fedshot "
                f"flower keys --admit {name}.pub --clients {ranges(clients)}`, if that is so"
            )
        if own is not None and not clients <= own.clients:
            return (
                f"it says client {min(clients - own.clients)} lives there; by the server's folder "
                f"it has clients {ranges(own.clients)}"
            )
        for other in self:
            if other.name != name and other.clients & clients:
                return f"client {min(other.clients & clients)} lives at {other.name}"
        moved = self._moved(name, clients)
        if moved:
            return moved
        known = self.nodes.get(name)
        if known is not None:
            if known.number in there and known.number != number:
                return "a node of that name is here. Give it another, with --name"
            known.number, known.clients = number, clients
            known.examples = own.examples if own else None
            return ""
        made = self.nodes[name] = Node(name, number, clients, self.bases.get(name, NO_SEAL))
        made.examples = own.examples if own else None
        made.environment = _environment(wire_message.head.get("environment"))
        self._tell(f"node {name} holds clients {ranges(clients)}")
        return ""

    def _moved(self, name: str, clients: Collection[int]) -> str:
        """Say which client has its private states elsewhere; "" for none."""
        for client in sorted(clients):
            owner = self.owners.get(client, name)
            if owner != name:
                return (
                    f"client {client} has its private states at node {owner} since the run began, "
                    "and would begin afresh. Let it live there, or bring its states to a node of "
                    "that name"
                )
        return ""


def _environment(found: Any) -> dict[str, Any]:
    """Return what a node says of its machine, {} where no record can hold it."""
    try:
        short_enough = len(json.dumps(found, allow_nan=False)) <= _ABOUT
    except (ValueError, RecursionError):
        return {}
    return found if short_enough and isinstance(found, dict) else {}


def _seal(found: Any) -> Seal | None:
    """Return what a node says that it has sealed last; None for what is no seal."""
    if not isinstance(found, list) or len(found) != 2:
        return None
    round, sha = found
    if type(round) is not int or not -1 <= round < _MOST:
        return None
    return (round, sha) if isinstance(sha, str) and _SHA.fullmatch(sha) else None


def ranges(clients: Collection[int]) -> str:
    """Return clients as `0-3, 7`."""
    runs: list[list[int]] = []
    for client in sorted(clients):
        if runs and client == runs[-1][1] + 1:
            runs[-1][1] = client
        else:
            runs.append([client, client])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
