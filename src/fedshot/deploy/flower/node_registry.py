"""Which node holds which clients: the operator's entries, and the server's view of the nodes.

The operator writes an entry for each node, in a file beside its public key:

    nodes/hospital-a.pub    the public key; the file name is the node's name
    nodes/hospital-a.json   {"clients": "0-3, 7", "examples": 120}

The server accepts these clients from the node and no others. "examples" (optional) is the number
of examples of the largest client; it bounds a client's weight in an average.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired, Protocol, TypeAlias

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from fedshot.core import records, storage
from fedshot.core.console import warning
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.serialised import short
from fedshot.core.text import ranges
from fedshot.deploy.flower.messages import Incoming, WireMessage
from fedshot.deploy.flower.setup import Setup

_MAX_CLIENTS = 1 << 20  # client numbers are smaller
_MAX_EXAMPLES = 1 << 20  # of one client
_FIX = "Write it again with `fedshot flower keys --admit`"


@dataclass(frozen=True)
class Entry:
    """The operator's record of a node: its clients, and the largest client's number of examples."""

    clients: frozenset[int]
    examples: int | None = None


def parse_clients(text: str) -> list[int]:
    """Parse client ids from a text such as `0-3,7`. Raises ConfigError if invalid."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(last or first) > 9:
            raise ConfigError(
                f"--clients is {text[:60]!r}; expected numbers and ranges such as 0-3,7."
            )
        if int(last or first) >= _MAX_CLIENTS:
            raise ConfigError(
                f"--clients has {last or first}; expected numbers below {_MAX_CLIENTS}."
            )
        if last and int(last) < int(first):
            raise ConfigError(
                f"--clients has {part.strip()}; expected the smaller number first: {last}-{first}."
            )
        found |= set(range(int(first), int(last or first) + 1))
    return sorted(found)


def admit(nodes: Path, name: str, public: bytes, clients: str, examples: int | None) -> None:
    """Write a node's public key and clients into the server's folder of nodes.

    Raises ConfigError if the clients are invalid or belong to another node, or if another key has
    this name.
    """
    entry = Entry(frozenset(parse_clients(clients)), examples)
    if examples is not None and not 1 <= examples <= _MAX_EXAMPLES:
        raise ConfigError(f"--examples is {examples}; expected 1 to {_MAX_EXAMPLES}.")
    if not nodes.parent.is_dir():
        raise ConfigError(
            f"{nodes.parent} does not exist. Name the server's --folder, or make it with "
            "`fedshot flower keys --server`."
        )
    key = nodes / f"{name}.pub"
    if key.exists() and key.read_bytes().split() != public.split():  # line ends may differ
        raise ConfigError(
            f"{key} holds another key, and the file name is the node's name. Rename the file that "
            f"you admit; or, if node {name} has a new key, remove {key} first."
        )
    others = {other: its for other, its in read_entries(nodes).items() if other != name}
    _check_disjoint(others | {name: entry}, nodes)
    nodes.mkdir(exist_ok=True)
    record = {"clients": clients} | ({} if examples is None else {"examples": examples})
    storage.write_bytes(nodes / f"{name}.json", json.dumps(record).encode(), sync=True)
    storage.write_bytes(key, public, sync=True)  # last: the server watches for .pub files


def read_entries(nodes: Path) -> dict[str, Entry]:
    """Return the operator's entries (the clients of each node) in a folder, keyed by node name.

    Raises ConfigError for a damaged file, or if two nodes have the same client.
    """
    found = {path.stem: _read_entry(path) for path in sorted(nodes.glob("*.json"))}
    _check_disjoint(found, nodes)
    return found


class _EntryRecord(TypedDict):
    __pydantic_config__ = {"extra": "forbid"}  # type: ignore[misc]  # noqa: RUF012

    clients: str
    examples: NotRequired[Annotated[int, Field(ge=1, le=_MAX_EXAMPLES)] | None]


def _read_entry(path: Path) -> Entry:
    try:
        record = records.read(path, _EntryRecord, _FIX)
        return Entry(frozenset(parse_clients(record["clients"])), record.get("examples"))
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    except ConfigError as error:
        raise ConfigError(f"{path} is damaged ({error}). {_FIX}.") from None


def _check_disjoint(entries: Mapping[str, Entry], nodes: Path) -> None:
    owners: dict[int, str] = {}
    for name, entry in entries.items():
        for client in sorted(entry.clients):
            if client in owners:
                raise ConfigError(
                    f"{nodes} gives client {client} to {owners[client]} and to {name}. Leave it "
                    "to one of them."
                )
            owners[client] = name


HELLO_SECONDS = 60.0  # time for a node to read its data and report its clients
RETRY_SECONDS = 30.0  # time until a node that was left out is asked again
_SHA = re.compile(r"[0-9a-f]{0,64}")
_MOST = 1 << 40  # bound on reported rounds and seconds
_MAX_ENVIRONMENT = 4000  # characters of a node's reported environment

