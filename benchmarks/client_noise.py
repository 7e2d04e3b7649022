"""Accuracy and time with noise by the clients inside secure sums, beside noise by the server.

    python benchmarks/client_noise.py --features huffpost.npz [--clients 500] [--seeds 3]

prints the table of docs/privacy.md. Data and methods are those of `privacy.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from fedshot.config.load import Config
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun
from privacy import CASES, SETTINGS

NAMES = ("FedNCM, client level", "FL-Proto, client level")


def trained(
    features: Path, clients: int, case: str, epsilon: float, seed: int, *, by_clients: bool
) -> tuple[float, float]:
    """Train one run; return its accuracy, and the seconds of an exchange."""
    hidden, rounds, method, privacy = CASES[case]
    tree: dict[str, Any] = SETTINGS | {
        "seed": seed,
        "data": {"name": "npz", "path": str(features)},
        "partition": SETTINGS["partition"] | {"clients": clients},
        "model": {"backbone": {"name": "mlp", "hidden": hidden}},
        "method": method,
        "run": SETTINGS["run"] | {"rounds": rounds, "secure_sums": by_clients},
        "privacy": privacy | {"epsilon": epsilon},
    }
    with tempfile.TemporaryDirectory() as folder:
        run = Experiment(PreparedRun(Config.of(tree)), Path(folder) / "run")
        begun = time.process_time()
        for _ in run.run():
            pass
        return run.result().accuracy, (time.process_time() - begun) / rounds


def main() -> None:
    """Train and print a row for each method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="methods whose names begin so")
    options = parser.parse_args()
    head = ["accuracy, %", "noise by", "epsilon 8", "3", "1", "seconds of an exchange"]
    print("|", " | ".join(head), "|\n|---|---|---|---|---|---|", flush=True)
    for case in NAMES:
        if not case.lower().startswith(options.only.lower()):
            continue
        for by_clients in (False, True):
            cells, seconds = [], []
            for epsilon in (8, 3, 1):
                found = [
                    trained(options.features, options.clients, case, epsilon, seed,
                            by_clients=by_clients)
                    for seed in range(options.seeds)
                ]  # fmt: skip
                cells.append(f"{100 * fmean(a for a, _ in found):.1f}")
                seconds += [s for _, s in found]
                print(case, by_clients, epsilon, found, file=sys.stderr, flush=True)
            name = "the clients" if by_clients else "the server"
            row = [case.partition(",")[0], name, *cells, f"{fmean(seconds):.2g}"]
            print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
