"""A federation on loopback, and runs on it in this process or in one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedshot.cli.main import main
from fedshot.config.load import Config
from fedshot.core import storage, tree
from fedshot.core.errors import ConfigError
from fedshot.core.plugins import VARIABLE
from fedshot.fleets.unreliable import Trouble, Unreliable
from fedshot.protocol.exchange import Exchange, Fleet
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun
from fedshot.runs.recorder import Record
from system.runs import last_arrays, merged

from . import registered_method

NODES, CLIENTS = 3, 6
PROXIES = {"all_proxy": "socks5://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
"""Proxies that are not there; loopback goes without."""
ALLOWED = {VARIABLE: "nn.models.user_nets"}
"""The module whose functions may make backbones."""
ENVIRONMENT = PROXIES | ALLOWED  # of nodes
LONG = 300.0  # seconds that nothing here should take; the machine may be busy
_PORTS = iter(range(10_000 + os.getpid() % 400 * 50, 10_050 + os.getpid() % 400 * 50))

BASE: dict[str, Any] = {
    "name": "small",
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": CLIENTS, "alpha": 10.0},
    "episode": {"way": 5, "shot": 1, "query": 5},
    "model": {"backbone": {"name": "mlp", "hidden": [16]}},
    "run": {"rounds": 5, "cohort": 4, "validate_every": 2},
    "test": {"episodes": 20, "validation_episodes": 10, "way": 2},
    "split": {"base": ["0-4"], "validation": ["5", "6"], "novel": ["7-9"]},
}
"""All runs share data, partition and seed, hence the files that the nodes hold."""
TWELVE: dict[str, Any] = {"partition": {"clients": 12}, "run": {"cohort": None}}


def setting(*changes: dict[str, Any]) -> PreparedRun:
    """Return the setting of BASE with changes."""
    return PreparedRun(Config.of(merged(BASE, *changes)))


def own_port() -> int:
    """Return a free port that neither the system nor another worker gives to anybody else."""
    from fedshot.deploy.flower.server_folder import check_free

    for port in _PORTS:
        with suppress(ConfigError):
            check_free("127.0.0.1", port)
            return port
    raise RuntimeError("no port is left; give each process more of them")


@contextmanager
def _program_of_tests() -> Iterator[None]:
    """Start nodes with the method of the tests; elsewhere tests look at the usual program."""
    from fedshot.deploy.flower import local

    with pytest.MonkeyPatch.context() as patch:
        program = [sys.executable, str(Path(registered_method.__file__))]
        patch.setattr(local, "PROGRAM", program)
        yield


class LocalFederation:
    """A folder with a federation that was prepared and started as `up` does it.

    `changes` are those of `setting`; they change the data of the nodes.
    """

    def __init__(self, folder: Path, nodes: int = NODES, *changes: dict[str, Any]) -> None:
        self.folder, self.nodes, self.changes = folder, nodes, changes
        self._stack = ExitStack()
        self._made = 0
        self.said: list[str] = []

    def __enter__(self) -> LocalFederation:
        from fedshot.deploy.flower import local

        with _program_of_tests():
            local.prepare(self.folder, setting(*self.changes), self.nodes)
            self.home, self.children = self._stack.enter_context(
                local.federation(self.folder, self.nodes, self.said.append, env=ENVIRONMENT)
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextmanager
    def experiment(self, *changes: dict[str, Any], deadline: float = LONG) -> Iterator[Experiment]:
        """Yield an experiment whose clients live on the nodes."""
        from fedshot.deploy.flower.flower_runs import Deployment, open_experiment

        self._made += 1
        folder = self.folder / f"run-{self._made}"
        deployment = Deployment.new(str(self.home.folder), 0, deadline)
        prepared = setting(*self.changes, *changes)
        with open_experiment(
            prepared, folder, deployment, self.home, self.said.append, wait=LONG
        ) as made:
            yield made

    def child(self, name: str) -> Any:
        """Return the newest process of a name."""
        return [child for child in self.children.all if child.name == name][-1]

    def address(self) -> str:
        """Return host and port of the server."""
        return self.home.address()[0]

    def start_node(self, i: int) -> None:
        """Start a node again."""
        from fedshot.deploy.flower import local

        with _program_of_tests():
            words = local.node_command(self.folder, i, self.address())
        log = self.folder / "logs" / f"node-{i}.log"
        self.children.start(f"node-{i}", words, log, ENVIRONMENT)

    def run_with_killed_node(self, experiment: Experiment) -> set[tuple[int, int]]:
        """Kill node-1 in round 3, after its first local update, and start it after the round.

        Returns the (round, client) of all lost replies.
        """
        from fedshot.deploy.flower.flower_runs import Deployment

        victim, faults = self.child("node-1"), set[tuple[int, int]]()
        run = Deployment.read(experiment.folder).run
        states = self.folder / "node-1" / "state" / run / "clients"

        def strike() -> None:
            until(lambda: any(states.glob("*/r000003-*.safetensors")), "work of round 3")
            victim.process.kill()

        killer = threading.Thread(target=strike)
        killer.start()
        for record in experiment.run():
            faults |= lost(record)
            if record.round == 3:
                killer.join(LONG)
                assert victim.ended
                self.start_node(1)
                until(lambda: self.child("node-1").tail.count("connected") >= 2, "the node")
        return faults

    def private(self, experiment: Experiment) -> dict[str, str]:
        """Return the hash of the newest private state of every client, as the nodes hold them."""
        from fedshot.deploy.flower.flower_runs import Deployment

        run = Deployment.read(experiment.folder).run
        return newest(self.folder.glob(f"node-*/state/{run}/clients/*"))


def newest(clients: Iterator[Path]) -> dict[str, str]:
    """Return the hash of the newest state in each client's folder."""
    found = {}
    for client in clients:
        held = sorted(client.glob("*.safetensors")) if client.is_dir() else []
        if held:
            found[client.name] = storage.read(held[-1])[2]
    return found


def alone(
    folder: Path, *changes: dict[str, Any], faults: set[tuple[int, int]] = frozenset()
) -> Experiment:
    """Return a finished run on the sequential fleet, losing (round, client) as told."""

    def plan(exchange: Exchange, client: int) -> Trouble | None:
        return "drop" if (exchange.version[0], client) in faults else None

    def remote_fleet(here: Fleet) -> Fleet:
        return Unreliable(here, plan)

    made = Experiment(setting(*changes, {"run": {"fleet": "sequential"}}), folder, remote_fleet)
    for _ in made.run():
        pass
    return made


def weights(folder: Path) -> str:
    """Return the hash of the server's last state."""
    return tree.digest_of(last_arrays(folder).items())


def lost(record: Record) -> set[tuple[int, int]]:
    """Return (round, client) of the lost or rejected replies."""
    return {(record.round, fault["client"]) for fault in record.faults}


def until(true: Callable[[], bool], what: str) -> None:
    """Wait until something holds."""
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, f"waited {LONG:g} s for {what}"
        time.sleep(0.02)


def program(*words: object, **options: Any) -> subprocess.Popen[str]:
    """Start fedshot, with the methods of these tests, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, registered_method.__file__, *map(str, words)],
        text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )  # fmt: skip


def flower(*words: object) -> None:
    """Run a command of `fedshot flower` that ends, in this process."""
    assert main(["flower", *map(str, words)]) == 0


def written(folder: Path, *changes: dict[str, Any]) -> Path:
    """Write a configuration; return its file."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(merged(BASE, *changes)), encoding="utf-8")
    return path