Seal = tuple[int, str]  # a committed round, and the hash of its states
NO_SEAL: Seal = (-1, "")


def checked_seal(seal: Any) -> Seal:
    """Return a seal, i.e. a committed round and the hash of its private states, from JSON.

    Raises ValueError for anything else.
    """
    match seal:
        case [round, str(sha)] if type(round) is int and -1 <= round < _MOST:
            if _SHA.fullmatch(sha):
                return round, sha
    raise ValueError("expected a round and a hash")


SealRecord: TypeAlias = Annotated[Any, AfterValidator(checked_seal)]
"""A seal in a JSON record, for `core.records`."""


Following: TypeAlias = Callable[[int], WireMessage | None]  # node -> its next message


class Transport(Protocol):
    """Exchanges messages with nodes; `Messenger` is the implementation on Flower."""

    def connected(self) -> dict[int, str]:
        """Return the registered name of each connected node, by node id."""
        ...

    def send_and_receive(
        self,
        wire_messages: Mapping[int, WireMessage],
        seconds: float,
        following: Following = lambda _: None,
    ) -> Iterator[Incoming]:
        """Send each node its message, and yield one `Incoming` per message within `seconds`.

        When a node has replied, it is sent the message that `following` returns for it, if any. An
        `Incoming` with a reason is the last of its node.
        """
        ...


