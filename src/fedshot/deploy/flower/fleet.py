"""The fleet whose clients are on Flower nodes.

An exchange sends each node one message, for all clients of the node; if their replies would be
large, it sends several, one after another, each for some of the clients. A message also holds the
orders queued since the last message: to drop the states of replies that were not accepted, or to
void (discard) a round. Only the order to commit a round (`seal`), which makes its private states
permanent, is sent in a separate message, and only for methods with private states.

A seal is a node's confirmation that it has committed a round: the round, and the states' hash.

The server does not trust the replies of nodes. An invalid reply becomes a fault of its client, with
a short reason. Such a reply does not end the run and cannot bloat the run's records.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, NotRequired

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypedDict

from fedshot.core import records, tree
from fedshot.core.console import warning
from fedshot.core.errors import CheckpointError
from fedshot.core.records import Whole
from fedshot.core.serialised import LIMITS, CodecError, Limits, short
from fedshot.deploy.flower.masking_request import masking_to_json, reducer_name
from fedshot.deploy.flower.messages import COMMON, SMALL, Incoming, WireMessage
from fedshot.deploy.flower.node_registry import (
    HELLO_SECONDS,
    NO_SEAL,
    Entry,
    Node,
    NodeRegistry,
    Seal,
    SealRecord,
    Transport,
)
from fedshot.deploy.flower.setup import Setup
from fedshot.fleets.guard import MAX_METRICS, METRIC_NAME
from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol.exchange import Arrival, Exchange, Fault, Fleet, PerClient, Reply
from fedshot.protocol.reducers import NOT_FINITE, Mean

_MAX_REPLY = 32 << 20  # bytes of a reply, unless that of one client has more
_MAX_ORDERS = 200  # a node with more pending orders gets no work
_MAX_UNKNOWN = 200  # total length of the names of unknown parts


class FlowerFleet(Wrapper):
    """A fleet that has nodes run client functions, and checks the nodes' replies.

    Args:
        local: fleet on the server's machine, for computations of the server alone.
        transport: sends messages to the nodes.
        setup: description of the run for the nodes.
        session: number of this session. Each start or resume of the run begins a session, with a
            higher number than all earlier sessions of the run.
        keeps_state: whether the method's clients have private states.
        deadline: seconds to wait for the replies of an exchange.
        limits: bounds on received messages.
        tell: logs dropped replies and rejected nodes.
        entries: returns the operator's record of each node, by node name, as `read_entries` does;
            None if nodes have no keys.
        sizes: number of examples of each client, as far as the server knows.
        names_reducers: whether nodes are told how parts are combined, which attacks and compression
            need to know.
        splits: whether large replies of a node come in several messages. Without it, clients that
            collude know of each other.
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
        names_reducers: bool = False,
        splits: bool = True,
    ) -> None:
        super().__init__(local)
        self._names_reducers, self._splits = names_reducers, splits
        self.node_registry = NodeRegistry(
            transport, setup, session, tell, min(HELLO_SECONDS, deadline), entries
        )
        self._transport, self._keeps_state, self._deadline = transport, keeps_state, deadline
        self._limits, self._tell, self._sizes = limits, tell, sizes
        self._opened: dict[int, dict[str, Seal]] = {}  # seals by round, then by node
        self._rounds: dict[int, dict[str, int]] = {}  # committed round -> node -> its states' round
        self._sent: dict[tuple[int, int], set[str]] = {}  # version -> nodes that were sent work
        self.nbytes: Counter[str] = Counter()  # of arrays in messages, "down" and "up"
        self.connected = 0  # number of nodes at the last exchange
        self.seconds = 0.0  # sum of the working times reported by each exchange's slowest node

    def missing(self, clients: Collection[int]) -> list[int]:
        """Return the clients whose node is not connected."""
        connected = self.node_registry.connected().values()
        return sorted(set(clients).difference(*(node.clients for node in connected)))

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the arrivals of the clients as their nodes reply."""
        connected, by_client = self.node_registry.connected(), self.node_registry.by_client()
        self.connected = len(connected)
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
        left = dict(asked)  # clients by node for whom no message is made yet
        sent: dict[int, list[list[int]]] = defaultdict(list)  # clients of messages not yet answered

        def following(number: int) -> WireMessage | None:
            if not left[number]:
                return None
            made, clients = self._work(exchange, connected[number], left[number], common)
            self.nbytes["down"] += made.nbytes
            if len(left[number]) < len(asked[number]) and common.nbytes > SMALL:  # a node keeps it
                self.nbytes["down"] -= common.nbytes
            left[number] = left[number][len(clients) :]
            sent[number].append(clients)
            return made

        wire_messages = {number: made for number in asked if (made := following(number))}
        if exchange.phase == "train":
            round = exchange.version[0]
            self._sent = {v: names for v, names in self._sent.items() if v[0] == round}
            reached = self._sent.setdefault(exchange.version, set())
            reached |= {connected[number].name for number in wire_messages}
        seconds: dict[int, float] = defaultdict(float)
        for incoming in self._transport.send_and_receive(
            wire_messages, self._deadline, following
        ):  # fmt: skip
            if incoming.wire_message is not None:
                self.nbytes["up"] += incoming.wire_message.nbytes
            seconds[incoming.node] += self.node_registry.update_from(incoming)
            node, clients = connected[incoming.node], sent[incoming.node].pop(0)
            if incoming.reason:  # the last message of this node
                clients += left.pop(node.number)
            holds = {c: self._sizes.get(c, node.examples) for c in clients}
            for arrival in arrivals(
                exchange, incoming, node.name, clients, self._limits, self._tell, holds
            ):
                fault = arrival.fault
                if exchange.phase == "evaluate" and fault and fault.kind == "refused":
                    self._tell(
                        warning(f"predictions of client {arrival.client} refused: {fault.reason}")
                    )
                yield arrival
        self.seconds += max(seconds.values(), default=0.0)

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Order the nodes to drop the new states of clients whose replies were not accepted."""
        if exchange.phase != "train" or not self._keeps_state:
            return
        for node in self._reached(exchange.version):
            dropped = sorted((node.clients & set(exchange.to)) - accepted)
            if dropped:
                self.node_registry.add_order(node, "drop", list(exchange.version), dropped)

    def void(self, round: int) -> None:
        """Delete a discarded round's states on the nodes, and its trees in the server's bank.

        The bank holds trees that the server stores on disk, one for each client: see `Bank`.
        """
        self.bank.void(round)
        if not self._keeps_state:
            return
        for node in self._reached(*(version for version in self._sent if version[0] == round)):
            self.node_registry.add_order(node, "void", round)

    def _reached(self, *versions: tuple[int, int]) -> Iterator[Node]:
        """Yield the nodes that were sent exchanges of these versions, and may have stored states.

        A version is (round, index of the exchange in that round).
        """
        names = set().union(*(self._sent.get(version, set()) for version in versions))
        yield from (node for node in self.node_registry if node.name in names)

    def seal(self, round: int, keep: Collection[int]) -> str:
        """Commit a round's states on every node that replies, and its trees in the server's `Bank`.

        A node that does not reply keeps the states of its previous commit. A run resumed from this
        checkpoint rewinds the node's clients to them. Returns the seals of all nodes as JSON.
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
                self._tell(
                    warning(f"node {name} has not committed round {round}: {incoming.reason}")
                )
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
        """Make the states of a committed round readable; `sha` is what `seal` returned for it."""
        sealed = _parse_seals(sha)
        self.bank.open(round, sealed.get("bank", ""))
        self._opened[round] = _bases(sealed)
        self._rounds[round] = {name: r for name, (r, _) in self._opened[round].items()}
        self.node_registry.set_owners(_owners(sealed))
        for kept, rounds in sealed.get("kept", {}).items():
            self._rounds.setdefault(int(kept), rounds)

    def rewind(self, round: int, sha: str) -> None:
        """Begin a new session from the states of a committed round.

        `sha` is what `seal` returned for the round. A node is left out if it holds a client whose
        state is on another node.

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
        """Send every connected node its pending orders; yield each reply with the node's name.

        Orders are to commit (`seal`) or to discard (`void`) a round, or to drop states.
        """
        connected = self.node_registry.connected()
        wire_messages = {
            number: self.node_registry.message_to(node) for number, node in connected.items()
        }
        for incoming in self._transport.send_and_receive(wire_messages, seconds):
            self.node_registry.update_from(incoming)
            yield incoming, connected[incoming.node].name

    def _work(
        self, exchange: Exchange, node: Node, to: Sequence[int], common: WireMessage
    ) -> tuple[WireMessage, list[int]]:
        """Return a message with work for the first of the clients `to`, and these clients.

        They are as many as have replies of `_MAX_REPLY` bytes, if these are as large as what the
        clients are sent, and at least one.
        """
        wire_message, clients, n_bytes = self.node_registry.message_to(node), list[int](), 0
        wire_message.add(common)
        for client in to:
            message = exchange.message(client)  # also if common: the meter counts calls
            n_bytes += tree.nbytes(message)
            if COMMON not in wire_message.blocks:
                wire_message.put(f"c{client}", message)
            clients.append(client)
            if self._splits and n_bytes + tree.nbytes(message) > _MAX_REPLY:
                break
        wire_message.head["work"] = {
            "name": exchange.work.name,
            "phase": exchange.phase,
            "version": list(exchange.version),
            "as_of": self._as_of(exchange, node),
            "key": [exchange.key.root, *exchange.key.path],
            "clients": clients,
        }
        if exchange.masking is not None:
            wire_message.head["work"]["masking"] = masking_to_json(exchange.masking)
        elif self._names_reducers:
            wire_message.head["work"]["parts"] = {
                name: reducer_name(reducer) for name, reducer in exchange.reduce.items()
            }
        return wire_message, clients

    def _as_of(self, exchange: Exchange, node: Node) -> list[Any] | None:
        """Return the seal of the earlier states that the node has to read in this exchange.

        Earlier states are those of a round that `open` has made readable; only evaluations read
        them. Returns None if the exchange reads none.
        """
        opened = self._opened.get(exchange.version[0])
        if exchange.phase == "train" or opened is None or not self._keeps_state:
            return None
        return list(opened.get(node.name, NO_SEAL))


