"""Numbers of clients up to a million, and rounds that do not wait for the slowest client.

    python benchmarks/scale.py clients             measure what is not in scale.json yet
    python benchmarks/scale.py stragglers          train what is not in scale.json yet
    python benchmarks/scale.py draw                the tables, and the figure of docs/scale.md

The data are the synthetic characters `glyphs`. In `clients` each case is a process of its own: a
round of 1,000 clients, of which each draws 10 examples of 5 classes and takes one step. `fsl_local`
keeps a private model for each client, and `fl_proto` keeps nothing. Overhead is what a round and
its checkpoint take beyond the clients' own work (reading their rows, drawing the episodes, the
first private model, training). Times in the table are processor time, and in brackets time by the
clock, which other programs on the machine lengthen. In `stragglers` a prototypical network is
trained on 200 clients whose speeds are drawn; accuracy is that on 300 episodes of the validation
classes, and the interval is Student's over the three seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

BEGAN = time.perf_counter()
ROOT = Path(__file__).resolve().parent.parent
JSON, FIGURE = ROOT / "benchmarks" / "scale.json", ROOT / "docs" / "stragglers.svg"
COHORT, SEEDS = 1000, (0, 1, 2)
ALL = (10**3, 10**4, 10**5, 10**6)
TINY, CONV4 = {"name": "mlp", "hidden": [16]}, {"name": "conv4", "width": 32}
# Case -> (method, backbone, rounds, numbers of clients).
CASES: dict[str, tuple[str, dict[str, Any], int, tuple[int, ...]]] = {
    "tiny, nothing private": ("fl_proto", TINY, 3, ALL),
    "tiny, private models": ("fsl_local", TINY, 3, ALL),
    "Conv4, private models": ("fsl_local", CONV4, 2, ALL),
}
SPEEDS = {"compute": 10.0, "download": 1.0, "upload": 0.05, "spread": 1.0}
# Server -> options of `run`. A cohort of equal clients would take 50 s and the messages.
SERVERS: dict[str, dict[str, Any]] = {
    "waits for all 20": {"cohort": 20, "clock": SPEEDS},
    "20 asked, deadline of 75 s": {"cohort": 20, "clock": SPEEDS | {"deadline": 75.0}},
    "26 asked, first 20 count": {"cohort": 26, "clock": SPEEDS | {"wait_for": 20}},
    "20 at once, rounds of 10 replies": {
        "cohort": 20, "clock": SPEEDS | {"wait_for": 10, "asynchronous": True},
        "rounds": 60, "validate_every": 10,
    },
}  # fmt: skip


def settings(clients: int, method: dict[str, Any], backbone: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that both parts share."""
    return {
        "data": {"name": "glyphs"},
        "partition": {"name": "overlapping", "clients": clients, "way": 5, "per_class": 10},
        "episode": {"way": 5, "shot": 1, "query": 5},
        "model": {"backbone": backbone},
        "method": method,
        "test": {"episodes": 50, "validation_episodes": 300},
    }


def scale(case: str, clients: int) -> dict[str, Any]:
    """Measure a run of a case in this process."""
    from fedshot.config.load import Config
    from fedshot.fleets.host import Host
    from fedshot.runs.experiment import Experiment
    from fedshot.runs.prepare import PreparedRun

    name, backbone, rounds, _ = CASES[case]
    method = {"name": name, "local_steps": 1}
    if name == "fsl_local":
        method["learner_name"] = "proto"
    tree = settings(clients, method, backbone)
    tree["run"] = {"rounds": rounds, "cohort": COHORT, "fleet": "sequential", "choose": "last",
                   "validate_every": 10**6}  # fmt: skip
    clocks = time.perf_counter, time.process_time
    own = [0.0, 0.0]

    def timed(fn: Any) -> Any:
        def call(*arguments: Any) -> Any:
            before = [now() for now in clocks]
            try:
                return fn(*arguments)
            finally:
                for i, now in enumerate(clocks):
                    own[i] += now() - before[i]

        return call

    with tempfile.TemporaryDirectory(prefix="fedshot-scale-") as folder:
        made = Experiment(PreparedRun(Config.of(tree)), Path(folder) / "run")
        fleet: Any = made.fleet
        while not hasattr(fleet, "host"):
            fleet = fleet.fleet
        host: Host = fleet.host
        for owner, names in ((host.checks, ("draw", "run")), (host, ("_first", "data"))):
            for name in names:
                setattr(owner, name, timed(getattr(owner, name)))
        made.prepared.validation = None
        rounds_of = made.run()
        next(rounds_of)
        start, start_cpu = time.perf_counter() - BEGAN, time.process_time()
        totals, overheads = [], []
        last = [now() for now in clocks]
        for _ in rounds_of:
            took = [now() - before for now, before in zip(clocks, last, strict=True)]
            totals.append(took)
            overheads.append([(t - o) / COHORT for t, o in zip(took, own, strict=True)])
            own[:], last = [0.0, 0.0], [now() for now in clocks]
        seconds, beyond = ([median(values) for values in zip(*every[1:], strict=True)]
                     for every in (totals, overheads))  # fmt: skip
        files = list(Path(folder).rglob("*"))
        return {
            "case": case, "clients": clients, "start": start, "start_cpu": start_cpu,
            "round": seconds[0], "round_cpu": seconds[1],
            "overhead": beyond[0], "overhead_cpu": beyond[1],
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "disk": sum(path.stat().st_blocks * 512 for path in files),
            "load": os.getloadavg()[0],
        }  # fmt: skip