@dataclass
class Node:
    """A node, identified by its name; its number, an id from Flower, may change."""

    name: str
    number: int
    clients: frozenset[int]
    base: Seal  # the newest committed round to which the node can be rewound
    orders: list[list[Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    examples: int | None = None  # of the largest client, from the operator's entry


@dataclass
class NodeRegistry:
    """The nodes of a run.

    With node keys, the operator's entry limits which clients a node may report. A client belongs
    to the first node that reports it. Once a round is committed, the client belongs to this node
    for the rest of the run, because its private state is stored there.

    The arguments are described in `FlowerFleet`. A new node has `hello_seconds` to report its
    clients.
    """

    transport: Transport
    setup: Setup
    session: int
    tell: Callable[[str], None]
    hello_seconds: float = HELLO_SECONDS
    entries: Callable[[], Mapping[str, Entry]] | None = None
    nodes: dict[str, Node] = field(default_factory=dict, init=False)
    bases: dict[str, Seal] = field(default_factory=dict, init=False)
    owners: dict[int, str] = field(default_factory=dict, init=False)  # of committed states
    # Nodes that are left out: number -> sentence, and time at which the node is asked again.
    _left_out: dict[int, tuple[str, float]] = field(default_factory=dict, init=False)
    _orders: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def by_number(self, number: int) -> Node | None:
        """Return the node that currently has this number, or None."""
        return next((node for node in self if node.number == number), None)

    def connected(self) -> dict[int, Node]:
        """Return the connected nodes by number; new ones are first asked for their clients."""
        connected, now = self.transport.connected(), time.monotonic()
        # A node that has disconnected is asked again as soon as it reconnects.
        self._left_out = {n: why for n, why in self._left_out.items() if n in connected}
        new = {
            number: name
            for number, name in connected.items()
            if self.by_number(number) is None and self._left_out.get(number, ("", now))[1] <= now
        }
        if new:
            self._greet(new, connected)
        return {node.number: node for node in self if node.number in connected}

    def left_out(self) -> list[str]:
        """Return a sentence for each connected node that is left out, with the reason."""
        return [text for text, _ in self._left_out.values()]

    def by_client(self) -> dict[int, Node]:
        """Return the node of each client, by client id."""
        return {client: node for node in self for client in node.clients}

    def begin_session(self, bases: Mapping[str, Seal], owners: Mapping[int, str]) -> None:
        """Begin a session; remove each node that reports a client which another node owns.

        Args:
            bases: the seal of each node, by name: the committed round from whose private states
                the node starts, and their hash.
            owners: the name of the node that owns each client.
        """
        self.session, self.bases, self.owners = self.session + 1, dict(bases), dict(owners)
        for node in [*self]:
            if reason := self._owner_conflict(node.name, node.clients):
                del self.nodes[node.name]
                self._leave_out(node.number, node.name, reason)
            node.base, node.orders = self.bases.get(node.name, NO_SEAL), []

    def set_owners(self, owners: Mapping[int, str]) -> None:
        """Record which node owns each client; existing owners stay."""
        self.owners = {**owners, **self.owners}

    def add_order(self, node: Node, *order: Any) -> None:
        """Queue an order, such as to commit or to discard a round, for the node's next message."""
        self._orders += 1
        if order[0] == "seal" and node.orders and node.orders[-1][1] == "seal":
            del node.orders[-1]  # the node has not replied; the new seal order includes the old one
        node.orders.append([self._orders, *order])

    def message_to(self, node: Node) -> WireMessage:
        """Return a message with the run's setup and session, and the orders queued for the node."""
        return WireMessage(
            {
                "setup": self.setup.to_json(),
                "life": self.session,
                "base": list(node.base),
                "orders": list(node.orders),
            }
        )

    def update_from(self, incoming: Incoming) -> float:
        """Record which orders a node has carried out and its last committed round, from its reply.

        Returns the seconds that the node worked, or 0 if the reply is not valid.
        """
        node = self.by_number(incoming.node)
        if node is None or incoming.wire_message is None or incoming.reason:
            return 0.0
        head = incoming.wire_message.head
        done: Any = head.get("done")
        seconds: Any = head.get("seconds")
        if type(done) is not int or not 0 <= done <= self._orders:
            return 0.0
        try:
            node.base = checked_seal(head.get("sealed"))
        except ValueError:
            return 0.0
        node.orders = [order for order in node.orders if order[0] > done]
        valid = isinstance(seconds, int | float) and 0 <= seconds <= _MOST
        return float(seconds) if valid else 0.0

    def _greet(self, new: Mapping[int, str], connected: Collection[int]) -> None:
        wire_messages = {}
        for number, name in new.items():
            wire_messages[number] = self.message_to(Node(name, number, frozenset(), NO_SEAL))
            wire_messages[number].head["hello"] = True
        for incoming in self.transport.send_and_receive(wire_messages, self.hello_seconds):
            name, reason = new[incoming.node], incoming.reason
            if incoming.wire_message is not None and not reason:
                # With node keys, the registered name is used.
                name = name or short(incoming.wire_message.head.get("name"), 100)
                reason = self._add(incoming.node, name, incoming.wire_message.head, connected)
            if reason:
                self._leave_out(incoming.node, name, reason)

    def _leave_out(self, number: int, name: str, reason: str) -> None:
        text = f"node {name or number} is left out: {reason}"
        if self._left_out.get(number, ("", 0.0))[0] != text:
            self.tell(warning(text))
        self._left_out[number] = text, time.monotonic() + RETRY_SECONDS

    def _add(
        self, number: int, name: str, head: Mapping[str, Any], connected: Collection[int]
    ) -> str:
        """Add a node, or update it after a reconnect; return why it is rejected, or ""."""
        claimed, n_clients = head.get("clients"), self.setup.clients
        if not isinstance(claimed, list) or not all(type(c) is int for c in claimed):
            return "it does not report its clients"
        unknown = next((c for c in claimed if not 0 <= c < n_clients), None)
        if unknown is not None:
            return f"it reports client {short(unknown, 20)}; the run has 0 to {n_clients - 1}"
        clients, entry = frozenset(claimed), None
        if self.entries is not None:
            try:
                entry = self.entries().get(name)
            except ConfigError as error:
                return str(error)
            if entry is None:
                return (
                    "the server's folder has no clients for it. To accept those that it reports, "
                    f"use `fedshot flower keys --admit {name}.pub --clients {ranges(clients)}`"
                )
            if not clients <= entry.clients:
                return (
                    f"it reports client {min(clients - entry.clients)}; in the server's folder it "
                    f"has clients {ranges(entry.clients)}"
                )
        for other in self:
            if other.name != name and other.clients & clients:
                return f"client {min(other.clients & clients)} belongs to node {other.name}"
        if conflict := self._owner_conflict(name, clients):
            return conflict
        node = self.nodes.get(name)
        if node is None:
            node = Node(name, number, clients, self.bases.get(name, NO_SEAL))
            node.environment = _parse_environment(head.get("environment"))
            self.nodes[name] = node
            self.tell(f"node {name} holds clients {ranges(clients)}")
        elif node.number in connected and node.number != number:
            return "another node of this name is connected. Choose another name, with --name"
        node.number, node.clients = number, clients
        node.examples = entry.examples if entry else None
        return ""

    def _owner_conflict(self, name: str, clients: Collection[int]) -> str:
        """Return an error message if a client's private state is on another node, else ""."""
        for client in sorted(clients):
            owner = self.owners.get(client, name)
            if owner != name:
                return (
                    f"the private state of client {client} is stored on node {owner}. Return the "
                    "client to that node, or copy the node's state to a node of that name"
                )
        return ""


def _parse_environment(found: Any) -> dict[str, Any]:
    """Return a node's reported environment; {} if it is not a JSON object, or too large."""
    try:
        fits = len(json.dumps(found, allow_nan=False)) <= _MAX_ENVIRONMENT
    except (ValueError, RecursionError):
        return {}
    return found if fits and isinstance(found, dict) else {}