def arrivals(
    exchange: Exchange,
    incoming: Incoming,
    name: str,
    asked: Sequence[int],
    limits: Limits,
    tell: Callable[[str], None],
    holds: Mapping[int, int | None] = {},
) -> Iterator[Arrival]:
    """Yield one arrival for each client in `asked`, from a node's message.

    `name` is the node's name. `holds` gives the number of examples of each client, if known, to
    check weights that count examples.
    """
    if incoming.wire_message is None or incoming.reason:
        for client in asked:
            yield Arrival(client, None, Fault("lost", f"node {name}: {incoming.reason}"))
        return
    results = incoming.wire_message.head.get("results")
    results = results if isinstance(results, dict) else {}
    if unasked := sorted(set(results) - set(map(str, asked))):
        others = f" and {len(unasked) - 1} others" if unasked[1:] else ""
        tell(
            warning(
                f"node {name} replies for {short(unasked[0], 20)!r}{others}, which it was not "
                "asked for; dropped"
            )
        )
    for client in asked:
        if str(client) not in results:
            yield Arrival(client, None, Fault("lost", f"node {name} sent no result for it"))
            continue
        try:
            result, most = results[str(client)], holds.get(client)
            yield _arrival(client, result, incoming.wire_message, limits, exchange, most)
        except CodecError as error:
            yield Arrival(client, None, Fault("refused", short(f"node {name}: {error}")))


