"""What an exchange over Flower costs, and what nodes that simulate a cluster gain.

    python benchmarks/flower_exchange.py [ROUNDS]
    python benchmarks/flower_exchange.py ROUNDS cluster [--device cuda] [--clients 32] [--turns 3]

The first prints the seconds of an exchange that are not the clients' work, and where they go: three
nodes with four clients each, a small model, TLS and keys, all on this machine. "outside" is the
time of a round less that of the slowest node's work; CPU seconds are those of the processes, which
depend little on what else the machine is doing.

The second trains a Conv4 on random images, with all clients in one process, on one node and on two
nodes in turn. It prints rounds per second, and the bytes of the messages of a round.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from fedshot.config.load import Config
from fedshot.deploy.flower import flower_runs, local
from fedshot.deploy.flower.fleet import FlowerFleet
from fedshot.deploy.flower.messages import LIMITS, Incoming, WireMessage
from fedshot.deploy.flower.messaging import Messenger
from fedshot.deploy.flower.node_registry import NodeRegistry
from fedshot.fleets.influence import Influence
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


def measure(name: str, rounds: int) -> None:
    chosen = {**SETTINGS, "method": METHODS[name], "run": {**SETTINGS["run"], "rounds": rounds}}
    prepared = PreparedRun(Config.of(chosen))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        local.prepare(folder, prepared, NODES)
        with (
            local.federation(folder, NODES, lambda _: None) as (server_folder, children),
            flower_runs.open_experiment(
                prepared, folder / "run",
                flower_runs.Deployment.new(str(server_folder.folder), 0, 60.0), server_folder,
                lambda _: None, wait=120.0,
            ) as experiment,
        ):  # fmt: skip
            influence = experiment.meter.fleet
            assert isinstance(influence, Influence)
            fleet = influence.fleet
            assert isinstance(fleet, FlowerFleet)
            going = experiment.run()
            next(going)
            next(going)
            spent.clear()
            pids = [child.process.pid for child in children.all] + [os.getpid()]
            before, worked, begun = [cpu(pid) for pid in pids], fleet.seconds, time.perf_counter()
            exchanging = sum(record.seconds for record in going)
            wall = time.perf_counter() - begun
            used = [cpu(pid) - was for pid, was in zip(pids, before, strict=True)]
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


def count_bytes() -> Counter[str]:
    """Count the bytes of the messages that this process sends to nodes and receives from them."""
    counts: Counter[str] = Counter()
    record, parse = WireMessage.record, Messenger._parse

    def sent(message: WireMessage, *words: Any) -> Any:
        made = record(message, *words)
        counts["down"] += sum(part.count_bytes() for part in made.values())
        return made

    def received(messenger: Messenger, *words: Any) -> Incoming:
        incoming = parse(messenger, *words)
        if incoming.wire_message is not None:
            made = record(incoming.wire_message, LIMITS)
            counts["up"] += sum(part.count_bytes() for part in made.values())
        return incoming

    WireMessage.record, Messenger._parse = sent, received  # type: ignore[method-assign]
    return counts


def simulate_cluster(rounds: int, clients: int, device: str, turns: int) -> None:
    counts = count_bytes()
    with tempfile.TemporaryDirectory() as place:
        generator = np.random.default_rng(0)
        images = generator.integers(0, 256, (64 * clients, 32, 32, 3), np.uint8)
        labels = np.arange(len(images)) % 20
        np.savez(f"{place}/images.npz", x=images, y=labels)
        chosen = {
            "data": {"name": "npz", "path": f"{place}/images.npz"},
            "split": {"base": ["0-9"], "validation": ["10-14"], "novel": ["15-19"]},
            "partition": {"name": "iid", "clients": clients},
            "episode": {"way": 5, "shot": 1, "query": 1},
            "method": {"name": "fl_proto", "local_steps": 10},
            "run": {
                "rounds": rounds + 1, "validate_every": 10_000, "device": device,
                "fleet": "sequential" if device == "cpu" else "vectorised",
            },
            "test": {"episodes": 20, "query": 5},
        }  # fmt: skip
        prepared = PreparedRun(Config.of(chosen))
        for turn in range(turns):
            rates = {n: _rate(prepared, n, Path(place) / f"{turn}-{n}", counts) for n in (0, 1, 2)}
            for n, rate in rates.items():
                print(f"{NAMES[n]}: {rate:.3f} rounds/s, {rate / rates[0]:.2f} of one process")


def _rate(prepared: PreparedRun, nodes: int, folder: Path, counts: Counter[str]) -> float:
    """Return the rounds per second after the first round; 0 nodes: in this process."""
    with ExitStack() as stack:
        if nodes:
            local.prepare(folder, prepared, nodes)
            device = prepared.config.run.device
            server_folder, _ = stack.enter_context(
                local.federation(folder, nodes, lambda _: None, device=device)
            )
            deployment = flower_runs.Deployment.new(str(server_folder.folder), 0, 600.0)
            experiment = stack.enter_context(
                flower_runs.open_experiment(
                    prepared, folder / "run", deployment, server_folder, lambda _: None, wait=300.0
                )
            )
        else:
            experiment = Experiment(prepared, folder)
        going = experiment.run()
        next(going)  # round 0
        next(going)
        counts.clear()
        seconds = [record.seconds for record in going]
    if nodes:
        down, up = (counts[way] / len(seconds) for way in ("down", "up"))
        print(f"{NAMES[nodes]}: {down:,.0f} bytes down and {up:,.0f} up in a round", flush=True)
    return len(seconds) / sum(seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=20)
    parser.add_argument("what", nargs="?", choices=("exchange", "cluster"), default="exchange")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    if options.what == "cluster":
        simulate_cluster(options.rounds, options.clients, options.device, options.turns)
        sys.exit()
    for owner, part in ((NodeRegistry, "connected"), (Messenger, "_send"), (Messenger, "_poll"),
                        (Messenger, "_fetch"), (FlowerFleet, "seal")):  # fmt: skip
        timed(owner, part)
    for method in METHODS:
        measure(method, options.rounds)
