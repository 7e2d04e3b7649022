"""Seconds of an exchange over Flower that are not the clients' work, and where they go.

    python benchmarks/flower_exchange.py [ROUNDS]

Three nodes with four clients each, a small model, TLS and keys, all on this machine. "outside" is
the time of a round less that of the slowest node's work; CPU seconds are those of the processes,
which depend little on what else the machine is doing.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedshot.config.load import Config
from fedshot.deploy.flower import flower_runs, local
from fedshot.deploy.flower.fleet import FlowerFleet
from fedshot.deploy.flower.messaging import Messenger
from fedshot.deploy.flower.node_registry import NodeRegistry
from fedshot.fleets.influence import Influence
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


if __name__ == "__main__":
    for owner, part in ((NodeRegistry, "connected"), (Messenger, "_send"), (Messenger, "_poll"),
                        (Messenger, "_fetch"), (FlowerFleet, "seal")):  # fmt: skip
        timed(owner, part)
    for method in METHODS:
        measure(method, int(sys.argv[1]) if len(sys.argv) > 1 else 20)
