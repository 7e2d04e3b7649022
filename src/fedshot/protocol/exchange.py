"""The values that methods and fleets exchange.

A method requests an `Exchange`: run this client function (a function of the method) on these
clients, with this message. Each client returns a `Reply`; the server receives it as an `Arrival`,
and the method gets one `Outcome`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import MethodError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.protocol.reducers import NOT_FINITE, TOO_LARGE, Mean, Reducer, Sum

F = TypeVar("F", bound=Callable[..., "Reply"])
T = TypeVar("T")
R = TypeVar("R")


class Reply(NamedTuple):
    """What a client function returns.

    `up` holds the parts: the named trees that the server reduces. `private` is the tree that stays
    with the client. `weight` is a positive number of examples or episodes. `metrics` are scalars,
    which the server averages with this weight and reports.
    """

    up: Mapping[str, Tree]
    private: Tree
    weight: Tensor | float
    metrics: Mapping[str, Tensor] = {}

    def on_cpu(self) -> Reply:
        """Return the reply with its tensors on the CPU, without their autograd graph."""
        tensors, weight = self.split()
        return Reply.joined(tree.to(tree.detach(tensors), torch.device("cpu")), weight)

    def split(self) -> tuple[dict[str, Tree], float | None]:
        """Return (the tensors by field, the weight if it is a number), which `joined` joins."""
        tensors = {"up": dict(self.up), "private": self.private, "metrics": dict(self.metrics)}
        if isinstance(self.weight, Tensor):
            return tensors | {"weight": self.weight}, None
        return tensors, self.weight

    @classmethod
    def joined(cls, tensors: Mapping[str, Tree], weight: float | None) -> Reply:
        """Return the reply that `split` has split."""
        up, private, metrics = tensors["up"], tensors["private"], tensors["metrics"]
        return cls(up, private, tensors.get("weight", weight), metrics)


def client_work(draw: str | None = None) -> Callable[[F], F]:
    """Mark a function of a method as client work, i.e. as a client function.

    It is called on the client, as `f(self, down, private, drawn) -> Reply`.

    Args:
        draw: name of the method's function `draw(data, key) -> tree`, which runs on the client
            before the client function and returns `drawn`. Only this function reads data and draws
            random numbers. None: `drawn` is `{}`.
    """

    def mark(fn: F) -> F:
        fn.draw = draw  # type: ignore[attr-defined]
        return fn

    return mark


@dataclass(frozen=True)
class ClientWork:
    """A client function: a method, and the name of its function that `client_work` has marked.

    Without a method, it is a step of a secure sum: see `fedshot.privacy.secure_sums`.
    """

    method: Any
    name: str

    @classmethod
    def of(cls, bound: Callable[..., Reply]) -> ClientWork:
        """Return the client function that a bound method is, if `client_work` has marked it."""
        owner, name = getattr(bound, "__self__", None), getattr(bound, "__name__", "?")
        if owner is None or not hasattr(bound, "draw"):
            raise MethodError(
                f"{name} is not client work: decorate the method's function with "
                "@client_work(draw=...) and pass it bound, as in self.train."
            )
        draw: str | None = bound.draw
        if draw is not None and not callable(getattr(owner, draw, None)):
            raise MethodError(
                f"{name} is decorated with @client_work(draw={draw!r}), and "
                f"{type(owner).__name__} has no function {draw!r}. Correct the name."
            )
        return cls(owner, name)

    @property
    def exists(self) -> bool:
        """Whether the method has a client function of this name, which a message may request."""
        return not self.name.startswith("_") and hasattr(self._of(self.name), "draw")

    @property
    def draw_name(self) -> str | None:
        """Name of the function that draws the client function's random inputs, or None."""
        name: str | None = self._of(self.name).draw
        return name

    def draw(self, data: Any, key: Key) -> Tree:
        """Draw the client function's inputs from a client's data; return {} if it needs none."""
        name = self.draw_name
        return {} if name is None else self._of(name)(data, key)

    def __call__(self, down: Tree, private: Tree, drawn: Tree) -> Reply:
        """Run the client function: `down` is the message, `private` the client's private state."""
        reply: Reply = self._of(self.name)(down, private, drawn)
        return reply

    def _of(self, name: str) -> Any:
        return getattr(self.method, name, None)


@dataclass(frozen=True)
class PerClient:
    """A message that differs by client; `fn(client)` is called when it is sent."""

    fn: Callable[[int], Tree]


MASKED = "masked"  # the part of a masked reply


