"""A node's part in one run: its clients' work, and their private states in the node's own folder.

A server that is started again begins a new life of the run, numbered upwards. The first message of
a life takes the node back to the states that the server's last checkpoint belongs to; messages of
earlier lives are refused. Within a life, states that a node wrote before it was killed are taken up
again: what the server has not accepted it says with its next message.

Orders (drop these states, void this round, seal it) are numbered within a life and come again
until the node has said that they are done; each is done once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator
from typing_extensions import TypedDict

from fedshot.config.registry import difference
from fedshot.core import records, storage
from fedshot.core.errors import CheckpointError
from fedshot.core.machine import arithmetic
from fedshot.core.records import Whole
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.deploy.flower.codec import CodecError
from fedshot.deploy.flower.node_registry import checked_seal
from fedshot.deploy.flower.setup import Setup
from fedshot.deploy.flower.shards import NodeData
from fedshot.fleets.host import Host
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.threads import Threads
from fedshot.protocol.exchange import Arrival, ClientWork, Exchange, PerClient
from fedshot.protocol.method import Method
from fedshot.runs.experiment import MAY_CHANGE

Version = tuple[int, int]
_ASIDE = "before-"  # folders of states that were set aside: the last round sealed, and the life


class _Life(TypedDict):
    """What life.json holds."""

    life: Whole
    done: Whole
    sealed: Annotated[list[Any], AfterValidator(checked_seal)]


class ClientRuntime:
    """A node in a run.

    Args:
        method: whose work its clients run.
        host: where they live.
        clients: their numbers.
        folder: where the life of the run is noted; their states are in the host's store.
        threads: intra-op threads of the run.
        workers: clients that run at once. The same bits for any number.
    """

    def __init__(
        self,
        method: Method[Any],
        host: Host,
        clients: Collection[int],
        folder: Path,
        *,
        threads: int = 1,
        workers: int = 1,
    ) -> None:
        self._method, self._store, self._clients = method, host.store, frozenset(clients)
        self._folder, self._threads = folder, threads
        self._fleet = Threads(host, workers, threads) if workers > 1 else Sequential(host)
        self._life, self._done, self._sealed = self._remembered()
        self._awake = False

    @classmethod
    def of(cls, setup: Setup, holdings: NodeData, folder: Path, workers: int) -> ClientRuntime:
        """Return a node's part in a run that a server has told of.

        Raises:
            ConfigError: the run and the node's data do not belong together.
            CheckpointError: the folder holds another run of the same name.
        """
        setup.check(holdings)
        config = setup.config()
        _agree(folder / "settings.json", config.settings)
        method = setup.method(config, holdings)
        host = Host(
            method, holdings.dataset, holdings.partition, PrivateStore(folder / "clients"),
            setup.private_key(config),
        )  # fmt: skip
        threads = config.run.threads or 1
        return cls(method, host, holdings.clients, folder, threads=threads, workers=workers)

    def arrive(self, life: int, base: tuple[int, str]) -> None:
        """Take part in a life of the run, from the states sealed as `base`.

        Sealed states are deleted only for those of an earlier seal that is there. Where `base` is
        none, they are set aside until a round as late has been sealed again.

        Raises CheckpointError when the life is over, or the states are not there.
        """
        if life < self._life:
            raise CheckpointError(f"a message of life {life} of the run, which is in {self._life}")
        if life > self._life:
            if not base[1]:
                self._set_aside()
            self._store.rewind(*base)
            self._life, self._done, self._sealed = life, 0, base
            self._remember()
        elif not self._awake:
            self._store.open(*self._sealed)
            self._store.recover()
        self._awake = True

    def obey(self, orders: list[Any]) -> None:
        """Carry out the orders that are new."""
        for order in orders:
            number, kind, *rest = order
            if number <= self._done:
                continue
            if kind == "drop":
                version, clients = rest
                for client in clients:
                    self._store.drop(int(client), (int(version[0]), int(version[1])))
            elif kind == "void":
                self._store.void(int(rest[0]))
            elif kind == "seal":
                self._seal(int(rest[0]), [int(r) for r in rest[1]])
            else:
                raise CodecError(f"an order {str(kind)[:20]!r} that is not known here")
            self._done = number
            if kind == "seal":
                self._remember()

    @property
    def state(self) -> dict[str, Any]:
        """What the server is told about orders and seals."""
        return {"life": self._life, "done": self._done, "sealed": list(self._sealed)}

    def serve(self, work: dict[str, Any], messages: dict[int, Tree]) -> Generator[Arrival]:
        """Run the named work at the clients that have a message."""
        name, phase = str(work["name"]), str(work["phase"])
        if not ClientWork(self._method, name).exists:
            raise CodecError(f"{self._method.name} has no client work {name[:60]!r}")
        if phase not in ("train", "evaluate"):
            raise CodecError(f"phase {phase[:20]!r} is not known here")
        strangers = sorted(set(messages) - self._clients)
        if strangers:
            raise CodecError(f"client {strangers[0]} does not live here")
        version: Version = (int(work["version"][0]), int(work["version"][1]))
        if phase == "train" and version[0] <= self._sealed[0]:
            raise CodecError(f"work of round {version[0]}; round {self._sealed[0]} is sealed here")
        if work.get("as_of"):
            round, sha = int(work["as_of"][0]), str(work["as_of"][1])
            self._look_back(round, sha)
            version = (round, version[1])
        root, *path = work["key"]
        key = Key(int(root), tuple(path))
        exchange = Exchange(
            ClientWork(self._method, name), PerClient(messages.__getitem__), tuple(messages), {},
            key, version, "train" if phase == "train" else "evaluate",
        )  # fmt: skip
        with arithmetic(self._threads):
            yield from self._fleet.replies(exchange)

    def _look_back(self, round: int, sha: str) -> None:
        """Make a sealed round readable, and leave the newest what it is."""
        if round < self._sealed[0]:
            self._store.open(round, sha)
        elif (round, sha) != self._sealed:
            raise CheckpointError(
                f"the states of round {round} are not the ones that the server's checkpoint "
                "belongs to. Resume the run."
            )

    def _seal(self, round: int, keep: list[int]) -> None:
        # A round that this node sealed nothing in goes back to its newest seal before it.
        held = self._store.sealed_rounds()
        kept = {max((h for h in held if h <= r), default=-1) for r in keep}
        self._sealed = (round, self._store.seal(round, kept))
        for path in self._folder.glob(f"{_ASIDE}*"):
            if int(path.name.removeprefix(_ASIDE).partition("-")[0]) <= round and self._sealed[1]:
                shutil.rmtree(path)

    def _set_aside(self) -> None:
        """Keep what is sealed where nothing looks for it."""
        sealed = self._store.sealed_rounds()
        if sealed:
            self._store.folder.rename(self._folder / f"{_ASIDE}{sealed[-1]:06d}-{self._life}")

    def _remembered(self) -> tuple[int, int, tuple[int, str]]:
        path = self._folder / "life.json"
        if not path.exists():
            return 0, 0, (-1, "")
        found = records.read(path, _Life)
        return found["life"], found["done"], (found["sealed"][0], found["sealed"][1])

    def _remember(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.state)
        storage.write_bytes(self._folder / "life.json", text.encode(), sync=True)


def _agree(path: Path, settings: dict[str, Any]) -> None:
    """Note the settings of a run; raise CheckpointError when it began with others."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write_bytes(path, json.dumps(settings).encode(), sync=True)
        return
    held = records.read(path, dict[str, Any])
    changed = difference(held, settings, except_for=MAY_CHANGE)
    if changed:
        raise CheckpointError(f"this run began with another configuration: {changed}.")
