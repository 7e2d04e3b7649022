"""A run of one method on one fleet, open to inspection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshot.conformance.small import CLIENTS, FederationHost, episodic_test
from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.evaluation.episodic_test import EpisodicTest
from fedshot.fleets.client_checks import checked_round
from fedshot.fleets.guard import Guard
from fedshot.fleets.meter import Meter
from fedshot.fleets.unreliable import Trouble, Unreliable
from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Arrival, Exchange, Fault, Fleet, Outcome, Reply
from fedshot.protocol.method import Method, Prediction

LATE = (10**6, 0)  # after every version

# Of four and of three contributions a sum has the same room (powers of two), hence the same bits.
COHORT, VICTIM, OTHERS = (5, 0, 3, 2), 3, (0, 2, 5)


@dataclass(frozen=True)
class FleetCase:
    """A fleet, and how closely it follows the reference.

    `exact`: it runs the same kernel on a CPU, so the bits agree. Where the arithmetic is regrouped
    they agree to `rtol` and `atol` in float64.
    """

    name: str
    build: Callable[[FederationHost], Fleet]
    exact: bool = True
    rtol: float = 0.0
    atol: float = 0.0
    slow: bool = False  # hardly another fleet
    quick: bool = False  # asked in the quick suite, too


class CheckFailedError(AssertionError):
    """A promise that a method does not keep; any other AssertionError comes from its own code."""


def require(held: bool, reason: str) -> None:
    """Raise CheckFailedError, with the reason, unless something holds."""
    if not held:
        raise CheckFailedError(reason)


def require_close(found: Tensor, expected: Tensor, rtol: float, atol: float, name: str) -> None:
    """Raise CheckFailedError, with the name and the gap, unless two tensors are close."""
    try:
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    except AssertionError as error:
        raise CheckFailedError(f"{name}: {error}") from None


class Visit(NamedTuple):
    """One client's part in one exchange: what it was given, and what it sent."""

    exchange: Exchange
    client: int
    down: Tree
    private: Tree
    drawn: Tree
    reply: Reply


