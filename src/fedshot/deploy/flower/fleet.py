"""The fleet whose clients live on Flower's nodes.

One letter takes a node all that an exchange asks of its clients. It also takes the orders that have
come up since the last one (drop the states that were not accepted, void a round), which therefore
cost no message of their own. Only a seal does, and only where a method keeps private states.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fedshot.deploy.flower.codec import CodecError, Limits
from fedshot.deploy.flower.letters import COMMON, Letter
from fedshot.deploy.flower.post import Mail, Post
from fedshot.deploy.flower.setup import Setup
from fedshot.errors import CheckpointError
from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol import Arrival, Exchange, Fault, Fleet, PerClient, Reply

T = TypeVar("T")
R = TypeVar("R")

_HELLO = 60.0  # seconds for a node to read its data and say who lives there


@dataclass
class Node:
    """What the server knows of a node, by its name; its number may change."""

    name: str
    number: int
    clients: frozenset[int]
    base: tuple[int, str]  # the seal that the server can go back to
    orders: list[list[Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)


class FlowerFleet(Wrapper):
    """Clients on nodes.

    Args:
        here: the fleet of the server's own machine, for work that asks no client.
        post: carries the letters.
        setup: what nodes are told of the run.
        life: how often the run was begun or gone on with.
        keeps: whether the method's clients have private states.
        deadline: seconds that an exchange waits for replies.
        limits: the most that is taken in.
        tell: where it is said what was dropped.
    """

    def __init__(
        self,
        here: Fleet,
        post: Post,
        setup: Setup,
        *,
        life: int,
        keeps: bool,
        deadline: float,
        limits: Limits = Limits(),
        tell: Callable[[str], None] = print,
    ) -> None:
        super().__init__(here)
        self._post, self._setup, self._life, self._keeps = post, setup, life, keeps
        self._deadline, self._limits, self._tell = deadline, limits, tell
        self.nodes: dict[str, Node] = {}
        self._bases: dict[str, tuple[int, str]] = {}
        self._opened: dict[int, dict[str, tuple[int, str]]] = {}
        self._orders = 0
        self.seconds = 0.0  # that nodes say they worked, the slowest of each exchange

    def missing(self, clients: Collection[int]) -> list[int]:
        """Return the clients that no node has claimed, after asking the new ones."""
        self._greet()
        return sorted(set(clients).difference(*(node.clients for node in self.nodes.values())))

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the arrivals of the clients, as their nodes answer."""
        there = self._post.there()
        if any(number not in self._numbers() for number in there):
            self._greet(there)
        asked: dict[int, list[int]] = defaultdict(list)
        homes = {client: node for node in self.nodes.values() for client in node.clients}
        for client in exchange.to:
            node = homes.get(client)
            if node is None:
                yield Arrival(client, None, Fault("lost", "no node holds this client"))
            elif node.number not in there:
                reason = f"node {node.name!r} is not connected"
                yield Arrival(client, None, Fault("lost", reason))
            else:
                asked[node.number].append(client)
        letters = {number: self._work(exchange, number, to) for number, to in asked.items()}
        slowest = 0.0
        for mail in self._post.ask(letters, self._deadline):
            slowest = max(slowest, self._note(mail))
            yield from self._arrivals(mail, asked[mail.node])
        self.seconds += slowest

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Let the nodes drop the states of clients that were not accepted."""
        if exchange.phase != "train" or not self._keeps:
            return
        for node in self.nodes.values():
            dropped = sorted((node.clients & set(exchange.to)) - accepted)
            if dropped:
                self._order(node, "drop", list(exchange.version), dropped)

    def void(self, round: int) -> None:
        """Let the nodes drop the states of a round that does not count."""
        for node in self.nodes.values() if self._keeps else ():
            self._order(node, "void", round)

    def seal(self, round: int, keep: Collection[int]) -> str:
        """Make this round's states last on every node that answers; return who sealed what.

        Of a node that does not answer, an earlier seal stands: its clients have not taken part
        since, or go back to it.
        """
        if not self._keeps:
            return ""
        for node in self.nodes.values():
            self._order(node, "seal", round, sorted({*keep, node.base[0]}))
        there = self._post.there()
        letters = {node.number: self._letter(node) for node in self.nodes.values()
                   if node.number in there}  # fmt: skip
        for mail in self._post.ask(letters, self._deadline):
            self._note(mail)
            if mail.reason:
                self._tell(f"node {self._name(mail.node)} has not sealed {round}: {mail.reason}")
        for node in self.nodes.values():
            self._bases[node.name] = node.base
        return json.dumps({name: list(base) for name, base in sorted(self._bases.items())})

    def open(self, round: int, sha: str) -> None:
        """Remember which states belong to a sealed round."""
        self._opened[round] = _bases(sha)

    def rewind(self, round: int, sha: str) -> None:
        """Begin this life of the run with the states of a sealed round.

        Raises CheckpointError when a node that is there does not have them.
        """
        self._bases = _bases(sha)
        for node in self.nodes.values():
            node.base = self._bases.get(node.name, (-1, ""))
        there = self._post.there()
        letters = {node.number: self._letter(node) for node in self.nodes.values()
                   if node.number in there}  # fmt: skip
        for mail in self._post.ask(letters, max(_HELLO, self._deadline)):
            self._note(mail)
            if mail.reason and mail.letter is not None:
                raise CheckpointError(
                    f"node {self._name(mail.node)} cannot go back to round {round}: {mail.reason}"
                )

    def _greet(self, there: dict[int, str] | None = None) -> None:
        """Ask nodes that are new who lives there."""
        there = self._post.there() if there is None else there
        letters = {}
        for number, name in there.items():
            if number not in self._numbers():
                stranger = Node(name, number, frozenset(), self._bases.get(name, (-1, "")))
                letters[number] = self._letter(stranger, life=0)
                letters[number].head["hello"] = True
        for mail in self._post.ask(letters, _HELLO):
            if mail.letter is None or mail.reason:
                self._tell(f"node {mail.node} does not take part: {mail.reason}")
                continue
            self._admit(mail.node, there[mail.node], mail.letter)

    def _admit(self, number: int, registered: str, letter: Letter) -> None:
        head = letter.head
        name = registered or str(head.get("name"))[:100]  # the key's name, where there are keys
        claimed = head.get("clients")
        if not isinstance(claimed, list) or not all(type(c) is int for c in claimed):
            self._tell(f"node {name} does not take part: it does not say who lives there")
            return
        clients = frozenset(claimed)
        for other in self.nodes.values():
            if other.name != name and other.clients & clients:
                twice = min(other.clients & clients)
                self._tell(f"node {name} does not take part: client {twice} lives at {other.name}")
                return
        known = self.nodes.get(name)
        if known is not None:
            known.number, known.clients = number, clients
            return
        base = self._bases.get(name, (-1, ""))
        environment = head.get("environment")
        self.nodes[name] = Node(name, number, clients, base)
        if isinstance(environment, dict):
            self.nodes[name].environment = environment
        self._tell(f"node {name} holds clients {_ranges(clients)}")

    def _work(self, exchange: Exchange, number: int, to: Sequence[int]) -> Letter:
        node = self._numbers()[number]
        letter = self._letter(node)
        messages = {client: exchange.message(client) for client in to}  # each is counted
        if isinstance(exchange.down, PerClient):
            for client, message in messages.items():
                letter.put(f"c{client}", message)
        else:
            letter.put(COMMON, exchange.down)
        letter.head["work"] = {
            "name": exchange.work.name,
            "phase": exchange.phase,
            "version": list(exchange.version),
            "as_of": self._as_of(exchange, node),
            "key": [exchange.key.root, *exchange.key.path],
            "clients": list(to),
        }
        return letter

    def _as_of(self, exchange: Exchange, node: Node) -> list[Any] | None:
        """Return the seal that an evaluation of an earlier round looks at."""
        opened = self._opened.get(exchange.version[0])
        if exchange.phase == "train" or opened is None or not self._keeps:
            return None
        return list(opened.get(node.name, (-1, "")))

    def _letter(self, node: Node, life: int | None = None) -> Letter:
        return Letter(
            {
                "setup": self._setup.to_json(),
                "life": self._life if life is None else life,
                "base": list(node.base),
                "orders": list(node.orders),
            }
        )

    def _order(self, node: Node, *words: Any) -> None:
        self._orders += 1
        node.orders.append([self._orders, *words])

    def _note(self, mail: Mail) -> float:
        """Take in what a node says of orders and seals; return the seconds that it worked."""
        node = self._numbers().get(mail.node)
        if node is None or mail.letter is None or mail.reason:
            return 0.0
        head = mail.letter.head
        try:
            done, sealed = int(head["done"]), (int(head["sealed"][0]), str(head["sealed"][1]))
            seconds = float(head["seconds"])
        except (KeyError, TypeError, ValueError, IndexError):
            return 0.0
        node.orders = [order for order in node.orders if order[0] > done]
        node.base = sealed
        return seconds

    def _arrivals(self, mail: Mail, asked: Sequence[int]) -> Iterator[Arrival]:
        name = self._name(mail.node)
        if mail.letter is None or mail.reason:
            for client in asked:
                yield Arrival(client, None, Fault("lost", f"node {name}: {mail.reason}"))
            return
        results = mail.letter.head.get("results")
        results = results if isinstance(results, dict) else {}
        for stranger in sorted(set(results) - set(map(str, asked))):
            self._tell(f"node {name} answered for {stranger[:20]!r}, which was not asked; dropped")
        for client in asked:
            if str(client) not in results:
                yield Arrival(client, None, Fault("lost", f"node {name} says nothing of it"))
                continue
            try:
                yield _arrival(client, results[str(client)], mail.letter, self._limits)
            except CodecError as error:
                yield Arrival(client, None, Fault("refused", f"node {name}: {error}"))

    def _numbers(self) -> dict[int, Node]:
        return {node.number: node for node in self.nodes.values()}

    def _name(self, number: int) -> str:
        node = self._numbers().get(number)
        return repr(node.name) if node else str(number)


def _arrival(client: int, result: Any, letter: Letter, limits: Limits) -> Arrival:
    if not isinstance(result, dict):
        raise CodecError("its result has no names")
    if "fault" in result:
        kind, reason = (str(word)[:500] for word in [*result["fault"], "", ""][:2])
        return Arrival(client, None, Fault("refused" if kind == "refused" else "lost", reason))
    content = letter.get(f"c{client}", limits)
    if not isinstance(content, dict) or not {"up", "metrics"} <= set(content):
        raise CodecError("its reply has no parts")
    weight = content["weight"] if "weight" in content else result.get("weight")
    return Arrival(client, Reply(content["up"], {}, weight, content["metrics"]))


def _bases(sha: str) -> dict[str, tuple[int, str]]:
    return {name: (round, found) for name, (round, found) in json.loads(sha or "{}").items()}


def _ranges(clients: Collection[int]) -> str:
    """Return clients as `0-3, 7`."""
    runs: list[list[int]] = []
    for client in sorted(clients):
        if runs and client == runs[-1][1] + 1:
            runs[-1][1] = client
        else:
            runs.append([client, client])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
