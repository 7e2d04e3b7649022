"""Asynchronous rounds in simulated time: the server steps when its buffer of replies is full.

Source: Nguyen et al. 2022, Federated Learning with Buffered Asynchronous Aggregation, algorithm 1:
w <- w + eta_g / K sum_i s(tau_i) Delta_i, over the K replies in the buffer.
Symbols: K wait_for; Delta_i a client's change of the model that it has received; tau_i its
staleness, the rounds that have ended since then; s(tau) = (1 + tau)^-staleness.
Departures from the paper: the sum is weighted as in the method, by sum_i n_i s(tau_i) Delta_i / n,
where n is the sum of the n_i; the method's server step takes the place of eta_g. An old change of
running statistics is not added: they move by s(tau) of the way to the client's, so that variances
stay positive. A client replies at most once in a round. Private states change when a client starts,
so an evaluation may use the personal model of a client that has not replied yet. A skipped round
counts in tau_i.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import TypedDict

from fedshot.core import records, storage, tree
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.records import COPY, Whole
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.fleets.clock import Clock
from fedshot.protocol.exchange import Arrival, Exchange, Fault, PerClient, Reply
from fedshot.protocol.reducers import Mean, Reducer

_NAME = re.compile(r"in-flight-(\d{6,})\.safetensors")


@dataclass
class _InFlight:
    """A client that has started and not ended; `reply` is None if it will be lost."""

    round: int  # in which it started
    end: float  # seconds since the start of the run
    reply: Reply | None
    fault: Fault | None
    received: Tree  # by name, the running statistics that the client has received


class Asynchronous(Clock):
    """A clock whose rounds end with the K-th reply, while other clients are still in flight.

    `concurrency` clients are in flight at once. Whenever one has replied or is lost, another one
    starts, with the model that the server has then. Clients that will start in the same round get
    the same message, so they are asked together when it begins; more are asked if some are lost.
    With traces of availability, each is asked when it starts.

    Args:
        concurrency: number of clients in flight.
        folder: folder of the run's checkpoints, where `save` writes the replies in flight.
        arguments: those of `Clock`.
    """

    def __init__(self, concurrency: int, folder: Path, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self._options.wait_for is not None, "ClockOptions checks it"
        self._concurrency, self.buffer = concurrency, self._options.wait_for
        self._folder = folder
        self._in_flight: dict[int, _InFlight] = {}
        self._flat: dict[int, dict[str, Tensor]] = {}  # parts by path, as `load` has read them
        self._population: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._asked: list[int] = []  # in this round
        self._replying: set[int] = set()  # of those, clients that have replied or will
        self._ended: dict[int, _InFlight] = {}  # in this round

    @property
    def to_start(self) -> int:
        """The number of clients to ask when a round begins."""
        free = self._concurrency - len(self._in_flight)
        return free + self.buffer - 1 if self._availability is None else free

    def online(self, clients: Sequence[int]) -> Sequence[int]:
        """Return the clients that are online and not in flight.

        If no client is in flight, the server first waits until one is online.
        """
        self._population = np.asarray(clients, dtype=np.int64)
        self._asked, self._ended = [], {}
        if not self._in_flight:
            return super().online(clients)
        return [int(client) for client in self._startable(self.now)]

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the arrivals until the buffer is full, in the order of their time.

        They include clients that were asked in earlier rounds, and clients beyond `exchange.to`.
        Raises ConfigError if the method needs more than means of changes.
        """
        if exchange.phase != "train":
            yield from self.fleet.replies(exchange)
            return
        _check_changes(exchange)
        self._restore(exchange)
        round, key = exchange.version[0], exchange.key.at("start")
        self._replying = set()
        waiting = deque(self._answers(exchange, _shuffled(exchange.to, key)))
        ends = [(one.end, one.round, client) for client, one in self._in_flight.items()]
        heapq.heapify(ends)

        def start() -> None:
            while len(self._in_flight) < self._concurrency:
                if not waiting:
                    found = _shuffled(self._startable(self.now), key.at(len(self._asked)))
                    more = found[: self._concurrency - len(self._in_flight)]
                    waiting.extend(self._answers(exchange, more))
                if not waiting:
                    return
                client, took, arrival = waiting.popleft()
                one = self._in_flight[client] = self._begun(exchange, took, arrival)
                if one.reply is not None:
                    self._replying.add(client)
                heapq.heappush(ends, (one.end, round, client))

        start()
        held = 0
        while held < self.buffer:
            later = self._next_online()
            if later is not None and (not ends or later < ends[0][0]):
                self.now = later
                start()
                continue
            if not ends:
                break
            end, _, client = heapq.heappop(ends)
            self.now = max(self.now, end)  # a reply of a discarded round may have ended before
            one = self._ended[client] = self._in_flight.pop(client)
            if one.reply is None:
                yield Arrival(client, None, one.fault)
            else:
                held += 1
                yield Arrival(client, self._scaled(one, exchange))
            if held < self.buffer:
                start()

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Keep the new private states of the clients that have replied, or will."""
        if exchange.phase == "train":
            exchange = replace(exchange, to=tuple(self._asked))
            accepted = frozenset(self._replying)
        self.fleet.settle(exchange, accepted)

    def void(self, round: int) -> None:
        """Take back a discarded round: its clients are forgotten, earlier replies still count."""
        super().void(round)
        back = {c: one for c, one in self._ended.items() if one.reply is not None}
        every = {**self._in_flight, **back}
        self._in_flight = {c: one for c, one in every.items() if one.round != round}

    def save(self, round: int, keep: Collection[int]) -> str:
        """Write the replies in flight after a round; return their hash.

        The files of all rounds but `round` and `keep` are deleted.
        """
        if not self._folder.exists():
            self._folder.mkdir(parents=True)
            storage.flush(self._folder.parent)
        held = {str(c): {"up": dict(one.reply.up), "received": one.received}
                for c, one in self._in_flight.items() if one.reply}  # fmt: skip
        notes = {str(client): _to_json(one) for client, one in self._in_flight.items()}
        sha = storage.write(self._path(round), held, {"in_flight": notes}, sync=True)
        self._prune({*keep, round})
        return sha

    def load(self, round: int, sha: str) -> None:
        """Read the replies in flight after a round; `sha` is what `save` returned, "" for none.

        The files of later rounds are deleted. Raises CheckpointError if the file is missing,
        damaged, or of another run.
        """
        self._in_flight, self._flat = {}, {}
        if sha:
            path = self._path(round)
            try:
                flat, notes, found = storage.read(path)
            except CheckpointError as error:
                raise CheckpointError(f"{error}. {COPY}.") from None
            if found != sha:
                raise CheckpointError(f"{path} does not have the hash in the checkpoint. {COPY}.")
            records.check(notes, _Notes, path, COPY)
            for name, leaf in flat.items():
                client, _, rest = name.partition("/")
                self._flat.setdefault(int(client), {})[rest] = leaf
            self._in_flight = {int(c): _from_json(one) for c, one in notes["in_flight"].items()}
        found_rounds = (_NAME.fullmatch(path.name) for path in self._folder.glob("in-flight-*"))
        self._prune({int(name[1]) for name in found_rounds if name and int(name[1]) <= round})

    def _prune(self, keep: Collection[int]) -> None:
        """Delete the files of all rounds but `keep`, and partial files."""
        kept = {self._path(round) for round in keep}
        for path in self._folder.glob("in-flight-*"):
            if path not in kept:
                path.unlink()

    def _path(self, round: int) -> Path:
        return self._folder / f"in-flight-{round:06d}.safetensors"

    def _restore(self, exchange: Exchange) -> None:
        """Give the trees that `load` has read their structure."""
        likes = {name: _as_mean(reducer).like for name, reducer in exchange.reduce.items()}
        both = {"up": likes, "received": _statistics(exchange, likes)}
        for client, flat in self._flat.items():
            one = self._in_flight[client]
            assert one.reply is not None
            found = tree.rebuild(both, flat)
            one.reply, one.received = one.reply._replace(up=found["up"]), found["received"]
        self._flat = {}

    def _startable(self, now: float) -> npt.NDArray[np.int64]:
        """Return the clients that are online, not in flight, and had no part in this round."""
        found = np.setdiff1d(self._population, [*self._in_flight, *self._asked, *self._ended])
        if self._availability is None:
            return found
        return np.intersect1d(found, self._availability.online(now))

    def _next_online(self) -> float | None:
        """Return when clients come online next, if that may fill a free place; else None."""
        if self._availability is None or len(self._in_flight) >= self._concurrency:
            return None
        left = np.setdiff1d(self._population, [*self._in_flight, *self._asked, *self._ended])
        if not self._availability.ever(left):
            return None
        return self._availability.next_start(self.now)

    def _answers(
        self, exchange: Exchange, clients: Sequence[int]
    ) -> list[tuple[int, float, Arrival]]:
        """Run the clients' work; return each with the seconds that it takes."""
        if not clients:
            return []
        self._asked += clients
        found = {}
        for arrival in self.fleet.replies(replace(exchange, to=tuple(clients))):
            client, reply, fault = arrival
            if reply is not None:  # the parts of stacked clients share memory
                reply = reply._replace(up=tree.map(torch.clone, dict(reply.up)))
            found[client] = self._seconds(client, True), Arrival(client, reply, fault)
        return [(client, *found[client]) for client in clients]

    def _begun(self, exchange: Exchange, took: float, arrival: Arrival) -> _InFlight:
        """Return a client that starts now."""
        client, reply, fault = arrival
        until = self._until(client)
        if took > until:
            reason = f"it went offline after {until:.6g} s of {took:.6g} s"
            reply, fault = None, Fault("lost", reason)
        received = {} if reply is None else _statistics(exchange, exchange.down)
        return _InFlight(exchange.version[0], self.now + min(took, until), reply, fault, received)

    def _scaled(self, one: _InFlight, exchange: Exchange) -> Reply:
        """Return the reply of a client that has ended, with the changes times s(tau)."""
        assert one.reply is not None
        down: Any = exchange.down
        up, tau = dict(one.reply.up), exchange.version[0] - one.round
        if tau:
            s = (1 + tau) ** -self._options.staleness
            for name, seen in one.received.items():  # the client's statistics minus today's
                up[name] = tree.sub(tree.add(up[name], seen), down[name])
            up = tree.map(lambda leaf: leaf * s, up)
        metrics = {**one.reply.metrics, "staleness": torch.tensor(float(tau))}
        return one.reply._replace(up=up, metrics=metrics)