@dataclass(frozen=True)
class Masking:
    """A request to mask replies, so that the server learns only their sum.

    Args:
        clients: the clients whose masks cancel in the sum, if all of their replies arrive.
        cohort: number of clients whose replies may be added; it sets the sum's fixed-point scale.
        reduce: the reducer of each part of a reply before it is masked.
    """

    clients: frozenset[int]
    cohort: int
    reduce: Mapping[str, Mean | Sum]


@dataclass(frozen=True)
class Exchange:
    """One request to a cohort: to run the client function `work` with the message `down`.

    `version` is (round, number of the exchange in that round): the version of the private states
    that this exchange produces. `phase` says whether its traffic counts as training or evaluation.
    `on_send` is called with each message to a client. `masking` asks for masked replies. `buffer`
    is the number of replies that an asynchronous exchange waits for; None: one from each client of
    `to`.
    """

    work: ClientWork
    down: Tree | PerClient
    to: tuple[int, ...]
    reduce: Mapping[str, Reducer]
    key: Key
    version: tuple[int, int]
    phase: Literal["train", "evaluate"] = "train"
    on_send: Callable[[Tree], None] | None = None
    masking: Masking | None = None
    buffer: int | None = None

    @property
    def expected(self) -> int:
        """The number of replies that count if none is lost."""
        return len(self.to) if self.buffer is None else self.buffer

    def message(self, client: int) -> Tree:
        """Return the message for `client`; call it once each time the message is sent."""
        message = self.down.fn(client) if isinstance(self.down, PerClient) else self.down
        if self.on_send is not None:
            self.on_send(message)
        return message

    def client_key(self, client: int) -> Key:
        """Return the key that seeds what `client` draws in this exchange."""
        return self.key.at("work", self.work.name, "client", client)


_MALFORMED = ("part ", "the parts ", "the weight ", "metric ", "the metrics ")


class Fault(NamedTuple):
    """Why a client's reply does not count.

    It was rejected as invalid ("refused"), lost on the way ("lost"), or came after the server had
    stopped waiting in simulated time ("late").
    """

    kind: Literal["refused", "lost", "late"]
    reason: str

    @property
    def diverged(self) -> bool:
        """Whether the reply was rejected for values that are not finite or too large."""
        return self.kind == "refused" and any(w in self.reason for w in (NOT_FINITE, TOO_LARGE))

    @property
    def malformed(self) -> bool:
        """Whether the reply was rejected for the form of its parts, its weight or its metrics."""
        about_form = self.reason.startswith(_MALFORMED)
        return self.kind == "refused" and about_form and not self.diverged


class Arrival(NamedTuple):
    """The reply of one client, or the fault if the client sent no usable reply."""

    client: int
    reply: Reply | None
    fault: Fault | None = None


class Sealable(Protocol):
    """Storage of clients' states; a checkpoint commits (makes permanent) those of its round.

    A state's version is (round, number of the exchange in that round).
    """

    def void(self, round: int) -> None:
        """Drop the states that a discarded round has written."""
        ...

    def seal(self, round: int, keep: Collection[int]) -> str:
        """Commit the states of `round`, and return their hash; the rounds `keep` stay readable."""
        ...

    def open(self, round: int, sha: str) -> None:
        """Make readable the states of a round that `seal` committed under this hash."""
        ...

    def rewind(self, round: int, sha: str) -> None:
        """Roll back to the states that `seal` committed under this hash; drop all later states."""
        ...


class Bank(Sealable, Protocol):
    """Trees that the server keeps on disk, one per client."""

    def load(self, client: int, upto: tuple[int, int]) -> dict[str, Tensor] | None:
        """Return the leaves of a client's newest tree up to version `upto`, or None."""
        ...

    def save(self, client: int, version: tuple[int, int], state: object) -> None:
        """Write a version of a client's tree; `seal` commits it."""
        ...


class Fleet(Sealable, Protocol):
    """Runs clients and keeps their private states. A fleet is independent of the method."""

    @property
    def bank(self) -> Bank:
        """The trees that the server keeps, one per client; `seal` and `rewind` include them."""
        ...

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield one arrival for each client of the exchange, in any order.

        With a `buffer`, the arrivals may be those of other clients.
        """
        ...

    def parallel_map(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Apply `fn` to every item, in order, on the server with all its cores."""
        ...

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Keep the new private states of accepted clients; drop those of the other clients."""
        ...


@dataclass(frozen=True)
class Outcome(Mapping[str, Tree]):
    """The reduced parts by name, the accepted clients and their total weight, faults, metrics."""

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
