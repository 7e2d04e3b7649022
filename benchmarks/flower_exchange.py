"""What an exchange over Flower costs, and what nodes that simulate a cluster gain.

    python benchmarks/flower_exchange.py [ROUNDS]
    python benchmarks/flower_exchange.py ROUNDS cluster [--device cuda] [--clients 32] [--turns 3]
    python benchmarks/flower_exchange.py ROUNDS width [--clients 300] [--width 64] [--workers 1]

The first prints the seconds of an exchange that are not the clients' work, and where they go: three
nodes with four clients each, a small model, TLS and keys, all on this machine. "outside" is the
time of a round less that of the slowest node's work; CPU seconds are those of the processes, which
depend little on what else the machine is doing.

The second trains a Conv4 on random images, with all clients in one process, on one node and on two
nodes in turn. It prints rounds per second, and the bytes of the messages of a round.

The third has many clients on three nodes, and an MLP with two hidden layers of `--width` units. It
prints the seconds and bytes of an exchange, and by how much the memory of each process has grown at
its peak, in MB (peak resident memory less that before the first exchange).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedshot.config.load import Config
from fedshot.deploy.flower import flower_runs, local
from fedshot.deploy.flower.fleet import FlowerFleet
from fedshot.deploy.flower.messages import Limits
from fedshot.deploy.flower.messaging import Messenger
from fedshot.deploy.flower.node_registry import NodeRegistry
from fedshot.fleets.wrapper import Wrapper
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

NODES = 3
SETTINGS: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 12, "alpha": 10.0},
    "episode": {"way": 5, "shot": 1, "query": 5},
    "model": {"backbone": {"name": "mlp", "hidden": [16]}},
    "run": {"validate_every": 10_000},
    "test": {"episodes": 20},
}
METHODS = {
    "fl_proto": {"name": "fl_proto"},
    "fsl_local (private states)": {"name": "fsl_local", "learner_name": "proto"},
}

NAMES = ("one process", "one node", "two nodes")
spent: Counter[str] = Counter()


def timed(owner: type[Any], name: str) -> None:
    inner: Callable[..., Any] = getattr(owner, name)

    def outer(*words: Any, **more: Any) -> Any:
        begun = time.perf_counter()
        try:
            return inner(*words, **more)
        finally:
            spent[name] += time.perf_counter() - begun

    setattr(owner, name, outer)


def cpu(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def flower_fleet(experiment: Experiment) -> FlowerFleet:
    fleet = experiment.meter.fleet
    while isinstance(fleet, Wrapper) and not isinstance(fleet, FlowerFleet):
        fleet = fleet.fleet
    assert isinstance(fleet, FlowerFleet)
    return fleet


@contextmanager
def on_nodes(
    prepared: PreparedRun, folder: Path, nodes: int
) -> Iterator[tuple[Experiment, dict[str, int]]]:
    """Open the run on nodes of this machine; yield it, and the pids of all processes by name."""
    local.prepare(folder, prepared, nodes)
    device = prepared.config.run.device
    with local.federation(folder, nodes, lambda _: None, device=device) as (server, children):
        deployment = flower_runs.Deployment.new(str(server.folder), 0, 600.0)
        with flower_runs.open_experiment(
            prepared, folder / "run", deployment, server, lambda _: None, wait=300.0
        ) as experiment:
            pids = {child.name: child.process.pid for child in children.all}
            yield experiment, pids | {"run": os.getpid()}


def on_noise(folder: Path, clients: int, shape: tuple[int, ...], **settings: Any) -> PreparedRun:
    """Return a run on random images, the first axis of `shape` for each client, in 20 classes."""
    each, *size = shape
    images = np.random.default_rng(0).integers(0, 256, (each * clients, *size), np.uint8)
    np.savez(folder / "images.npz", x=images, y=np.arange(len(images)) % 20)
    common = {
        "data": {"name": "npz", "path": str(folder / "images.npz")},
        "split": {"base": ["0-9"], "validation": ["10-14"], "novel": ["15-19"]},
        "partition": {"name": "iid", "clients": clients},
        "episode": {"way": 5, "shot": 1, "query": 1},
        "test": {"episodes": 20, "query": 5},
    }
    return PreparedRun(Config.of(common | settings))


def measure(name: str, rounds: int) -> None:
    chosen = {**SETTINGS, "method": METHODS[name], "run": {**SETTINGS["run"], "rounds": rounds}}
    prepared = PreparedRun(Config.of(chosen))
    with (
        tempfile.TemporaryDirectory() as place,
        on_nodes(prepared, Path(place), NODES) as (experiment, pids),
    ):
        fleet = flower_fleet(experiment)
        going = experiment.run()
        next(going)
        next(going)
        spent.clear()
        before = [cpu(pid) for pid in pids.values()]
        worked, begun = fleet.seconds, time.perf_counter()
        exchanging = sum(record.seconds for record in going)
        wall = time.perf_counter() - begun
        used = [cpu(pid) - was for pid, was in zip(pids.values(), before, strict=True)]
        worked = fleet.seconds - worked
    n = rounds - 1
    print(f"{name}: {n} rounds of one exchange")
    print(
        f"  outside the work {(exchanging - worked) / n:.3f} s an exchange; work {worked / n:.3f}"
    )
    print(f"  a round with its checkpoint and seal {wall / n:.3f} s")
    words = "SuperLink {:.3f}, nodes {:.3f} {:.3f} {:.3f}, run {:.3f}"
    print(f"  CPU s: {words.format(*(seconds / n for seconds in used))}")
    print("  run: " + ", ".join(f"{part} {s / n:.3f}" for part, s in spent.most_common()))


def simulate_cluster(rounds: int, clients: int, device: str, turns: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        prepared = on_noise(
            Path(place), clients, (64, 32, 32, 3),
            method={"name": "fl_proto", "local_steps": 10},
            run={
                "rounds": rounds + 1, "validate_every": 10_000, "device": device,
                "fleet": "sequential" if device == "cpu" else "vectorised",
            },
        )  # fmt: skip
        for turn in range(turns):
            rates = {n: _rate(prepared, n, Path(place) / f"{turn}-{n}") for n in (0, 1, 2)}
            for n, rate in rates.items():
                print(f"{NAMES[n]}: {rate:.3f} rounds/s, {rate / rates[0]:.2f} of one process")


def _rate(prepared: PreparedRun, nodes: int, folder: Path) -> float:
    """Return the rounds per second after the first round; 0 nodes: in this process."""
    with ExitStack() as stack:
        if nodes:
            experiment, _ = stack.enter_context(on_nodes(prepared, folder, nodes))
        else:
            experiment = Experiment(prepared, folder)
        going = experiment.run()
        next(going)  # round 0
        next(going)
        if nodes:
            flower_fleet(experiment).nbytes.clear()
        seconds = [record.seconds for record in going]
    if nodes:
        down, up = (flower_fleet(experiment).nbytes[way] / len(seconds) for way in ("down", "up"))
        print(f"{NAMES[nodes]}: {down:,.0f} bytes down and {up:,.0f} up in a round", flush=True)
    return len(seconds) / sum(seconds)


def memory(pid: int) -> dict[str, float]:
    """Return the resident memory of a process and its peak, in MB."""
    found = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()))
    return {name: int(kb) / 1024 for name, kb in found.items()}


def many_clients(rounds: int, clients: int, width: int, workers: int, most_mb: int) -> None:
    inner = local.node_command
    more = ["--workers", str(workers), "--most-mb", str(most_mb)]
    local.LIMITS = Limits(message=most_mb << 20)
    local.node_command = lambda *words: [*inner(*words), *more]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepared = on_noise(
            folder, clients, (60, 8, 8, 1),
            model={"backbone": {"name": "mlp", "hidden": [width, width]}},
            method={"name": "fl_proto", "local_steps": 1},
            run={"rounds": rounds + 1, "validate_every": 10_000, "checkpoint_every": 10_000},
        )  # fmt: skip
        with on_nodes(prepared, folder, NODES) as (experiment, pids):
            going = experiment.run()
            next(going)
            before = {name: memory(pid)["VmRSS"] for name, pid in pids.items()}
            next(going)
            fleet = flower_fleet(experiment)
            fleet.nbytes.clear()
            seconds = [record.seconds for record in going]
            model = experiment.meter.total("train", "down") / clients / (rounds + 1) / 2**20
            print(
                f"{clients} clients on {NODES} nodes, a model of {model:.2f} MB: "
                f"{statistics.median(seconds):.2f} s an exchange ({min(seconds):.2f} to "
                f"{max(seconds):.2f}), {fleet.nbytes['down'] / rounds / 2**20:.2f} MB down "
                f"and {fleet.nbytes['up'] / rounds / 2**20:.2f} MB up"
            )
            for name, pid in pids.items():
                grown = memory(pid)["VmHWM"] - before[name]
                print(f"  {name}: {before[name]:.0f} MB at first, {grown:.0f} MB more at its peak")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=20)
    parser.add_argument(
        "what", nargs="?", choices=("exchange", "cluster", "width"), default="exchange"
    )
    parser.add_argument("--clients", type=int)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--most-mb", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    if options.what == "cluster":
        clients = options.clients or 32
        simulate_cluster(options.rounds, clients, options.device, options.turns)
        sys.exit()
    if options.what == "width":
        many_clients(
            options.rounds, options.clients or 300, options.width, options.workers, options.most_mb
        )
        sys.exit()
    for owner, part in ((NodeRegistry, "connected"), (Messenger, "_send"), (Messenger, "_poll"),
                        (Messenger, "_fetch"), (FlowerFleet, "seal")):  # fmt: skip
        timed(owner, part)
    for method in METHODS:
        measure(method, options.rounds)
