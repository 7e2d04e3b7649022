"""The runtime of a run on a node: it runs client work and keeps private states on disk.

Each start or resume of the run at the server begins a new session (`life` in messages) with a
higher number. The first message of a session rewinds the node to the private states of the server's
last checkpoint; messages of earlier sessions are refused. A node that is killed and restarted
within a session takes over the states that it had written; the server's next message says which of
them to drop.

The server's orders are numbered within a session: `drop` states, `void` (discard) a round, or
`seal` a round, i.e. make its states permanent. The server repeats an order until the node reports
it as done; the node carries out each order once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from fedshot.config.registry import difference
from fedshot.core import records, storage
from fedshot.core.errors import CheckpointError
from fedshot.core.machine import arithmetic
from fedshot.core.records import Whole
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.deploy.flower.messages import CodecError, short
from fedshot.deploy.flower.node_registry import NO_SEAL, Seal, SealRecord, checked_seal
from fedshot.deploy.flower.setup import Setup
from fedshot.deploy.flower.shards import NodeData
from fedshot.fleets.host import Host
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.threads import Threads
from fedshot.protocol.exchange import Arrival, ClientWork, Exchange, PerClient
from fedshot.protocol.method import Method
from fedshot.runs.experiment import MAY_CHANGE

_SET_ASIDE = "before-"  # prefix of folders with set-aside states, "before-<last sealed>-<session>"


class _SessionRecord(TypedDict):
    """Content of life.json."""

    life: Whole
    done: Whole
    sealed: SealRecord


class ClientRuntime:
    """The clients of a node in one run.

    Args:
        method: the method of the run.
        host: data and private states of the clients.
        clients: numbers of the clients.
        folder: where life.json is kept.
        threads: intra-op threads of the run.
        workers: number of clients that run at once; it does not change the results.
    """

    def __init__(
        self, method: Method[Any], host: Host, clients: Collection[int], folder: Path, *,
        threads: int = 1, workers: int = 1,
    ) -> None:  # fmt: skip
        self._method, self._store, self._clients = method, host.store, frozenset(clients)
        self._folder, self._threads = folder, threads
        self._fleet = Threads(host, workers, threads) if workers > 1 else Sequential(host)
        self._session, self._done = 0, 0
        self._sealed: Seal = NO_SEAL
        if (path := folder / "life.json").exists():
            found = records.read(path, _SessionRecord)
            self._session, self._done = found["life"], found["done"]
            self._sealed = checked_seal(found["sealed"])
        self._recovered = False

    @classmethod
    def of(cls, setup: Setup, data: NodeData, folder: Path, workers: int) -> ClientRuntime:
        """Return the runtime for a run that a server has announced.

        Raises:
            ConfigError: the node's data do not fit the run.
            CheckpointError: the folder holds a run of the same name with another configuration.
        """
        setup.check(data)
        config = setup.config()
        _check_settings(folder / "settings.json", config.settings)
        method = config.method(config.model.build(data.dataset), setup.classes, setup.clients)
        store, key = PrivateStore(folder / "clients"), Key(config.seed).at("clients")
        host = Host(method, data.dataset, data.partition, store, key)
        threads = config.run.threads or 1
        return cls(method, host, data.clients, folder, threads=threads, workers=workers)

    def start_session(self, session: int, base: Seal) -> None:
        """Begin a session of the run from the sealed states `base`, or continue the current one.

        States that were sealed later are deleted. If `base` is `NO_SEAL`, all sealed states are
        moved aside instead, until a round at least as late has been sealed.

        Raises CheckpointError if a later session has begun, or the states of `base` are missing.
        """
        if session < self._session:
            raise CheckpointError(
                f"the message is of session {session} of the run, which is in {self._session}"
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
        """Carry out the orders that this node has not carried out yet."""
        for number, *order in orders:
            if number <= self._done:
                continue
            match order:
                case ["drop", [int(round), int(step)], [*clients]]:
                    for client in clients:
                        self._store.drop(int(client), (round, step))
                case ["void", int(round)]:
                    self._store.void(round)
                case ["seal", int(round), [*keep]]:
                    self._seal(round, [int(r) for r in keep])
                case _:
                    raise CodecError(f"unknown order {short(order[0], 20)!r}")
            self._done = number
            if order[0] == "seal":
                self._write_session()

    @property
    def state(self) -> dict[str, Any]:
        """The session, the last order done and the last seal, as replies report them."""
        return {"life": self._session, "done": self._done, "sealed": list(self._sealed)}

    def run_work(self, work: dict[str, Any], messages: dict[int, Tree]) -> Generator[Arrival]:
        """Run the client work that `work` describes, for the clients in `messages`."""
        name, phase = str(work["name"]), work["phase"]
        if not ClientWork(self._method, name).exists:
            raise CodecError(f"{self._method.name} has no client work {name[:60]!r}")
        if phase not in ("train", "evaluate"):
            raise CodecError(f"unknown phase {short(phase, 20)!r}")
        if unknown := sorted(set(messages) - self._clients):
            raise CodecError(f"this node does not hold client {unknown[0]}")
        version = (int(work["version"][0]), int(work["version"][1]))
        if phase == "train" and version[0] <= self._sealed[0]:
            raise CodecError(
                f"work of round {version[0]}, but round {self._sealed[0]} is already sealed"
            )
        if work.get("as_of"):
            self._open_seal(*checked_seal(work["as_of"]))
            version = (work["as_of"][0], version[1])
        root, *path = work["key"]
        exchange = Exchange(
            ClientWork(self._method, name), PerClient(messages.__getitem__), tuple(messages), {},
            Key(int(root), tuple(path)), version, phase,
        )  # fmt: skip
        with arithmetic(self._threads):
            yield from self._fleet.replies(exchange)

    def _open_seal(self, round: int, sha: str) -> None:
        """Make the states of a sealed round readable; the newest states stay as they are."""
        if round < self._sealed[0]:
            self._store.open(round, sha)
        elif (round, sha) != self._sealed:
            raise CheckpointError(
                f"the states of round {round} are not those of the server's checkpoint. Resume "
                "the run."
            )

    def _seal(self, round: int, keep: list[int]) -> None:
        # For a round in which this node sealed nothing, keep its newest seal before that round.
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
