"""Runs of one method on one fleet, recorded so that the checks can inspect them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshot.conformance.small import CLIENTS, episodic_test, host_of
from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.evaluation.episodic_test import EpisodicTest
from fedshot.fleets.client_checks import checked_init, checked_round
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.meter import Meter
from fedshot.fleets.unreliable import Trouble, Unreliable
from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Arrival, Exchange, Fault, Fleet, Outcome, Reply
from fedshot.protocol.method import Method, Prediction

LATE = (10**6, 0)  # a version (round, exchange) after those of any run

# `Mean` and `Sum` scale three and four contributions by the same power of two: the bits are equal.
COHORT, VICTIM, OTHERS = (5, 0, 3, 2), 3, (0, 2, 5)


@dataclass(frozen=True)
class FleetCase:
    """A fleet, and how closely its results must agree with those of the sequential fleet.

    An `exact` fleet runs the same CPU kernels as the sequential fleet, so all bits agree. A fleet
    that regroups the arithmetic agrees to `rtol` and `atol` in float64.
    """

    name: str
    build: Callable[[Host], Fleet]
    exact: bool = True
    rtol: float = 0.0
    atol: float = 0.0
    slow: bool = False  # slow to check, and rarely finds an error that other fleets do not
    quick: bool = False  # also checked in the quick test suite


class CheckFailedError(AssertionError):
    """A check has failed; any other AssertionError comes from the method's own code."""


def require(held: bool, reason: str) -> None:
    """Raise CheckFailedError with the reason unless a condition holds."""
    if not held:
        raise CheckFailedError(reason)


def require_close(found: Tensor, expected: Tensor, rtol: float, atol: float, name: str) -> None:
    """Raise CheckFailedError with the difference unless two tensors are close."""
    try:
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    except AssertionError as error:
        raise CheckFailedError(f"{name}: {error}") from None


class Execution(NamedTuple):
    """One execution of a client function by one client: its inputs and its reply."""

    exchange: Exchange
    client: int
    down: Tree
    private: Tree
    drawn: Tree
    reply: Reply

    @property
    def name(self) -> str:
        """The name of the client function."""
        return self.exchange.work.name

    @property
    def inputs(self) -> Tree:
        """All inputs of the client function as one tree, keyed by argument name."""
        return {"down": self.down, "private": self.private, "drawn": self.drawn}

    def repeat(self) -> Reply:
        """Run the client function again on the same inputs, and return the new reply."""
        return self.exchange.work(self.down, self.private, self.drawn)


