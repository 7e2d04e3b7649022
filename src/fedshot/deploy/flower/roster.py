"""What the server knows of the nodes: their numbers now, who lives there, what they have sealed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedshot.deploy.flower.letters import Letter, Mail
from fedshot.deploy.flower.setup import Setup

HELLO = 60.0  # seconds for a node to read its data and say who lives there

Seal = tuple[int, str]  # a round, and the hash of the states that were sealed with it
NO_SEAL: Seal = (-1, "")


class Carrier(Protocol):
    """What brings letters to nodes, as `Post` does."""

    def there(self) -> dict[int, str]:
        """Return the nodes that are connected, with the names they are registered by."""
        ...

    def ask(self, letters: Mapping[int, Letter], seconds: float) -> Iterator[Mail]:
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


class Roster:
    """The nodes of a run.

    Args:
        post: carries letters to them.
        setup: what they are told of the run.
        life: number of this life of the run, above all that were before.
        tell: where it is said who comes and who stays away.
    """

    def __init__(self, post: Carrier, setup: Setup, life: int, tell: Callable[[str], None]) -> None:
        self._post, self._setup, self._life, self._tell = post, setup, life, tell
        self.nodes: dict[str, Node] = {}
        self.bases: dict[str, Seal] = {}
        self._orders = 0

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def by_number(self, number: int) -> Node | None:
        """Return the node that has this number now."""
        return next((node for node in self if node.number == number), None)

    def there(self) -> dict[int, Node]:
        """Return the nodes that are connected, after a word with those that are new."""
        there = self._post.there()
        new = {number: name for number, name in there.items() if self.by_number(number) is None}
        if new:
            self._greet(new)
        return {node.number: node for node in self if node.number in there}

    def homes(self) -> dict[int, Node]:
        """Return the node of each client."""
        return {client: node for node in self for client in node.clients}

    def begin_life(self, bases: Mapping[str, Seal]) -> None:
        """Let every node begin anew with what it had sealed."""
        self._life, self.bases = self._life + 1, dict(bases)
        for node in self:
            node.base, node.orders = self.bases.get(node.name, NO_SEAL), []

    def order(self, node: Node, *words: Any) -> None:
        """Give a node an order, which goes along with its next letter."""
        self._orders += 1
        node.orders.append([self._orders, *words])

    def letter(self, node: Node) -> Letter:
        """Return a letter with all that a node must know before it reads on."""
        return Letter(
            {
                "setup": self._setup.to_json(),
                "life": self._life,
                "base": list(node.base),
                "orders": list(node.orders),
            }
        )

    def note(self, mail: Mail) -> float:
        """Take in what a node says of orders and seals; return the seconds that it worked."""
        node = self.by_number(mail.node)
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

    def _greet(self, new: Mapping[int, str]) -> None:
        """Ask nodes that are new who lives there."""
        letters = {}
        for number, name in new.items():
            letters[number] = self.letter(Node(name, number, frozenset(), NO_SEAL))
            letters[number].head["hello"] = True
        for mail in self._post.ask(letters, HELLO):
            if mail.letter is None or mail.reason:
                self._tell(f"node {new[mail.node] or mail.node} stays away: {mail.reason}")
            else:
                self._admit(mail.node, new[mail.node], mail.letter)

    def _admit(self, number: int, registered: str, letter: Letter) -> None:
        head = letter.head
        name = registered or str(head.get("name"))[:100]  # the key's name, where there are keys
        claimed = head.get("clients")
        if not isinstance(claimed, list) or not all(type(c) is int for c in claimed):
            self._tell(f"node {name} stays away: it does not say who lives there")
            return
        clients = frozenset(claimed)
        for other in self:
            if other.name != name and other.clients & clients:
                twice = min(other.clients & clients)
                self._tell(f"node {name} stays away: client {twice} lives at {other.name}")
                return
        known = self.nodes.get(name)
        if known is not None:
            known.number, known.clients = number, clients
            return
        made = self.nodes[name] = Node(name, number, clients, self.bases.get(name, NO_SEAL))
        environment = head.get("environment")
        if isinstance(environment, dict):
            made.environment = environment
        self._tell(f"node {name} holds clients {ranges(clients)}")


def ranges(clients: Collection[int]) -> str:
    """Return clients as `0-3, 7`."""
    runs: list[list[int]] = []
    for client in sorted(clients):
        if runs and client == runs[-1][1] + 1:
            runs[-1][1] = client
        else:
            runs.append([client, client])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
