"""The fleet whose clients are on Flower nodes.

An exchange sends each node one message, for all clients of the node. The message also holds the
orders that have accumulated since the last message: to drop the states of replies that were not
accepted, or to void (discard) a round. Only the order to seal a round, i.e. to make its states
permanent, is sent in a separate message, and only for methods with private states.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from fedshot.core import records
from fedshot.core.errors import CheckpointError
from fedshot.core.records import Whole
from fedshot.deploy.flower.admission import Entry
from fedshot.deploy.flower.codec import LIMITS, Limits
from fedshot.deploy.flower.messages import COMMON, Incoming, WireMessage
from fedshot.deploy.flower.node_registry import (
    HELLO_SECONDS,
    NO_SEAL,
    Node,
    NodeRegistry,
    Seal,
    Transport,
    checked_seal,
)
from fedshot.deploy.flower.replies import arrivals
from fedshot.deploy.flower.setup import Setup
from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol.exchange import Arrival, Exchange, Fault, Fleet, PerClient

_MAX_ORDERS = 200  # a node with more pending orders gets no work


class FlowerFleet(Wrapper):
    """A fleet that sends work to nodes and checks their replies.

    Args:
        local: fleet on the server's machine, for work that involves no client.
        transport: sends messages to the nodes.
        setup: description of the run for the nodes.
        session: number of this session (start or resume) of the run; it rises with each session.
        keeps_state: whether the method's clients have private states.
        deadline: seconds to wait for the replies of an exchange.
        limits: bounds on received messages.
        tell: logs dropped replies and refused nodes.
        entries: returns the operator's entry for each node; None if nodes have no keys.
        sizes: number of examples of each client, as far as the server knows.
    """

    def __init__(
        self,
        local: Fleet,
        transport: Transport,
        setup: Setup,
        *,
        session: int,
        keeps_state: bool,
        deadline: float,
        limits: Limits = LIMITS,
        tell: Callable[[str], None] = print,
        entries: Callable[[], Mapping[str, Entry]] | None = None,
        sizes: Mapping[int, int] = {},
    ) -> None:
        super().__init__(local)
        self.node_registry = NodeRegistry(
            transport, setup, session, tell, min(HELLO_SECONDS, deadline), entries
        )
        self._transport, self._keeps_state, self._deadline = transport, keeps_state, deadline
        self._limits, self._tell, self._sizes = limits, tell, sizes
        self._opened: dict[int, dict[str, Seal]] = {}  # seals by round, then by node
        self._rounds: dict[int, dict[str, int]] = {}  # sealed round -> node -> round of its states
        self._sent: dict[tuple[int, int], set[str]] = {}  # version -> nodes that were sent work
        self.seconds = 0.0  # sum of the working times reported by each exchange's slowest node

    def missing(self, clients: Collection[int]) -> list[int]:
        """Return the clients whose node is not connected."""
        connected = self.node_registry.connected().values()
        return sorted(set(clients).difference(*(node.clients for node in connected)))

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the arrivals of the clients as their nodes reply."""
        connected, by_client = self.node_registry.connected(), self.node_registry.by_client()
        asked: dict[int, list[int]] = defaultdict(list)
        for client in exchange.to:
            node = by_client.get(client)
            if node is None:
                reason = "no node holds this client"
            elif node.number not in connected:
                reason = f"node {node.name} is not connected"
            elif len(node.orders) > _MAX_ORDERS:
                reason = f"node {node.name} has left {len(node.orders)} orders unanswered"
            else:
                asked[node.number].append(client)
                continue
            yield Arrival(client, None, Fault("lost", reason))
        common = WireMessage({})
        if not isinstance(exchange.down, PerClient):
            common.put(COMMON, exchange.down)  # serialised once for all nodes
        wire_messages = {
            number: self._work(exchange, connected[number], to, common)
            for number, to in asked.items()
        }
        if exchange.phase == "train":
            round = exchange.version[0]
            self._sent = {v: names for v, names in self._sent.items() if v[0] == round}
            self._sent[exchange.version] = {connected[number].name for number in wire_messages}
        slowest = 0.0
        for incoming in self._transport.send_and_receive(wire_messages, self._deadline):
            slowest = max(slowest, self.node_registry.update_from(incoming))
            node, clients = connected[incoming.node], asked[incoming.node]
            holds = {c: self._sizes.get(c, node.examples) for c in clients}
            for arrival in arrivals(
                exchange, incoming, node.name, clients, self._limits, self._tell, holds
            ):
                fault = arrival.fault
                if exchange.phase == "evaluate" and fault and fault.kind == "refused":
                    self._tell(f"predictions of client {arrival.client} refused: {fault.reason}")
                yield arrival
        self.seconds += slowest

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Order the nodes to drop the new states of clients whose replies were not accepted."""
        if exchange.phase != "train" or not self._keeps_state:
            return
        for node in self._reached(exchange.version):
            dropped = sorted((node.clients & set(exchange.to)) - accepted)
            if dropped:
                self.node_registry.add_order(node, "drop", list(exchange.version), dropped)

    def void(self, round: int) -> None:
        """Drop the states of a discarded round, on the nodes and in the server's bank."""
        self.bank.void(round)
        if not self._keeps_state:
            return
        for node in self._reached(*(version for version in self._sent if version[0] == round)):
            self.node_registry.add_order(node, "void", round)

    def _reached(self, *versions: tuple[int, int]) -> Iterator[Node]:
        """Yield the nodes that were sent work of these versions, and so may have states of them."""
        names = set().union(*(self._sent.get(version, set()) for version in versions))
        yield from (node for node in self.node_registry if node.name in names)

    def seal(self, round: int, keep: Collection[int]) -> str:
        """Make a round's states permanent on every node that replies, and in the server's bank.

        A node that does not reply keeps its previous seal; a run resumed from this checkpoint
        takes the clients of that node back to it. Returns the seals of all nodes as JSON.
        """
        bank = self.bank.seal(round, keep)
        if not self._keeps_state:
            return json.dumps({"bank": bank}) if bank else ""
        registry = self.node_registry
        self._rounds = {r: found for r, found in self._rounds.items() if r in keep}
        for node in registry:
            kept = {self._rounds.get(r, {}).get(node.name, r) for r in keep}
            registry.add_order(node, "seal", round, sorted(kept | {node.base[0]}))
        for incoming, name in self._send_orders(self._deadline):
            if incoming.reason:
                self._tell(f"node {name} has not sealed round {round}: {incoming.reason}")
        registry.bases |= {node.name: node.base for node in registry}
        bases = dict(sorted(registry.bases.items()))
        registry.set_owners({client: node.name for node in registry for client in node.clients})
        found = {"nodes": bases, "kept": self._rounds} | ({"bank": bank} if bank else {})
        owned: dict[str, list[int]] = defaultdict(list)
        for client, name in sorted(registry.owners.items()):
            owned[name].append(client)
        text = json.dumps(found | {"clients": owned}, sort_keys=True)
        self._rounds[round] = {name: r for name, (r, _) in bases.items()}
        return text

    def open(self, round: int, sha: str) -> None:
        """Make the states readable as they were when a round was sealed."""
        sealed = _parse_seals(sha)
        self.bank.open(round, sealed.get("bank", ""))
        self._opened[round] = _bases(sealed)
        self._rounds[round] = {name: r for name, (r, _) in self._opened[round].items()}
        self.node_registry.set_owners(_owners(sealed))
        for kept, rounds in sealed.get("kept", {}).items():
            self._rounds.setdefault(int(kept), rounds)

    def rewind(self, round: int, sha: str) -> None:
        """Begin a new session from the states of a sealed round.

        A node that holds clients whose states are on another node is left out.

        Raises CheckpointError if a connected node does not have the states.
        """
        sealed = _parse_seals(sha)
        self.bank.rewind(round, sealed.get("bank", ""))
        self.node_registry.begin_session(_bases(sealed), _owners(sealed))
        self._sent = {}
        for incoming, name in self._send_orders(max(HELLO_SECONDS, self._deadline)):
            if incoming.reason and incoming.wire_message is not None:
                raise CheckpointError(
                    f"node {name} cannot go back to round {round}: {incoming.reason}"
                )

    def _send_orders(self, seconds: float) -> Iterator[tuple[Incoming, str]]:
        """Send every connected node its orders; yield the replies with the nodes' names."""
        connected = self.node_registry.connected()
        wire_messages = {
            number: self.node_registry.message_to(node) for number, node in connected.items()
        }
        for incoming in self._transport.send_and_receive(wire_messages, seconds):
            self.node_registry.update_from(incoming)
            yield incoming, connected[incoming.node].name

    def _work(
        self, exchange: Exchange, node: Node, to: Sequence[int], common: WireMessage
    ) -> WireMessage:
        wire_message = self.node_registry.message_to(node)
        wire_message.add(common)
        for client in to:
            message = exchange.message(client)  # also if common: the meter counts calls
            if COMMON not in wire_message.blocks:
                wire_message.put(f"c{client}", message)
        wire_message.head["work"] = {
            "name": exchange.work.name,
            "phase": exchange.phase,
            "version": list(exchange.version),
            "as_of": self._as_of(exchange, node),
            "key": [exchange.key.root, *exchange.key.path],
            "clients": list(to),
        }
        return wire_message

    def _as_of(self, exchange: Exchange, node: Node) -> list[Any] | None:
        """Return the seal whose states an evaluation of an earlier round reads, or None."""
        opened = self._opened.get(exchange.version[0])
        if exchange.phase == "train" or opened is None or not self._keeps_state:
            return None
        return list(opened.get(node.name, NO_SEAL))


class _Seals(TypedDict):
    """A checkpoint's record of the private states that belong to it."""

    nodes: NotRequired[dict[str, Annotated[list[Any], AfterValidator(checked_seal)]]]
    kept: NotRequired[dict[Annotated[str, Field(pattern="^-?[0-9]{1,9}$")], dict[str, int]]]
    bank: NotRequired[str]
    clients: NotRequired[dict[str, list[Whole]]]


def _parse_seals(sha: str) -> _Seals:
    found: _Seals = records.parse(
        (sha or "{}").encode(), _Seals, "the checkpoint's record of the nodes' states"
    )
    return found


def _owners(sealed: _Seals) -> dict[int, str]:
    return {c: name for name, clients in sealed.get("clients", {}).items() for c in clients}


def _bases(sealed: _Seals) -> dict[str, Seal]:
    return {name: (round, sha) for name, (round, sha) in sealed.get("nodes", {}).items()}
