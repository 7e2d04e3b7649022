"""Accuracy against epsilon, on features of HuffPost: JSON, figure and tables of docs/privacy.md.

    python benchmarks/privacy.py --features huffpost.npz           train what is not in the JSON yet
    python benchmarks/privacy.py --features huffpost.npz --only frl
    python benchmarks/privacy.py --draw                            the figure and the table alone
    python benchmarks/privacy.py --features huffpost.npz --client-noise [--clients 500] [--seeds 3]

The last prints the table of accuracy and time with noise by the clients inside secure sums, beside
noise by the server.

The features are those of a sentence encoder for each headline, as docs/features.md writes them to a
file. 500 clients have 30 classes (Dirichlet, alpha 0.5); 11 other classes are the test, 5-way
1-shot. Nothing was tuned for privacy but the clips.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from fedshot.config.load import Config
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

ROOT = Path(__file__).resolve().parent.parent
JSON, FIGURE = ROOT / "benchmarks" / "privacy.json", ROOT / "docs" / "privacy.svg"
EPSILONS, SEEDS = (None, 8, 3, 1), (0, 1, 2)
BASELINE = "given features"

SETTINGS: dict[str, Any] = {
    "split": {"random": [30, 0, 11], "seed": 0},
    "partition": {"name": "dirichlet", "clients": 500, "alpha": 0.5},
    "episode": {"way": [2, 5], "shot": 1, "query": 5, "queries": "up_to"},
    "run": {"fleet": "sequential", "threads": 1, "infeasible_clients": "leave_out"},
    "test": {"way": 5, "shot": 1, "query": 15, "episodes": 500},
}
FRL = {"name": "frl", "inner_rounds": 1, "refresh": False, "positions": "pooled",
       "optimizer": {"name": "adam", "lr": 0.003}}  # fmt: skip
PROTO = {"name": "fl_proto", "local_steps": 1, "optimizer": {"name": "sgd", "lr": 5.0}}
CASES: dict[str, tuple[list[int], int, dict[str, Any], dict[str, Any]]] = {
    "FedNCM, client level": ([], 1, {"name": "fedncm"}, {"name": "client"}),
    "FED3R, example level": (
        [], 1, {"name": "fed3r", "ridge_lambda": 30.0}, {"name": "example"}
    ),
    "FL-Proto, client level": ([64], 10, PROTO, {"name": "client", "clip": 0.5}),
    "FRL, client level": (
        [64], 5, FRL,
        {"name": "client", "clip": {"theta": 0.1, "sums": 10.0, "counts": 20.0, "gradient": 0.3}},
    ),
}  # fmt: skip
"""Case -> (hidden layers, rounds, method, privacy)."""


def trained(
    features: Path,
    case: str,
    epsilon: float | None,
    seed: int,
    clients: int = 500,
    by_clients: bool = False,
) -> tuple[dict[str, Any], float]:
    """Train one run; return its result, and the seconds of an exchange."""
    hidden, rounds, method, privacy = CASES[case]
    tree = SETTINGS | {
        "seed": seed,
        "data": {"name": "npz", "path": str(features)},
        "partition": SETTINGS["partition"] | {"clients": clients},
        "model": {"backbone": {"name": "mlp", "hidden": hidden}},
        "method": method,
        "run": SETTINGS["run"] | {"rounds": rounds, "secure_sums": by_clients},
        "privacy": "none" if epsilon is None else privacy | {"epsilon": epsilon},
    }
    prepared = PreparedRun(Config.of(tree))
    with tempfile.TemporaryDirectory() as folder:
        run = Experiment(prepared, Path(folder) / "run")
        begun = time.process_time()
        for _ in run.run():
            pass
        score = run.result()
        seconds = (time.process_time() - begun) / rounds
        return {
            "case": case, "epsilon": epsilon, "seed": seed, "accuracy": score.accuracy,
            "interval": score.interval, "clients": len(prepared.clients), "spent": run.spent,
            "baseline": run.baselines[BASELINE].accuracy,
        }, seconds  # fmt: skip


def noise_table(features: Path, clients: int, seeds: int, only: str) -> None:
    """Train with noise by the server and by the clients; print a row of each method for each."""
    head = ["accuracy, %", "noise by", "epsilon 8", "3", "1", "seconds of an exchange"]
    print("|", " | ".join(head), "|\n|---|---|---|---|---|---|", flush=True)
    for case in ("FedNCM, client level", "FL-Proto, client level"):
        if not case.lower().startswith(only):
            continue
        for by_clients in (False, True):
            cells, seconds = [], []
            for epsilon in (8, 3, 1):
                found = [trained(features, case, epsilon, seed, clients, by_clients)
                         for seed in range(seeds)]  # fmt: skip
                cells.append(f"{100 * fmean(row['accuracy'] for row, _ in found):.1f}")
                seconds += [s for _, s in found]
                print(case, by_clients, epsilon, found, file=sys.stderr, flush=True)
            name = "the clients" if by_clients else "the server"
            row = [case.partition(",")[0], name, *cells, f"{fmean(seconds):.2g}"]
            print("|", " | ".join(row), "|", flush=True)


def draw(found: list[dict[str, Any]]) -> None:
    """Draw the means over seeds, with a bar from the lowest to the highest; print them."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "fedshot"
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for i, case in enumerate(CASES):
        points = []
        for x, epsilon in enumerate(EPSILONS):
            held = [100 * one["accuracy"] for one in found
                    if (one["case"], one["epsilon"]) == (case, epsilon)]  # fmt: skip
            if held:
                points.append((x + 0.05 * (i - 1.5), fmean(held), min(held), max(held)))
                print(f"{case:24} epsilon {epsilon}: {points[-1][1]:.1f} ({len(held)} seeds)")
        if points:
            x, mean, low, high = zip(*points, strict=True)
            below = [m - a for m, a in zip(mean, low, strict=True)]
            above = [b - m for m, b in zip(mean, high, strict=True)]
            axes.errorbar(x, mean, [below, above], marker="o", capsize=2, label=case)
    if found:
        axes.axhline(100 * fmean(one["baseline"] for one in found), color="grey", ls=":",
                     label="features without training")  # fmt: skip
    axes.set_xticks(range(len(EPSILONS)), ["no privacy", "8", "3", "1"])
    axes.set(xlabel="epsilon at delta 1e-5", ylabel="accuracy, %")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(FIGURE, metadata={"Date": None})


def main() -> None:
    """Train what is missing, and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", type=Path)
    parser.add_argument("--only", default="", help="cases whose names begin so")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--client-noise", action="store_true")
    parser.add_argument("--clients", type=int, default=500, help="of --client-noise")
    parser.add_argument("--seeds", type=int, default=3, help="of --client-noise")
    options = parser.parse_args()
    only = options.only.lower()
    if options.client_noise:
        noise_table(options.features, options.clients, options.seeds, only)
        return

    def held() -> list[dict[str, Any]]:
        return json.loads(JSON.read_text(encoding="utf-8")) if JSON.exists() else []

    wanted = [] if options.draw else [
        (case, epsilon, seed) for seed in SEEDS for case in CASES for epsilon in EPSILONS
        if case.lower().startswith(only)
    ]  # fmt: skip
    for one in wanted:
        if one not in [(r["case"], r["epsilon"], r["seed"]) for r in held()]:
            row, _ = trained(options.features, *one)
            JSON.write_text(json.dumps([*held(), row], indent=1) + "\n", encoding="utf-8")
            print(one, round(100 * row["accuracy"], 2), flush=True)
    draw(held())


if __name__ == "__main__":
    main()
