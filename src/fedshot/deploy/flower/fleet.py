"""The fleet whose clients live on Flower's nodes.

One letter takes a node all that an exchange asks of its clients. It also takes the orders that have
come up since the last one (drop the states that were not accepted, void a round), which therefore
cost no message of their own. Only a seal does, and only where a method keeps private states.
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
    HELLO,
    NO_SEAL,
    Carrier,
    Node,
    NodeRegistry,
    Seal,
    checked_seal,
)
from fedshot.deploy.flower.replies import arrivals
from fedshot.deploy.flower.setup import Setup
from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol.exchange import Arrival, Exchange, Fault, Fleet, PerClient

_BEHIND = 200  # orders that a node may have left unanswered and still get work


class FlowerFleet(Wrapper):
    """Clients on nodes.

    Args:
        here: the fleet of the server's own machine, for work that asks no client.
        post: carries the letters.
        setup: what nodes are told of the run.
        life: number of this life of the run, above all that were before.
        keeps: whether the method's clients have private states.
        deadline: seconds that an exchange waits for replies.
        limits: the most that is taken in.
        tell: where it is said what was dropped.
        entries: returns what the operator has written of the nodes; None without keys.
        sizes: how many examples clients hold, as far as the server knows.
    """

    def __init__(
        self,
        here: Fleet,
        post: Carrier,
        setup: Setup,
        *,
        life: int,
        keeps: bool,
        deadline: float,
        limits: Limits = LIMITS,
        tell: Callable[[str], None] = print,
        entries: Callable[[], Mapping[str, Entry]] | None = None,
        sizes: Mapping[int, int] = {},
    ) -> None:
        super().__init__(here)
        self.node_registry = NodeRegistry(post, setup, life, tell, min(HELLO, deadline), entries)
        self._sizes = sizes
        self._post, self._keeps, self._deadline = post, keeps, deadline
        self._limits, self._tell = limits, tell
        self._opened: dict[int, dict[str, Seal]] = {}
        self._rounds: dict[int, dict[str, int]] = {}  # that a node's states of a seal are of
        self._sent: dict[tuple[int, int], set[str]] = {}  # the nodes that got work of this round
        self.seconds = 0.0  # that nodes say they worked, of the slowest of each exchange

    def missing(self, clients: Collection[int]) -> list[int]:
        """Return the clients whose node is not there."""
        there = self.node_registry.there().values()
        return sorted(set(clients).difference(*(node.clients for node in there)))

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the arrivals of the clients, as their nodes answer."""
        there, homes = self.node_registry.there(), self.node_registry.homes()
        asked: dict[int, list[int]] = defaultdict(list)
        for client in exchange.to:
            node = homes.get(client)
            if node is None:
                yield Arrival(client, None, Fault("lost", "no node holds this client"))
            elif node.number not in there:
                reason = f"node {node.name} is not connected"
                yield Arrival(client, None, Fault("lost", reason))
            elif len(node.orders) > _BEHIND:
                reason = f"node {node.name} has left {len(node.orders)} orders unanswered"
                yield Arrival(client, None, Fault("lost", reason))
            else:
                asked[node.number].append(client)
        common = WireMessage({})
        if not isinstance(exchange.down, PerClient):
            common.put(COMMON, exchange.down)  # once, however many nodes it goes to
        wire_messages = {
            number: self._work(exchange, there[number], to, common) for number, to in asked.items()
        }
        if exchange.phase == "train":
            round = exchange.version[0]
            self._sent = {v: names for v, names in self._sent.items() if v[0] == round}
            self._sent[exchange.version] = {there[number].name for number in wire_messages}
        slowest = 0.0
        for mail in self._post.ask(wire_messages, self._deadline):
            slowest = max(slowest, self.node_registry.note(mail))
            node = there[mail.node]
            holds = {c: self._sizes.get(c, node.examples) for c in asked[mail.node]}
            for arrival in arrivals(
                exchange, mail, node.name, asked[mail.node], self._limits, self._tell, holds
            ):
                fault = arrival.fault
                if exchange.phase == "evaluate" and fault and fault.kind == "refused":
                    # The score alone would say that somebody's episodes are unanswered.
                    self._tell(f"test answers of client {arrival.client}: {fault.reason}")
                yield arrival
        self.seconds += slowest

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Let the nodes drop the states of clients that were not accepted."""
        if exchange.phase != "train" or not self._keeps:
            return
        for node in self._reached(exchange.version):
            dropped = sorted((node.clients & set(exchange.to)) - accepted)
            if dropped:
                self.node_registry.order(node, "drop", list(exchange.version), dropped)

    def void(self, round: int) -> None:
        """Let the nodes drop the states of a round that does not count, and the bank here."""
        self.bank.void(round)
        if not self._keeps:
            return
        for node in self._reached(*(version for version in self._sent if version[0] == round)):
            self.node_registry.order(node, "void", round)

    def _reached(self, *versions: tuple[int, int]) -> Iterator[Node]:
        """Yield the nodes that were sent work: others have nothing to drop."""
        names = set().union(*(self._sent.get(version, set()) for version in versions))
        yield from (node for node in self.node_registry if node.name in names)

    def seal(self, round: int, keep: Collection[int]) -> str:
        """Make this round's states last on every node that answers, and the bank here.

        Returns who sealed what.

        Of a node that does not answer an earlier seal stands. Should the run be gone on with from
        this checkpoint, its clients go back to that.
        """
        bank = self.bank.seal(round, keep)
        if not self._keeps:
            return json.dumps({"bank": bank}) if bank else ""
        self._rounds = {r: found for r, found in self._rounds.items() if r in keep}
        for node in self.node_registry:
            kept = {self._rounds.get(r, {}).get(node.name, r) for r in keep}
            self.node_registry.order(node, "seal", round, sorted(kept | {node.base[0]}))
        for mail, name in self._tell_all(self._deadline):
            if mail.reason:
                self._tell(f"node {name} has not sealed round {round}: {mail.reason}")
        self.node_registry.bases |= {node.name: node.base for node in self.node_registry}
        bases = dict(sorted(self.node_registry.bases.items()))
        self.node_registry.bind(
            {client: node.name for node in self.node_registry for client in node.clients}
        )
        found = {"nodes": bases, "kept": self._rounds} | ({"bank": bank} if bank else {})
        found["clients"] = _by_node(self.node_registry.owners)
        text = json.dumps(found, sort_keys=True)
        self._rounds[round] = {name: r for name, (r, _) in bases.items()}
        return text

    def open(self, round: int, sha: str) -> None:
        """Remember which states belong to a sealed round."""
        self.bank.open(round, _bank(sha))
        self._opened[round] = _bases(sha)
        self._rounds[round] = {name: r for name, (r, _) in self._opened[round].items()}
        self.node_registry.bind(_owners(sha))
        for kept, rounds in _sealed(sha).get("kept", {}).items():
            self._rounds.setdefault(int(kept), rounds)

    def rewind(self, round: int, sha: str) -> None:
        """Begin this life of the run with the states of a sealed round.

        A node that holds clients whose states are at another is no part of it.

        Raises CheckpointError when a node that is there does not have them.
        """
        self.bank.rewind(round, _bank(sha))
        self.node_registry.begin_life(_bases(sha), _owners(sha))
        self._sent = {}
        for mail, name in self._tell_all(max(HELLO, self._deadline)):
            if mail.reason and mail.wire_message is not None:
                raise CheckpointError(f"node {name} cannot go back to round {round}: {mail.reason}")

    def _tell_all(self, seconds: float) -> Iterator[tuple[Incoming, str]]:
        """Send every node that is there its orders; yield what it says, with its name."""
        there = self.node_registry.there()
        wire_messages = {
            number: self.node_registry.wire_message(node) for number, node in there.items()
        }
        for mail in self._post.ask(wire_messages, seconds):
            self.node_registry.note(mail)
            yield mail, there[mail.node].name

    def _work(
        self, exchange: Exchange, node: Node, to: Sequence[int], common: WireMessage
    ) -> WireMessage:
        wire_message = self.node_registry.wire_message(node)
        wire_message.add(common)
        for client in to:
            message = exchange.message(client)  # counted for each client
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
        """Return the seal that an evaluation of an earlier round looks at."""
        opened = self._opened.get(exchange.version[0])
        if exchange.phase == "train" or opened is None or not self._keeps:
            return None
        return list(opened.get(node.name, NO_SEAL))


def _by_node(owners: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for client, name in sorted(owners.items()):
        found.setdefault(name, []).append(client)
    return dict(sorted(found.items()))


class _Sealed(TypedDict):
    """What a checkpoint says of the states that belong to it."""

    nodes: NotRequired[dict[str, Annotated[list[Any], AfterValidator(checked_seal)]]]
    kept: NotRequired[dict[Annotated[str, Field(pattern="^-?[0-9]{1,9}$")], dict[str, int]]]
    bank: NotRequired[str]
    clients: NotRequired[dict[str, list[Whole]]]


def _sealed(sha: str) -> dict[str, Any]:
    found: dict[str, Any] = records.parse(
        (sha or "{}").encode(), _Sealed, "what the checkpoint says of the nodes' states"
    )
    return found


def _owners(sha: str) -> dict[int, str]:
    found = _sealed(sha).get("clients", {})
    return {client: name for name, clients in found.items() for client in clients}


def _bank(sha: str) -> str:
    found: str = _sealed(sha).get("bank", "")
    return found


def _bases(sha: str) -> dict[str, Seal]:
    nodes = _sealed(sha).get("nodes", {})
    return {name: (round, found) for name, (round, found) in nodes.items()}
