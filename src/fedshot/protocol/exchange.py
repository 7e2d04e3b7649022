"""The values that pass between a method and a fleet.

A method asks for an `Exchange`: run this client function at these clients, with this message
down. Each client answers with a `Reply`; what reaches the server is an `Arrival`, and the method
gets one `Outcome`. Source of the idea: "exchange" is the only place where method and fleet meet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from torch import Tensor

from fedshot.core.errors import MethodError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.protocol.reducers import NOT_FINITE, TOO_LARGE, Reducer

F = TypeVar("F", bound=Callable[..., "Reply"])
T = TypeVar("T")
R = TypeVar("R")


class Reply(NamedTuple):
    """What one client hands back.

    `up` is named parts for the server, `private` is a tree that stays with the client, `weight`
    is positive (examples or episodes, the method says which), `metrics` are scalars to be
    averaged with that weight and shown.
    """

    up: Mapping[str, Tree]
    private: Tree
    weight: Tensor | float
    metrics: Mapping[str, Tensor] = {}


def client_work(draw: str | None = None) -> Callable[[F], F]:
    """Mark a method's function as client work: `f(self, down, private, drawn) -> Reply`.

    Args:
        draw: name of the method's `draw(data, key) -> tree`, run on the client's host just
            before; the only place that touches data or chance. None: `drawn` is `{}`.
    """

    def mark(fn: F) -> F:
        fn.draw = draw  # type: ignore[attr-defined]
        return fn

    return mark


@dataclass(frozen=True)
class ClientWork:
    """A client function by name, so that it can be called here or asked for over a network."""

    method: Any
    name: str

    @classmethod
    def of(cls, bound: Callable[..., Reply]) -> ClientWork:
        """Take a bound method that `client_work` has marked."""
        owner, name = getattr(bound, "__self__", None), getattr(bound, "__name__", "?")
        if owner is None or not hasattr(bound, "draw"):
            raise MethodError(
                f"{name} is not client work: decorate the method's function with "
                "@client_work(draw=...) and pass it bound, as in self.train."
            )
        return cls(owner, name)

    @property
    def exists(self) -> bool:
        """Whether the method has client work of this name, which a message may ask for."""
        return not self.name.startswith("_") and hasattr(self._of(self.name), "draw")

    @property
    def draw_name(self) -> str | None:
        """The function that draws for the work; None if nothing is drawn."""
        name: str | None = self._of(self.name).draw
        return name

    def draw(self, data: Any, key: Key) -> Tree:
        """Draw what the work needs from a client's data."""
        name = self.draw_name
        return {} if name is None else self._of(name)(data, key)

    def __call__(self, down: Tree, private: Tree, drawn: Tree) -> Reply:
        """Run the work."""
        reply: Reply = self._of(self.name)(down, private, drawn)
        return reply

    def _of(self, name: str) -> Any:
        return getattr(self.method, name, None)


@dataclass(frozen=True)
class PerClient:
    """A message that differs from client to client; `fn(client)` is called when it is sent."""

    fn: Callable[[int], Tree]


@dataclass(frozen=True)
class Exchange:
    """One request to a cohort.

    `version` is (round, number of the exchange in that round): it names the private states that
    this exchange leaves behind. `phase` is what the bytes are for. `on_send` is told of every
    message as it is made for a client.
    """

    work: ClientWork
    down: Tree | PerClient
    to: tuple[int, ...]
    reduce: Mapping[str, Reducer]
    key: Key
    version: tuple[int, int]
    phase: Literal["train", "evaluate"] = "train"
    on_send: Callable[[Tree], None] | None = None

    def message(self, client: int) -> Tree:
        """Return what `client` is sent, once for each time that it is."""
        message = self.down.fn(client) if isinstance(self.down, PerClient) else self.down
        if self.on_send is not None:
            self.on_send(message)
        return message

    def client_key(self, client: int) -> Key:
        """Return the key of everything that `client` draws in this exchange."""
        return self.key.at("work", self.work.name, "client", client)


class Fault(NamedTuple):
    """Why a client's reply does not count: `refused` by the guard, or `lost` on the way."""

    kind: Literal["refused", "lost"]
    reason: str

    @property
    def diverged(self) -> bool:
        """Whether the reply was refused for values that are not finite, or too large."""
        return self.kind == "refused" and any(w in self.reason for w in (NOT_FINITE, TOO_LARGE))


class Arrival(NamedTuple):
    """What came back from one client: a reply, or the fault that took its place."""

    client: int
    reply: Reply | None
    fault: Fault | None = None


class Bank(Protocol):
    """Trees that the server keeps, one for each client, on its disk; versions are (round, n)."""

    def load(self, client: int, upto: tuple[int, int]) -> dict[str, Tensor] | None:
        """Return the leaves of the newest version that is not after `upto`; None if none is."""
        ...

    def save(self, client: int, version: tuple[int, int], state: object) -> None:
        """Write a version; it lasts once its round is sealed."""
        ...

    def void(self, round: int) -> None:
        """Forget what was written in a round that does not count."""
        ...

    def seal(self, round: int, keep: Collection[int]) -> str:
        """Make what was written so far the state of a round; return its hash, "" for nothing."""
        ...

    def open(self, round: int, sha: str) -> None:
        """Make the trees of a sealed round readable."""
        ...

    def rewind(self, round: int, sha: str) -> None:
        """Go back to a sealed round."""
        ...


class Fleet(Protocol):
    """Where clients run. A fleet never knows the name of a method."""

    @property
    def bank(self) -> Bank:
        """What the server keeps of each client; sealed and rewound with the private states."""
        ...

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield one arrival per client asked, in any order, as they come in."""
        ...

    def parallel_map(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return `fn` of every item, in their order: work of the server's own, on all its cores."""
        ...

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Keep the private states of the accepted clients, and drop those of the others."""
        ...

    def void(self, round: int) -> None:
        """Drop every private state of this round: the round does not count."""
        ...

    def seal(self, round: int, keep: Collection[int]) -> str:
        """Make this round's private states last, and those of the rounds to keep; return a hash."""
        ...

    def open(self, round: int, sha: str) -> None:
        """Make the private states sealed with this hash readable; change nothing."""
        ...

    def rewind(self, round: int, sha: str) -> None:
        """Go back to the private states sealed with this hash; drop all later ones."""
        ...


@dataclass(frozen=True)
class Outcome(Mapping[str, Tree]):
    """The reduced parts by name, and how the exchange went."""

    parts: Mapping[str, Tree]
    accepted: tuple[int, ...]
    faults: Mapping[int, Fault] = field(default_factory=dict)
    weight: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tree:
        return self.parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)
