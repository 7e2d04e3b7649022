"""The worker of a node: it handles messages, and replies with results or refusals.

Each start or resume of a run at the server begins a new session (`life` in messages) with a
higher number. The first message of a session rewinds the node to the private states of the server's
last checkpoint; messages of earlier sessions are refused. A node that is killed and restarted
within a session recovers the states that it had written; the server's next message says which of
these states to drop.

The server's orders (instructions) are numbered within a session: `drop` private states of clients,
`void` (discard) a round, or `seal` (commit) a round, which makes its private states permanent. A
seal is a pair (committed round, hash of the private states). The server repeats an order until the
node reports it as done; the node carries out each order once. This module does not depend on
Flower.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
import traceback
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import TypedDict

from fedshot.config.registry import difference
from fedshot.config.schema import RunOptions
from fedshot.core import records, storage
from fedshot.core.console import at_level, warning
from fedshot.core.devices import devices_of
from fedshot.core.errors import CheckpointError, FedshotError
from fedshot.core.machine import keep_freed_memory
from fedshot.core.records import Whole
from fedshot.core.seeds import Key
from fedshot.core.serialised import LIMITS, CodecError, Limits, short
from fedshot.core.tree import Tree
from fedshot.deploy.flower.data_files import NodeData
from fedshot.deploy.flower.masking_request import REDUCERS, masking_from_json
from fedshot.deploy.flower.messages import COMMON, WireMessage
from fedshot.deploy.flower.node_registry import NO_SEAL, Seal, SealRecord, checked_seal
from fedshot.deploy.flower.policy import NO_BOUNDS, Policy, PolicyError, append_to_log
from fedshot.deploy.flower.setup import Setup
from fedshot.fleets.compressing import LARGEST, ClientSide
from fedshot.fleets.host import Host
from fedshot.fleets.liars import Liars
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.privacy.secure_sums.client_noise import ClientNoise
from fedshot.privacy.secure_sums.masking_clients import (
    STEPS,
    MaskingClients,
    Signatures,
    unmasked,
)
from fedshot.protocol.exchange import Arrival, ClientWork, Exchange, Fault, Masking, PerClient
from fedshot.protocol.method import Method
from fedshot.runs.experiment import MAY_CHANGE, fleet_for
from fedshot.runs.private_runs import client_noise
from fedshot.runs.recorder import environment

_SET_ASIDE = "before-"  # prefix of set-aside folders, "before-<last committed round>-<session>"
_ONE_THREAD = RunOptions(threads=1)


class _SessionRecord(TypedDict):
    """Content of life.json."""

    life: Whole
    done: Whole
    sealed: SealRecord


class ClientRuntime:
    """The clients of a node in one run.

    Args:
        method: the method of the run.
        fleet: runs the clients, and has their data and private states.
        clients: ids of the clients.
        folder: where life.json is kept.
        run: options of the run, with the threads and the device of this node.
        tell: logs errors of single clients.
        noise: how clients clip and what noise they add in secure sums; None for neither.
        signatures: sign the keys of secure sums and check those of others; None for neither.
        policy: its `min_noise` and `min_cohort` hold in secure sums, too.
    """

    def __init__(
        self, method: Method[Any], fleet: Sequential, clients: Collection[int], folder: Path, *,
        run: RunOptions = _ONE_THREAD, tell: Callable[[str], None] = print,
        noise: ClientNoise | None = None, signatures: Signatures | None = None,
        policy: Policy = NO_BOUNDS,
    ) -> None:  # fmt: skip
        self._noisy = noise is not None
        self._method, self._store, self._clients = method, fleet.host.store, frozenset(clients)
        self._fleet, self._folder, self._run, self._tell = fleet, folder, run, tell
        self._masking = MaskingClients(
            fleet, noise=noise, threshold=run.secure_threshold, signatures=signatures,
            min_noise=policy.min_noise or 0.0, min_cohort=policy.min_cohort or 0,
        )  # fmt: skip
        self._session, self._done = 0, 0
        self._sealed: Seal = NO_SEAL
        if (path := folder / "life.json").exists():
            found = records.read(path, _SessionRecord)
            self._session, self._done = found["life"], found["done"]
            self._sealed = checked_seal(found["sealed"])
        self._recovered = False

    @classmethod
    def of(
        cls, setup: Setup, data: NodeData, folder: Path, *,
        workers: int, device: str, tell: Callable[[str], None],
        signatures: Signatures | None = None, policy: Policy = NO_BOUNDS,
    ) -> ClientRuntime:  # fmt: skip
        """Return the runtime for a run that a server has announced.

        `workers` and `device` are as in `Worker`; the other arguments are as in the class.

        Raises:
            PolicyError: the policy does not allow the run.
            ConfigError: the configuration is invalid, or the node's data do not fit the run.
            CheckpointError: the folder holds a run of the same name with another configuration.
        """
        config = setup.config()
        policy.check_run(config, setup.clients)  # before any file is written
        setup.check(data)
        _check_settings(folder / "settings.json", config.settings)
        method = config.method(config.model.build(data.dataset), setup.classes, setup.clients)
        store, key = PrivateStore(folder / "clients"), Key(config.seed).at("clients")
        liars = None
        if config.attack is not None:
            liars = Liars(config.attack, Key(config.seed), setup.clients)
        host = Host(
            method, data.dataset, data.partition, store, key, devices_of(device), liars,
            ClientSide(config.compress),
        )  # fmt: skip
        if config.run.allocator == "keep":
            keep_freed_memory()
        run = replace(config.run, threads=config.run.threads or 1, workers=None, device=device)
        fleet = fleet_for(host, run, workers)
        noise = client_noise(config, setup.clients, secret=True)
        return cls(
            method, fleet, data.clients, folder, run=run, tell=tell, noise=noise,
            signatures=signatures, policy=policy,
        )  # fmt: skip

    def start_session(self, session: int, base: Seal) -> None:
        """Begin a session from the private states of the round `base`, or continue the current one.

        `base` names a round whose private states are permanent (committed), and their hash. Private
        states of later rounds are deleted. If `base` is `NO_SEAL`, training starts again: all
        permanent states are moved to another folder. That folder is deleted once the last round in
        it, or a later round, has permanent states again.

        Raises CheckpointError if a later session has begun, or the states of `base` are missing.
        """
        if session < self._session:
            raise CheckpointError(
                f"the message is of session {session}, but the run is in session {self._session}"
            )
        if session > self._session:
            if not base[1]:
                self._set_aside()
            self._store.rewind(*base)
            self._session, self._done, self._sealed = session, 0, base
            self._write_session()
        elif not self._recovered:
            self._store.open(*self._sealed)
            self._store.recover()
        self._recovered = True

    def apply_orders(self, orders: list[Any]) -> None:
        """Carry out the server's instructions that this node has not yet carried out.

        Each of these `orders` is a list: a number, "drop", "void" or "seal", and what it applies
        to. Raises CodecError for an invalid order.
        """
        for order in orders:
            match order:
                case [int(number), *_] if number <= self._done:
                    continue
                case [int(number), "drop", [int(round), int(step)], [*clients]] if _whole(clients):
                    for client in clients:
                        self._store.drop(client, (round, step))
                case [int(number), "void", int(round)]:
                    self._store.void(round)
                case [int(number), "seal", int(round), [*keep]] if _whole(keep):
                    self._seal(round, keep)
                case _:
                    raise CodecError(f"invalid order {short(order, 60)}")
            self._done = number
            if order[1] == "seal":
                self._write_session()

    @property
    def state(self) -> dict[str, Any]:
        """What every reply reports to the server.

        "life" is the number of the session, and "done" that of the server's last instruction that
        this node has carried out. "sealed" is the last round whose private states were made
        permanent, and their hash.
        """
        return {"life": self._session, "done": self._done, "sealed": list(self._sealed)}

    def run_work(
        self, work: dict[str, Any], down: Tree | PerClient, clients: Sequence[int],
        masking: Masking | None = None,
    ) -> Generator[Arrival]:  # fmt: skip
        """Run a client function, or a step of a secure sum, for these clients.

        `work` names the function, the round and the key; `down` is the message. With `masking`, the
        replies are masked. An error in one client's message, data, state or function is a fault of
        this client only. Raises CodecError for invalid `work`.
        """
        with _received("the work"):
            name, phase = str(work["name"]), work["phase"]
            version = (int(work["version"][0]), int(work["version"][1]))
            as_of = checked_seal(work["as_of"]) if work.get("as_of") else None
            key = _key(work["key"])
            parts = dict(work.get("parts", {}))
            reduce = {str(part): REDUCERS[kind] for part, kind in parts.items()}
        step = name in STEPS
        client_work = ClientWork(None if step else self._method, name)
        if not step and not client_work.exists:
            raise CodecError(f"{self._method.name} has no client work {name[:60]!r}")
        if phase not in ("train", "evaluate"):
            raise CodecError(f"unknown phase {short(phase, 20)!r}")
        # Predictions of a client's model on test episodes draw nothing from its data; but the
        # model has learned from them, so that with noise by the clients they are not sent, either.
        open_upload = not step and masking is None
        uses_data = phase == "train" or client_work.draw_name or self._noisy
        if self._run.secure_sums and open_upload and uses_data:
            raise CodecError(
                "run.secure_sums is true, but replies that are not masked are asked for"
            )
        if phase == "train" and version[0] <= self._sealed[0]:
            raise CodecError(
                f"work of round {version[0]}, but round {self._sealed[0]} is already committed"
            )
        if as_of:
            self._open_seal(*as_of)
            version = (as_of[0], version[1])
        for client in clients:
            if client not in self._clients:
                yield Arrival(client, None, Fault("lost", "this node does not hold the client"))
        held = tuple(client for client in clients if client in self._clients)
        exchange = Exchange(client_work, down, held, reduce, key, version, phase, masking=masking)
        with self._run.arithmetic():
            arrivals, liars = self._arrivals(exchange), self._fleet.host.liars
            yield from arrivals if liars is None else liars.collude(exchange, arrivals)

    def _arrivals(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the fleet's arrivals; after an error, run the remaining clients one by one."""
        left = dict.fromkeys(exchange.to)
        try:
            for arrival in self._masking.replies(exchange):
                del left[arrival.client]
                yield arrival
        except Exception:
            if exchange.work.method is None:
                raise
            self._tell(
                warning(f"{len(left)} clients now run one by one, after\n{traceback.format_exc()}")
            )
        for client in left:
            self._store.drop(client, exchange.version)  # written, but not yielded
            try:
                arrival = self._fleet.host.serve(unmasked(exchange), client)
                yield self._masking.masked(exchange, arrival)
            except Exception as error:
                text = _reason(error, self._folder)
                self._tell(warning(f"client {client} failed: {text}"))
                if exchange.masking is not None:  # the text may say what the client holds
                    text = "its work failed; the node's log says why"
                found = Fault("refused" if self._noisy else "lost", text)
                yield self._masking.masked(exchange, Arrival(client, None, found))

    def _open_seal(self, round: int, sha: str) -> None:
        """Make a round's permanent private states, with the hash `sha`, readable; change none."""
        if round < self._sealed[0]:
            self._store.open(round, sha)
        elif (round, sha) != self._sealed:
            raise CheckpointError(
                f"the states of round {round} are not those of the server's checkpoint. Resume "
                "the run."
            )

    def _seal(self, round: int, keep: list[int]) -> None:
        # Where this node did not commit a round of `keep`, keep its newest commit before the round.
        sealed = self._store.sealed_rounds()
        kept = {max((s for s in sealed if s <= r), default=-1) for r in keep}
        self._sealed = (round, self._store.seal(round, kept))
        for path in self._folder.glob(f"{_SET_ASIDE}*"):
            last = int(path.name.removeprefix(_SET_ASIDE).partition("-")[0])
            if self._sealed[1] and last <= round:
                shutil.rmtree(path)

    def _set_aside(self) -> None:
        if sealed := self._store.sealed_rounds():
            name = f"{_SET_ASIDE}{sealed[-1]:06d}-{self._session}"
            self._store.folder.rename(self._folder / name)

    def _write_session(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        storage.write_bytes(self._folder / "life.json", json.dumps(self.state).encode(), sync=True)


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Write a run's settings to a file. Raises CheckpointError if the file has other settings."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write_bytes(path, json.dumps(settings).encode(), sync=True)
        return
    changed = difference(records.read(path, dict[str, Any]), settings, except_for=MAY_CHANGE)
    if changed:
        raise CheckpointError(f"this run began with another configuration: {changed}.")


# The folders of an absolute path: from a root, a home or a drive to the last separator.
_FOLDERS = re.compile(r"(?<![\w.~/\\-])(?:~?/|[A-Za-z]:[/\\])(?:[^\s'\"/\\]+[/\\])*")


class Worker:
    """Handles the messages of all runs on a node.

    Args:
        name: name of the node.
        data: data of the node's clients.
        folder: state folder of the node, with a subfolder for each run.
        limits: bounds on received messages.
        workers: number of clients, or stacks of clients, that run at once.
        device: device that the clients compute on, such as "cpu" or "cuda:0".
        tell: logs errors.
        policy: bounds on requests; None for no bounds and no audit log.
        signatures: sign the keys of secure sums and check those of others; None for neither.
    """

    def __init__(
        self, name: str, data: NodeData, folder: Path, *, limits: Limits = LIMITS, workers: int = 1,
        device: str = "cpu", tell: Callable[[str], None] = print, policy: Policy | None = None,
        signatures: Signatures | None = None,
    ) -> None:  # fmt: skip
        self.name, self._data, self._folder = name, data, folder
        self._limits, self._workers, self._device, self._tell = limits, workers, device, tell
        self._policy, self._keeps_log = policy or NO_BOUNDS, policy is not None
        self._signatures = signatures
        self._held: tuple[Setup, ClientRuntime] | None = None  # of the last run; others are on disk

    def handle(self, wire_message: WireMessage) -> WireMessage:
        """Return the reply to a message; errors are logged and named in the reply."""
        id = wire_message.head.get("id")
        reply = WireMessage({"id": id})
        start = time.perf_counter()
        try:
            self._handle(wire_message, reply)
        except (CodecError, FedshotError) as error:
            reply = WireMessage({"id": id, "refused": without_paths(str(error), self._folder)})
            self._tell(warning(f"refused: {error}"))
        except Exception as error:
            reply = WireMessage({"id": id, "failed": _reason(error, self._folder)})
            self._tell(at_level("error", traceback.format_exc()))
        reply.head["seconds"] = time.perf_counter() - start
        self.log(wire_message.head, reply)
        return reply

    def log(self, head: Mapping[str, Any], reply: WireMessage) -> None:
        """Add a message and its reply to the audit log, if the node has a policy.

        `head` is the message's header, or {} if the message is not verified. If the log cannot be
        written, the node reports the error with `tell` and continues.
        """
        if not self._keeps_log:
            return
        setup, work = head.get("setup"), head.get("work")
        work = work if isinstance(work, dict) else {}
        try:
            append_to_log(
                self._folder / "audit.jsonl",
                run=short(setup.get("run"), 40) if isinstance(setup, dict) else "",
                work={name: short(work[name], 60)
                      for name in ("name", "phase", "version", "clients") if name in work},
                up={"clients": len(reply.blocks), "bytes": reply.nbytes},
                seconds=round(reply.head.get("seconds", 0.0), 3),
                refused=short(reply.head.get("refused", reply.head.get("failed", ""))),
            )  # fmt: skip
        except OSError as error:
            self._tell(
                at_level("error", f"{self._folder / 'audit.jsonl'} lacks a message: {error}")
            )

    def _handle(self, wire_message: WireMessage, reply: WireMessage) -> None:
        head = wire_message.head
        with _received("the head"):
            setup, session = Setup.from_json(head["setup"]), int(head["life"])
            base, orders = checked_seal(head["base"]), list(head["orders"])
        runtime = self._runtime(setup)
        if head.get("hello"):
            clients = list(self._data.clients)
            facts = environment() | {"device": self._device}
            reply.head |= {"name": self.name, "clients": clients, "environment": facts}
            return
        runtime.start_session(session, base)
        runtime.apply_orders(orders)
        if head.get("work"):
            self._policy.check_disk(self._folder / setup.run)
            run_work(runtime, wire_message, reply, self._limits, self._policy, self._tell)
        reply.head |= runtime.state

    def _runtime(self, setup: Setup) -> ClientRuntime:
        if self._held is None or self._held[0] != setup:
            self._held = setup, ClientRuntime.of(
                setup, self._data, self._folder / setup.run,
                workers=self._workers, device=self._device, tell=self._tell,
                signatures=self._signatures, policy=self._policy,
            )  # fmt: skip
        return self._held[1]


def run_work(
    runtime: ClientRuntime, wire_message: WireMessage, reply: WireMessage, limits: Limits,
    policy: Policy = NO_BOUNDS, tell: Callable[[str], None] = print,
) -> None:  # fmt: skip
    """Run the client function that a message requests, and add the results to the reply.

    When the time that the policy allows is used up, the remaining clients are skipped and reported
    as faults. Raises CodecError for an invalid request, and once the server no longer waits for the
    reply.
    """
    begun = time.monotonic()
    head, work = wire_message.head, wire_message.head["work"]
    with _received("the work"):
        clients = [*dict.fromkeys(int(client) for client in work["clients"])]
        # Seconds for which the server waits for the reply.
        deadline = float(head.get("sent", math.inf)) + float(head.get("within", math.inf))
        remaining = deadline - time.time()
        found = work.get("masking")
        masking = None if found is None else masking_from_json(found, limits)
    if COMMON in wire_message.blocks:
        down = wire_message.get(COMMON, limits)
    else:  # read when the client runs
        down = PerClient(lambda client: wire_message.get(f"c{client}", limits))
    results = reply.head["results"] = {}
    with closing(runtime.run_work(work, down, clients, masking)) as arrivals:
        for arrival in arrivals:
            if arrival.reply is not None:
                up: Mapping[str, Tree] = arrival.reply.up
                parts = up if masking is None else masking.reduce.keys() - {LARGEST}
                policy.check_up(up, () if work.get("name") in STEPS else parts)
            results[str(arrival.client)] = _put(arrival, reply)
            if len(results) == len(clients):
                continue
            seconds = time.monotonic() - begun
            done = f"{len(results)} of {len(clients)} clients are done"
            if seconds > remaining:
                raise CodecError(f"{done}, and the server does not wait for the reply any more")
            try:
                policy.check_seconds(seconds)
            except PolicyError as error:
                tell(warning(f"{done}: {error}"))
                fault = {"fault": ["lost", str(error)]}
                reply.head["results"] = {str(client): fault for client in clients} | results
                break


@contextmanager
def _received(what: str) -> Iterator[None]:
    """Turn errors in reading a part of a message into CodecError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"{what} is invalid: {short(repr(error))}") from None


def _whole(numbers: list[Any]) -> bool:
    return all(type(number) is int for number in numbers)


def _key(parts: list[Any]) -> Key:
    root, *path = parts
    if type(root) is not int or not all(type(part) in (int, str) for part in path):
        raise ValueError(f"key {short(parts, 60)}")
    return Key(root, tuple(path))


def without_paths(text: str, *roots: Path) -> str:
    """Return a text with every absolute path shortened to its file name.

    A path with a space or an apostrophe does not show where it ends; it is shortened if it begins
    with the home folder, the working folder or one of `roots`.
    """
    found = [str(root) for root in roots]
    for place in (Path.cwd, Path.home):
        with suppress(OSError, RuntimeError):  # there may be no such folder any more
            found.append(str(place()))
    for root in found:
        text = text.replace(f"{root}{os.sep}", "")
    return _FOLDERS.sub("", text)


def _reason(error: Exception, *roots: Path) -> str:
    """Return an error's type and text, without paths."""
    return without_paths(f"{type(error).__name__}: {error}"[:2000], *roots)


def _put(arrival: Arrival, wire_message: WireMessage) -> dict[str, Any]:
    """Put a client's reply into the message; return the client's entry in its `results`."""
    if arrival.reply is None:
        return {"fault": list(arrival.fault or ("lost", "no reply"))}
    reply = arrival.reply
    metrics = {name: value if isinstance(value, Tensor) else torch.tensor(value)
               for name, value in reply.metrics.items()}  # fmt: skip
    content: dict[str, Tree] = {"up": dict(reply.up), "metrics": metrics}
    entry: dict[str, Any] = {}
    if isinstance(reply.weight, Tensor):
        content["weight"] = reply.weight
    else:
        entry["weight"] = reply.weight
    wire_message.put(f"c{arrival.client}", content)
    return entry