class _InFlightJson(TypedDict):
    """A client in flight, as JSON: weight and metrics of its reply, or why it will be lost."""

    round: Whole
    end: float
    weight: float | None
    metrics: dict[str, float]
    fault: list[str] | None


class _Notes(TypedDict):
    in_flight: dict[str, _InFlightJson]


def _to_json(one: _InFlight) -> _InFlightJson:
    reply, fault = one.reply, one.fault
    return {
        "round": one.round,
        "end": one.end,
        "weight": None if reply is None else float(reply.weight),
        "metrics": {} if reply is None else {k: float(v) for k, v in reply.metrics.items()},
        "fault": None if fault is None else list(fault),
    }


def _from_json(one: _InFlightJson) -> _InFlight:
    metrics = {name: torch.tensor(v, dtype=torch.float64) for name, v in one["metrics"].items()}
    fault: Any = one["fault"]
    reply = None if one["weight"] is None else Reply({}, {}, one["weight"], metrics)
    return _InFlight(one["round"], one["end"], reply, None if fault is None else Fault(*fault), {})


def _shuffled(clients: Sequence[int] | npt.NDArray[np.int64], key: Key) -> list[int]:
    return [int(clients[i]) for i in key.numpy().permutation(len(clients))]


def _check_changes(exchange: Exchange) -> None:
    """Raise ConfigError unless an exchange is the only one of its round, and averages changes."""
    down, name = exchange.down, exchange.work.name
    parts: Collection[str] = () if isinstance(down, PerClient) else down
    other = [part for part, reducer in exchange.reduce.items()
             if part not in parts or not isinstance(reducer, Mean)]  # fmt: skip
    reason = ""
    if exchange.version[1] > 0:
        reason = f"{name!r} is a second exchange of the round"
    elif other:
        reason = f"part {other[0]!r} of {name!r} is not a mean of changes of the message"
    if reason:
        raise ConfigError(
            f"run.clock.asynchronous is true, and {reason}. Set run.clock.asynchronous to false."
        )


def _statistics(exchange: Exchange, trees: Any) -> dict[str, Tree]:
    """Return those of `trees` that are running statistics, by name."""
    reducers = exchange.reduce.items()
    return {name: trees[name] for name, reducer in reducers if _as_mean(reducer).of_statistics}


def _as_mean(reducer: Reducer) -> Mean:
    assert isinstance(reducer, Mean), "_check_changes has checked it"
    return reducer