class Watched(Wrapper):
    """A fleet whose visits are recorded."""

    def __init__(self, fleet: Fleet, home: FederationHost) -> None:
        super().__init__(fleet)
        self.host = home.host
        self.visits: list[Visit] = []

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the arrivals of the fleet, and note each visit."""
        private = {c: self.host.private(c, exchange.version) for c in exchange.to}
        for arrival in self.fleet.replies(exchange):
            c = arrival.client
            if arrival.reply is not None:
                drawn = exchange.work.draw(self.host.data(c), exchange.client_key(c))
                self.visits.append(
                    Visit(exchange, c, exchange.message(c), private[c], drawn, arrival.reply)
                )
            yield arrival


class Shuffled(Wrapper):
    """A fleet whose replies arrive in an order of chance."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        super().__init__(fleet)
        self.seed = seed

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the arrivals of the fleet in another order."""
        arrivals = list(self.fleet.replies(exchange))
        rng = Key(self.seed).at(*exchange.version).numpy()
        for i in rng.permutation(len(arrivals)):
            yield arrivals[i]


def strike(
    trouble: Trouble, client: int = VICTIM, when: Callable[[Exchange], bool] = lambda _: True
) -> Callable[[Fleet], Fleet]:
    """Let one client meet with trouble, always or only in some exchanges."""

    def plan(exchange: Exchange, c: int) -> Trouble | None:
        return trouble if c == client and when(exchange) else None

    return lambda fleet: Unreliable(fleet, plan)


class Chosen(Clients):
    """Clients whose cohort a test can choose, and whose outcomes it can read."""

    def __init__(self, *args: Any, choose: Sequence[int] | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.choose = choose
        self.outcomes: list[Outcome] = []

    def sample(self, key: Key) -> tuple[int, ...]:
        """Return the chosen cohort, or draw one."""
        return super().sample(key) if self.choose is None else tuple(self.choose)

    def exchange(self, *args: Any, **kwargs: Any) -> Outcome:
        """Exchange as clients do, and keep the outcome."""
        self.outcomes.append(super().exchange(*args, **kwargs))
        return self.outcomes[-1]


class Federation:
    """A method on a fleet, behind the meter and the guard, as in a run.

    `around` wraps the bare fleet, as trouble on the way would.
    """

    def __init__(
        self,
        method: Method[Any],
        where: FleetCase,
        folder: Path,
        *,
        seed: int = 0,
        around: Callable[[Fleet], Fleet] = lambda fleet: fleet,
    ) -> None:
        self.method, self.key, self.where = method, Key(seed), where
        self.home = FederationHost(method, folder, self.key)
        self.watched = Watched(where.build(self.home), self.home)
        self.meter = Meter(around(self.watched))
        self.fleet = Guard(self.meter)
        self.server: Tree = method.init(self.key.at("init"))
        self.round, self.sealed = 0, ""
        self.outcomes: list[Outcome] = []
        self.metrics: dict[str, float] = {}
        self.faults: list[tuple[int, Fault]] = []

    @property
    def visits(self) -> list[Visit]:
        """All visits of the run so far."""
        return self.watched.visits

    def require_visits(self) -> None:
        """Raise CheckFailedError where no client was asked for anything."""
        require(bool(self.visits), "no client is asked for anything in two rounds")

    def play(self, rounds: int = 1, choose: Sequence[int] | None = None) -> Federation:
        """Train some rounds further, each sealed as a checkpoint would."""
        for _ in range(rounds):
            self.play_unsealed(choose)
            self.sealed = self.fleet.seal(self.round, range(self.round))
        return self

    def play_unsealed(self, choose: Sequence[int] | None = None) -> None:
        """Train a round and make nothing last."""
        self.round += 1
        clients = Chosen(
            self.fleet, range(CLIENTS), cohort=len(COHORT), round=self.round, choose=choose
        )
        try:
            key = self.key.at("round", self.round)
            self.server, metrics = checked_round(self.method, self.server, clients, key)
            self.metrics |= {f"{self.round}/{name}": value for name, value in metrics.items()}
        finally:
            self.outcomes += clients.outcomes
            self.faults += clients.faults

    def answer(self, n: int = 5, asked: EpisodicTest | None = None) -> list[Prediction]:
        """Sit a test of n questions, or another one."""
        clients = Chosen(
            self.fleet, range(CLIENTS), round=self.round, phase="evaluate", choose=None
        )
        key = self.key.at("round", self.round, "exam")
        eval_episodes = (asked or episodic_test(n)).eval_episodes
        answers = self.method.evaluate(self.server, clients, eval_episodes, key)
        self.outcomes += clients.outcomes
        return answers

    def logits(self, n: int = 5, asked: EpisodicTest | None = None) -> Everything:
        """Return what `answer` gives, by name."""
        found = {f"{a.eval_episode} by {a.client}": a.logits for a in self.answer(n, asked)}
        return Everything(found, self.where)

    def private(self, client: int) -> Tree:
        """Return what the client remembers now."""
        return self.home.host.private(client, LATE)

    def banked(self, client: int) -> Tree:
        """Return what the server keeps of the client now."""
        held = self.fleet.bank.load(client, LATE) or {}
        return {name.replace("/", "."): leaf for name, leaf in held.items()}

    def privates(self) -> dict[int, str]:
        """Return a hash of what each client remembers now."""
        return {c: tree.digest(self.private(c)) for c in range(CLIENTS)}

    def everything(self) -> Everything:
        """Return all that came of the run, by name."""
        whole = {
            "server": self.server,
            "private": {str(c): self.private(c) for c in range(CLIENTS)},
            "bank": {str(c): self.banked(c) for c in range(CLIENTS)},
            "outcomes": {str(i): _as_tree(outcome) for i, outcome in enumerate(self.outcomes)},
        }
        numbers = {f"metrics/{k}": torch.tensor(v).double() for k, v in self.metrics.items()}
        return Everything(dict(tree.items(whole)) | numbers, self.where)


class Everything(dict[str, Tensor]):
    """All that came of a run, and the fleet that it ran on."""

    def __init__(self, found: dict[str, Tensor], where: FleetCase) -> None:
        super().__init__(found)
        self.where = where

    def only(self, *parts: str) -> Everything:
        """Return what lies below these names."""
        return Everything({k: v for k, v in self.items() if k.startswith(parts)}, self.where)


def _as_tree(outcome: Outcome) -> Tree:
    """Return the parts, with the senders of gathered ones named by text."""
    parts = {
        name: {str(k): v for k, v in part.items()} if isinstance(part, dict) else part
        for name, part in outcome.items()
    }
    accepted = torch.tensor(outcome.accepted)
    return {"parts": parts, "accepted": accepted, "weight": torch.tensor(outcome.weight)}


def assert_same(found: Everything, expected: Everything) -> None:
    """Assert equal names and equal bits, or what the fleets promise in their place."""
    fleets = (found.where, expected.where)
    where = next((fleet for fleet in fleets if not fleet.exact), None)
    names = sorted(found.keys() ^ expected.keys())
    require(not names, f"{', '.join(names[:5])} is there in one run alone")
    for name, leaf in expected.items():
        other = found[name]
        same = tree.form(other) == tree.form(leaf)
        require(same, f"{name} is {tree.form(other)} in one run, {tree.form(leaf)} in the other")
        if where is None:
            require(tree.digest(other) == tree.digest(leaf), f"the bits of {name} differ")
        else:
            require_close(other, leaf, where.rtol, where.atol, name)