def straggle(server: str, seed: int) -> dict[str, Any]:
    """Train a run; return its validated rounds."""
    from fedshot.config.load import Config
    from fedshot.runs.experiment import Experiment
    from fedshot.runs.prepare import PreparedRun

    method = {"name": "fl_proto", "local_steps": 5}
    tree = settings(200, method, {"name": "conv4", "width": 8}) | {"seed": seed}
    tree["run"] = {
        "rounds": 30,
        "validate_every": 5,
        "checkpoint_every": 30,
        "fleet": "sequential",
        "quorum": 0.2,
    } | SERVERS[server]
    with tempfile.TemporaryDirectory(prefix="fedshot-scale-") as folder:
        made = Experiment(PreparedRun(Config.of(tree)), Path(folder) / "run")
        records = list(made.run())
    points = [(r.round, r.simulated, r.validation.accuracy) for r in records if r.validation]
    late = sum(len(r.late) for r in records)
    return {"server": server, "seed": seed, "points": points, "late": late}


def held(part: str) -> list[dict[str, Any]]:
    """Return the results of a part in scale.json."""
    return json.loads(JSON.read_text(encoding="utf-8")).get(part, []) if JSON.exists() else []


def keep(part: str, row: dict[str, Any]) -> None:
    """Add a result to scale.json."""
    every = json.loads(JSON.read_text(encoding="utf-8")) if JSON.exists() else {}
    every.setdefault(part, []).append(row)
    JSON.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")


def measure(part: str) -> None:
    """Add the missing results of a part, each of the clients' in a process of its own."""
    if part == "stragglers":
        found = {(row["server"], row["seed"]) for row in held(part)}
        for seed in SEEDS:
            for server in SERVERS:
                if (server, seed) not in found:
                    keep(part, straggle(server, seed))
        return
    done = {(row["case"], row["clients"]) for row in held(part)}
    for case in CASES:
        for clients in CASES[case][3]:
            if (case, clients) not in done:
                line = [sys.executable, __file__, "one", case, str(clients)]
                text = subprocess.run(line, check=True, capture_output=True, text=True).stdout
                keep(part, json.loads(text.splitlines()[-1]))


def draw() -> None:
    """Print the tables, and draw the figure."""
    from fedshot.evaluation.episodic_test import half_width
    from fedshot.reports.figure_export import PALETTE, picture

    print(
        "| case | clients | start, s | memory, MB | round, s | overhead, ms a client | disk, MB |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in held("clients"):
        print(
            f"| {row['case']} | {row['clients']:,} "
            f"| {row['start_cpu']:.1f} ({row['start']:.0f}) "
            f"| {row['memory'] / 1e6:.0f} | {row['round_cpu']:.1f} ({row['round']:.0f}) "
            f"| {1e3 * row['overhead_cpu']:.2f} ({1e3 * row['overhead']:.0f}) "
            f"| {row['disk'] / 1e6:.1f} |"
        )
    print("\n| the server | hours | late a round | accuracy, % | difference, points |")
    print("|---|---|---|---|---|")
    lines: dict[str, Any] = {}
    for server in SERVERS:
        seeds = [row for row in held("stragglers") if row["server"] == server]
        rounds = list(zip(*(row["points"] for row in seeds), strict=True))
        if len(seeds) < 2:
            continue
        hours = [fmean(seconds for _, seconds, _ in points) / 3600 for points in rounds]
        accuracies = [[100 * a for _, _, a in points] for points in rounds]
        lines[server] = hours, accuracies
        first = next(iter(lines.values()))[1][-1]
        gains = [a - b for a, b in zip(accuracies[-1], first, strict=True)]
        end, late = accuracies[-1], fmean(row["late"] for row in seeds) / rounds[-1][0][0]
        accuracy, gain = (f"{fmean(v):.1f} ± {half_width(v):.1f}" for v in (end, gains))
        print(f"| {server} | {hours[-1]:.2f} | {late:.1f} | {accuracy} | {gain} |")

    def curves(axes: Any) -> None:
        for colour, (server, (hours, accuracies)) in zip(PALETTE, lines.items(), strict=False):
            mean, half = [fmean(a) for a in accuracies], [half_width(a) for a in accuracies]
            axes.plot(hours, mean, color=colour, label=server)
            low, high = ([m + sign * h for m, h in zip(mean, half, strict=True)]
                         for sign in (-1, 1))  # fmt: skip
            axes.fill_between(hours, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set(xlabel="simulated hours", ylabel="accuracy on validation episodes, %")
        axes.legend(loc="lower right")
        axes.grid(axis="y")

    if lines:
        title = "Accuracy against simulated hours"
        FIGURE.write_text(picture(title, (5.6, 3.6), curves), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("clients", "stragglers", "draw", "one"))
    parser.add_argument("case", nargs="*", help="of `one`: case and number of clients")
    options = parser.parse_args()
    if options.part == "one":
        case, clients = options.case
        print(json.dumps(scale(case, int(clients))))
    elif options.part != "draw":
        measure(options.part)
    if options.part != "one":
        draw()


if __name__ == "__main__":
    main()
