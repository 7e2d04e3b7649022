"""Asynchronous rounds in simulated time: the server steps when its buffer of replies is full.

Source: Nguyen et al. 2022, Federated Learning with Buffered Asynchronous Aggregation, algorithm 1:
w <- w + eta_g / K sum_i s(tau_i) Delta_i, over the K replies in the buffer.
Symbols: K wait_for; Delta_i a client's change of the model that it has received; tau_i its
staleness, the rounds that have ended since then; s(tau) = (1 + tau)^-staleness.
Departures from the paper: the sum is weighted as in the method, by sum_i n_i s(tau_i) Delta_i / n,
where n is the sum of the n_i; the method's server step takes the place of eta_g.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypedDict

from fedshot.core import records, storage, tree
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.records import COPY, Whole
from fedshot.fleets.clock import Clock
from fedshot.protocol.exchange import Arrival, Exchange, Fault, PerClient, Reply
from fedshot.protocol.reducers import Mean, Reducer

_NAME = re.compile(r"working-(\d{6,})\.safetensors")


class _Note(TypedDict):
    """A client that works, as JSON: `weight` and `metrics` of its reply, or why it is lost."""

    round: Whole
    end: float
    weight: float | None
    metrics: dict[str, float]
    fault: list[Any] | None


class _Notes(TypedDict):
    working: dict[str, _Note]


@dataclass
class _Working:
    """A client that works; `reply` is what it will send, or None if it is lost."""

    round: int  # in which it started
    end: float  # seconds since the start of the run
    reply: Reply | None
    fault: Fault | None


class Asynchronous(Clock):
    """A clock whose rounds end with the K-th reply, while the other clients work on.

    `concurrency` clients work at once. Whenever one has ended, another one starts, from the model
    that the server has then. The clients that will start in a round are asked together when it
    begins, since they get the same message; those that started in earlier rounds are not sampled.
    Replies are held in memory until they arrive, and at checkpoints in a file of `folder`.

    Args:
        concurrency: number of clients that work at once.
        folder: folder of the run.
        arguments: those of `Clock`.
    """

    def __init__(self, concurrency: int, folder: Path, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self._options.wait_for is not None, "ClockOptions checks it"
        self._concurrency, self.buffer = concurrency, self._options.wait_for
        self._folder = folder
        self._working: dict[int, _Working] = {}
        self._read: dict[int, dict[str, Tensor]] = {}  # parts by path, of clients in `_working`
        self._started: set[int] = set()  # clients of the last exchange that have replied, or will

    @property
    def to_start(self) -> int:
        """The number of clients that start in the next round if none is lost."""
        return self._concurrency - len(self._working) + self.buffer - 1

    def online(self, clients: Sequence[int]) -> Sequence[int]:
        """Return the clients that are online and do not work.

        If no client works, the server first waits until one is online.
        """
        if not self._working:
            return super().online(clients)
        found = np.setdiff1d(np.asarray(clients), list(self._working))
        if self._availability is not None:
            found = np.intersect1d(found, self._availability.online(self.now))
        return [int(client) for client in found]

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the arrivals until the buffer is full, in the order of their time.

        Raises ConfigError if the method needs more than means of changes.
        """
        if exchange.phase != "train":
            yield from self.fleet.replies(exchange)
            return
        _check_changes(exchange)
        round, _ = exchange.version
        self._started.clear()
        took: dict[int, tuple[float, Arrival]] = {}
        for arrival in self.fleet.replies(exchange) if exchange.to else ():
            took[arrival.client] = self._seconds(arrival.client, True), arrival
        order = exchange.key.at("start").numpy().permutation(len(exchange.to))
        waiting = deque(exchange.to[i] for i in order)
        self._rebuild(exchange)
        ends = [(working.end, client) for client, working in self._working.items()]
        heapq.heapify(ends)

        def start() -> None:
            while waiting and len(self._working) < self._concurrency:
                client = waiting.popleft()
                working = self._begin(round, *took[client])
                self._working[client] = working
                if working.reply is not None:
                    self._started.add(client)
                heapq.heappush(ends, (working.end, client))

        start()
        held = 0
        while ends and held < self.buffer:
            self.now, client = heapq.heappop(ends)
            done = self._working.pop(client)
            if done.reply is None:
                yield Arrival(client, None, done.fault)
            else:
                held += 1
                yield Arrival(client, self._scaled(done.reply, round - done.round))
            if held < self.buffer:
                start()

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Keep the new private states of the clients that have replied, or will."""
        train = exchange.phase == "train"
        self.fleet.settle(exchange, frozenset(self._started) if train else accepted)

    def void(self, round: int) -> None:
        """Forget the clients that started in a discarded round, and their private states."""
        super().void(round)
        self._working = {c: w for c, w in self._working.items() if w.round != round}

    def seal(self, round: int, keep: Collection[int]) -> str:
        """Commit the held replies and the private states; return their hashes, "held|private"."""
        notes = {str(client): _noted(one) for client, one in self._working.items()}
        held = {str(c): dict(one.reply.up) for c, one in self._working.items() if one.reply}
        self._folder.mkdir(parents=True, exist_ok=True)
        sha = storage.write(self._path(round), held, {"working": notes}, sync=True)
        self._prune({*keep, round})
        return f"{sha}|{super().seal(round, keep)}"

    def open(self, round: int, sha: str) -> None:
        """Make the private states of a committed round readable."""
        super().open(round, sha.partition("|")[2])

    def rewind(self, round: int, sha: str) -> None:
        """Roll back to the held replies and the private states of a committed round.

        Raises CheckpointError if the file of the replies is missing, damaged, or of another run.
        """
        held, _, private = sha.partition("|")
        self._working, self._read = {}, {}
        if held:
            path = self._path(round)
            flat, notes, found = storage.read(path)
            if found != held:
                raise CheckpointError(f"{path} does not have the hash in the checkpoint. {COPY}.")
            records.check(notes, _Notes, path, COPY)
            for name, leaf in flat.items():
                client, _, rest = name.partition("/")
                self._read.setdefault(int(client), {})[rest] = leaf
            self._working = {int(c): _restored(one) for c, one in notes["working"].items()}
        self._prune({r for r in self._rounds() if r <= round})
        super().rewind(round, private)

    def _rounds(self) -> list[int]:
        found = (_NAME.fullmatch(path.name) for path in self._folder.glob("working-*"))
        return [int(name[1]) for name in found if name]

    def _prune(self, keep: Collection[int]) -> None:
        """Delete the files of held replies of all rounds except `keep`, and partial files."""
        kept = {self._path(round) for round in keep}
        for path in self._folder.glob("working-*"):
            if path not in kept:
                path.unlink()

    def _begin(self, round: int, took: float, arrival: Arrival) -> _Working:
        """Return the work that a client starts now."""
        client, reply, fault = arrival
        until = self._until(client)
        if took > until:
            reason = f"it went offline after {until:.6g} s of {took:.6g} s"
            reply, fault = None, Fault("lost", reason if until > 0 else "it is offline")
        end = self.now + min(took, until)
        return _Working(round, end, reply, fault)

    def _scaled(self, reply: Reply, tau: int) -> Reply:
        """Return a reply with the changes times s(tau)."""
        s = (1 + tau) ** -self._options.staleness
        up = reply.up if s == 1 else tree.map(lambda leaf: leaf * s, dict(reply.up))
        metrics = {**reply.metrics, "staleness": torch.tensor(float(tau))}
        return reply._replace(up=up, metrics=metrics)

    def _rebuild(self, exchange: Exchange) -> None:
        """Give the parts that `rewind` has read from the disk their structure."""
        for client, flat in self._read.items():
            likes = {name: _as_mean(reducer).like for name, reducer in exchange.reduce.items()}
            working = self._working[client]
            assert working.reply is not None
            working.reply = working.reply._replace(up=tree.rebuild(likes, flat))
        self._read = {}

    def _path(self, round: int) -> Path:
        return self._folder / f"working-{round:06d}.safetensors"


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


def _as_mean(reducer: Reducer) -> Mean:
    assert isinstance(reducer, Mean), "_check_changes has checked it"
    return reducer


def _noted(one: _Working) -> _Note:
    reply, fault = one.reply, one.fault
    return {
        "round": one.round,
        "end": one.end,
        "weight": None if reply is None else float(reply.weight),
        "metrics": {} if reply is None else {k: float(v) for k, v in reply.metrics.items()},
        "fault": None if fault is None else list(fault),
    }


def _restored(note: _Note) -> _Working:
    metrics = {name: torch.tensor(v, dtype=torch.float64) for name, v in note["metrics"].items()}
    weight, fault = note["weight"], note["fault"]
    reply = None if weight is None else Reply({}, {}, weight, metrics)
    return _Working(note["round"], note["end"], reply, None if fault is None else Fault(*fault))