class RecordingFleet(Wrapper):
    """A fleet that records each execution of a client function."""

    def __init__(self, fleet: Fleet, host: Host) -> None:
        super().__init__(fleet)
        self.host = host
        self.executions: list[Execution] = []

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the arrivals of the fleet, and record each execution of a client function.

        Steps of a secure sum are not functions of the method, and are left out.
        """
        private = {c: self.host.private(c, exchange.version) for c in exchange.to}
        for arrival in self.fleet.replies(exchange):
            c = arrival.client
            if arrival.reply is not None and exchange.work.method is not None:
                drawn = exchange.work.draw(self.host.data(c), exchange.client_key(c))
                self.executions.append(
                    Execution(exchange, c, exchange.message(c), private[c], drawn, arrival.reply)
                )
            yield arrival


class Shuffled(Wrapper):
    """A fleet whose replies arrive in random order."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        super().__init__(fleet)
        self.seed = seed

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the arrivals of the fleet in random order."""
        arrivals = list(self.fleet.replies(exchange))
        rng = Key(self.seed).at(*exchange.version).numpy()
        for i in rng.permutation(len(arrivals)):
            yield arrivals[i]


def with_trouble(
    trouble: Trouble, client: int = VICTIM, when: Callable[[Exchange], bool] = lambda _: True
) -> Callable[[Fleet], Fleet]:
    """Return a function that wraps a fleet so that replies of a client are disturbed.

    `trouble` says how, and `when` selects the exchanges.
    """

    def plan(exchange: Exchange, c: int) -> Trouble | None:
        return trouble if c == client and when(exchange) else None

    return lambda fleet: Unreliable(fleet, plan)


class FixedCohort(Clients):
    """`Clients` that always samples the cohort `choose`, and records the outcomes."""

    def __init__(self, *args: Any, choose: Sequence[int] | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.choose = choose
        self.outcomes: list[Outcome] = []

    def sample(self, key: Key) -> tuple[int, ...]:
        """Return the cohort `choose`, or sample a cohort if `choose` is None."""
        return super().sample(key) if self.choose is None else tuple(self.choose)

    def exchange(self, *args: Any, **kwargs: Any) -> Outcome:
        """Run an exchange as `Clients` does, and record its outcome."""
        self.outcomes.append(super().exchange(*args, **kwargs))
        return self.outcomes[-1]


class Federation:
    """A short run of a method on a fleet, which is wrapped in `Meter` and `Guard` as in any run.

    `around` wraps the bare fleet, for example to drop replies. `combine` is the argument of
    `Clients`, and `folder` holds the private states.
    """

    def __init__(
        self,
        method: Method[Any],
        where: FleetCase,
        folder: Path,
        *,
        seed: int = 0,
        around: Callable[[Fleet], Fleet] = lambda fleet: fleet,
        combine: Callable[[Fleet, Exchange], Outcome] | None = None,
    ) -> None:
        self._combine = combine
        self.method, self.key, self.where = method, Key(seed), where
        self.host = host_of(method, folder, self.key)
        self.recording = RecordingFleet(where.build(self.host), self.host)
        self.meter = Meter(around(self.recording))
        self.fleet = Guard(self.meter)
        self.server: Tree = checked_init(method, self.key.at("init"))
        self.round, self.sealed = 0, ""
        self.outcomes: list[Outcome] = []
        self.metrics: dict[str, float] = {}
        self.faults: list[tuple[int, Fault]] = []

    @property
    def executions(self) -> list[Execution]:
        """All executions of client functions so far."""
        return self.recording.executions

    def require_executions(self) -> None:
        """Raise CheckFailedError if no client function has run."""
        require(bool(self.executions), "no client work runs in two rounds")

    def train(self, rounds: int = 1, choose: Sequence[int] | None = None) -> Federation:
        """Train more rounds; commit the private states after each, as for a checkpoint."""
        for _ in range(rounds):
            self.train_unsealed(choose)
            self.sealed = self.fleet.seal(self.round, range(self.round))
        return self

    def train_unsealed(self, choose: Sequence[int] | None = None) -> None:
        """Train a round without committing its private states."""
        self.round += 1
        clients = FixedCohort(
            self.fleet, range(CLIENTS), cohort=len(COHORT), round=self.round, choose=choose,
            combine=self._combine,
        )  # fmt: skip
        try:
            key = self.key.at("round", self.round)
            self.server, metrics = checked_round(self.method, self.server, clients, key)
            self.metrics |= {f"{self.round}/{name}": value for name, value in metrics.items()}
        finally:
            self.outcomes += clients.outcomes
            self.faults += clients.faults

    def predict(self, n: int = 5, test: EpisodicTest | None = None) -> list[Prediction]:
        """Predict the episodes of `test`; by default, of a test with n episodes."""
        clients = FixedCohort(
            self.fleet, range(CLIENTS), round=self.round, phase="evaluate", choose=None
        )
        key = self.key.at("round", self.round, "exam")
        eval_episodes = (test or episodic_test(n)).eval_episodes
        predictions = self.method.evaluate(self.server, clients, eval_episodes, key)
        self.outcomes += clients.outcomes
        return predictions

    def logits(self, n: int = 5, test: EpisodicTest | None = None) -> RunTensors:
        """Return the logits of `predict`, keyed by episode and client."""
        found = {f"{p.eval_episode} by {p.client}": p.logits for p in self.predict(n, test)}
        return RunTensors(found, self.where)

    def private(self, client: int) -> Tree:
        """Return the client's current private state."""
        return self.host.private(client, LATE)

    def banked(self, client: int) -> Tree:
        """Return the model that the server stores on disk for the client, or `{}` for none."""
        held = self.fleet.bank.load(client, LATE) or {}
        return {name.replace("/", "."): leaf for name, leaf in held.items()}

    def privates(self) -> dict[int, str]:
        """Return a hash of each client's current private state."""
        return {c: tree.digest(self.private(c)) for c in range(CLIENTS)}

    def everything(self) -> RunTensors:
        """Return all states, outcomes and metrics of the run as named tensors."""
        whole = {
            "server": self.server,
            "private": {str(c): self.private(c) for c in range(CLIENTS)},
            "bank": {str(c): self.banked(c) for c in range(CLIENTS)},
            "outcomes": {str(i): _as_tree(outcome) for i, outcome in enumerate(self.outcomes)},
        }
        numbers = {f"metrics/{k}": torch.tensor(v).double() for k, v in self.metrics.items()}
        return RunTensors(dict(tree.items(whole)) | numbers, self.where)


class RunTensors(dict[str, Tensor]):
    """Tensors of a run, keyed by name, and the fleet that computed them."""

    def __init__(self, found: dict[str, Tensor], where: FleetCase) -> None:
        super().__init__(found)
        self.where = where

    def only(self, *parts: str) -> RunTensors:
        """Return the tensors whose names begin with one of `parts`."""
        return RunTensors({k: v for k, v in self.items() if k.startswith(parts)}, self.where)


def _as_tree(outcome: Outcome) -> Tree:
    """Return an outcome as a tree; the client ids that key gathered parts become strings."""
    parts = {
        name: {str(k): v for k, v in part.items()} if isinstance(part, dict) else part
        for name, part in outcome.items()
    }
    accepted = torch.tensor(outcome.accepted)
    return {"parts": parts, "accepted": accepted, "weight": torch.tensor(outcome.weight)}


def assert_same(found: RunTensors, expected: RunTensors) -> None:
    """Raise CheckFailedError unless all tensors are bitwise equal.

    If one of them comes from a fleet that is not `exact`, they need only be close.
    """
    fleets = (found.where, expected.where)
    where = next((fleet for fleet in fleets if not fleet.exact), None)
    names = sorted(found.keys() ^ expected.keys())
    require(not names, f"only one of the two runs has {', '.join(names[:5])}")
    for name, leaf in expected.items():
        other = found[name]
        same = tree.form(other) == tree.form(leaf)
        require(same, f"{name} is {tree.form(other)} in one run, {tree.form(leaf)} in the other")
        if where is None:
            require(tree.digest(other) == tree.digest(leaf), f"the bits of {name} differ")
        else:
            require_close(other, leaf, where.rtol, where.atol, name)
