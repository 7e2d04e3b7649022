"""Seconds of a round on the fleets of one machine: one client after another, threads, processes.

    python benchmarks/fleets.py

Each case trains the same run on each fleet, in turn. Of each run's rounds after the second, the
lower quartile is taken, and of three turns the least.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import fedshot
from fedshot.core.machine import cores

CONV = {"name": "conv4", "width": 32}
CASES: dict[str, dict[str, Any]] = {
    "FL-Proto, MLP, digits": {
        "method": "fl_proto", "model": {"backbone": {"name": "mlp"}}, "rounds": 60,
    },
    "FL-Proto, Conv4-32, digits": {
        "method": "fl_proto", "model": {"backbone": CONV}, "rounds": 16,
    },
    "FedFSL-naive, second order, Conv4-32, digits": {
        "method": "fedfsl_naive", "rounds": 6,
        "model": {"backbone": CONV, "head": {"name": "linear", "way": 5}},
    },
}  # fmt: skip
FLEETS = ("sequential", "threads", "processes")


def seconds(case: dict[str, Any], fleet: str) -> float:
    """Train a run; return the lower quartile of the seconds of its rounds."""
    run = {"fleet": fleet, "threads": 1, "validate_every": case["rounds"]}
    if fleet != "sequential":
        run["workers"] = cores()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        fedshot.train(data="digits", way=5, episode={"query": 15}, test={"episodes": 5},
                      run=run, out=out, **case)  # fmt: skip
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return float(np.quantile([json.loads(line)["seconds"] for line in lines[3:]], 0.25))


def main() -> None:
    """Measure all cases and print a table."""
    print("| round | " + " | ".join(f"{fleet}, s" for fleet in FLEETS) + " |")
    print("|---" * (len(FLEETS) + 1) + "|")
    for name, case in CASES.items():
        turns = [[seconds(case, fleet) for fleet in FLEETS] for _ in range(3)]
        print(f"| {name} | " + " | ".join(f"{s:.3f}" for s in np.min(turns, axis=0)) + " |")


if __name__ == "__main__":
    main()