def _arrival(
    client: int,
    result: Any,
    wire_message: WireMessage,
    limits: Limits,
    exchange: Exchange,
    most: int | None,
) -> Arrival:
    """Return a client's arrival from its entry in `results`.

    `most` is the number of the client's examples, None if it is unknown.
    """
    if not isinstance(result, dict):
        raise CodecError("its result is not a JSON object")
    if "fault" in result:
        fault = result["fault"]
        if not isinstance(fault, list) or [type(part) for part in fault] != [str, str]:
            raise CodecError("its fault is not a kind and a reason")
        kind, reason = fault
        return Arrival(
            client, None, Fault("refused" if kind == "refused" else "lost", short(reason))
        )
    content = wire_message.get(f"c{client}", limits)
    if not isinstance(content, dict) or not {"up", "metrics"} <= set(content):
        raise CodecError("its reply lacks `up` or `metrics`")
    up, metrics = content["up"], content["metrics"]
    weight: Any = content["weight"] if "weight" in content else result.get("weight")
    if isinstance(weight, Tensor):
        valid = weight.numel() == 1
    else:  # bounded, since an error message would quote a number of a thousand digits
        valid = type(weight) in (int, float) and not abs(weight) > 2**63
    if not valid:
        raise CodecError("its weight is not one number")
    _check_names(up, metrics, exchange)
    weighted = any(isinstance(r, Mean) and r.of_examples for r in exchange.reduce.values())
    if weighted and most is not None and float(weight) > most:
        raise CodecError(f"the weight is {float(weight):.6g}; the client holds {most} examples")
    if exchange.phase == "evaluate" and not all(
        bool(torch.isfinite(leaf).all()) for leaf in tree.leaves(up) if leaf.is_floating_point()
    ):
        raise CodecError(f"a prediction {NOT_FINITE}")
    return Arrival(client, Reply(up, {}, weight, metrics))


def _check_names(up: Any, metrics: Any, exchange: Exchange) -> None:
    """Raise CodecError if an upload has too many unknown parts, or if its metrics are invalid.

    Otherwise, names invented by a node could bloat the communication log and the run's records.
    """
    unknown = set(up) - set(exchange.reduce) if isinstance(up, dict) else set()
    if sum(map(len, unknown)) > _MAX_UNKNOWN:
        raise CodecError(f"its reply has {len(unknown)} unknown parts")
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        raise CodecError(f"its reply does not have at most {MAX_METRICS} metrics")
    for name, value in metrics.items():
        if not METRIC_NAME.fullmatch(name):
            raise CodecError(f"it has a metric named {short(name, 64)!r}")
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise CodecError(f"metric {name!r} is not one number")


class _Seals(TypedDict):
    """A checkpoint's record of the private states that belong to it."""

    nodes: NotRequired[dict[str, SealRecord]]
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
