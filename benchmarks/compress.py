"""Accuracy against megabytes with compressed messages: JSON, and the figure of docs/compression.md.

    python benchmarks/compress.py digits                  train what is not in the JSON yet
    python benchmarks/compress.py cifar_fs --only frl     CIFAR-FS is found in $FEDSHOT_DATA
    python benchmarks/compress.py draw                    the figure and the tables alone

Ten clients share the base classes at random and all take part in each round; the test is 5-way
5-shot on novel classes. Nothing was tuned for compression, and the last round is tested.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from fedshot.config.load import Config
from fedshot.config.settings import merged
from fedshot.evaluation.episodic_test import half_width
from fedshot.reports.figure_export import DASHES, INK, PALETTE, drawing
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

ROOT = Path(__file__).resolve().parent.parent
JSON, FIGURE = ROOT / "benchmarks" / "compress.json", ROOT / "docs" / "compression.svg"
SEEDS = (0, 1, 2)
PLAIN, NO_FEEDBACK = "none", "int4 up, no feedback"
CASES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "int8 up and down": {"up": "int8", "down": "int8"},
    "int4 up, int8 down": {"up": "int4", "down": "int8"},
    "topk up, int8 down": {"up": "topk", "down": "int8"},
    NO_FEEDBACK: {"up": "int4", "down": "int8", "error_feedback": False},
}
SECURE: dict[str, dict[str, Any]] = {
    "secure sums": {},
    "secure sums, int8 up": {"up": "int8"},
    "secure sums, int4 up": {"up": "int4"},
}
"""Cases with secure sums, of the methods in `SECURE_METHODS` on CIFAR-FS."""

SECURE_METHODS = ("fl_proto", "fedfsl_mi")
ADAM = {"name": "adam", "lr": 0.001}
METHODS: dict[str, dict[str, Any]] = {
    "fl_proto": {"method": {"name": "fl_proto", "local_steps": 5, "optimizer": ADAM}},
    "fedfsl_mi": {
        "method": {
            "name": "fedfsl_mi", "local_steps": 5, "optimizer": ADAM,
            "inner": {"adapts": "head", "lr": 0.1, "steps": 5, "test_steps": 10},
        },
    },
    "frl": {
        "method": {"name": "frl", "inner_rounds": 2, "optimizer": ADAM, "inner_lr": 0.1},
        "partition": {"name": "resampled", "by": "iid"},
        "episode": {"shot": 20, "query": 20},
        "test": {"shot": 20, "query": 20, "episodes": 100, "group": {"clients": 10, "by": "iid"}},
    },
}  # fmt: skip
DATA: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "digits": ({"fl_proto": 10, "fedfsl_mi": 10, "frl": 20}, {
        "data": "digits",
        "model": {"backbone": {"name": "conv4", "width": 32}},
        "split": {"base": [0, 1, 2, 3, 4], "novel": [5, 6, 7, 8, 9]},
    }),
    "cifar_fs": ({"fl_proto": 30, "fedfsl_mi": 20, "frl": 40}, {
        "data": {"name": "cifar100", "variant": "cifar_fs"},
        "model": {"backbone": {"name": "conv4", "width": 32}},
    }),
}  # fmt: skip
"""Data -> (rounds by method, settings)."""

SETTINGS: dict[str, Any] = {
    "partition": {"name": "iid", "clients": 10},
    "episode": {"way": 5, "shot": 5, "query": 5},
    "run": {
        "fleet": "sequential",
        "threads": 1,
        "choose": "last",
        "checkpoint_every": 100,
        "validate_every": 100,
    },
    "test": {"way": 5, "shot": 5, "query": 15, "episodes": 600, "validation_episodes": 2},
}


def trained(data: str, method: str, case: str, seed: int) -> dict[str, Any]:
    """Train one run, and return its result."""
    rounds, chosen = DATA[data]
    tree = merged(merged(SETTINGS, chosen), METHODS[method])
    run_options = {"rounds": rounds[method], "secure_sums": case in SECURE}
    tree = merged(tree, {"seed": seed, "run": run_options, "compress": (CASES | SECURE)[case]})
    with tempfile.TemporaryDirectory() as folder:
        run = Experiment(PreparedRun(Config.of(tree)), Path(folder) / "run")
        seconds = sum(record.seconds for record in run.run())
        score = run.result()
        found = {way: run.meter.total("train", way) for way in ("up", "down")}
    return {
        "data": data, "method": method, "case": case, "seed": seed, "accuracy": score.accuracy,
        "seconds": round(seconds, 1), **found,
        "per_episode": [round(one, 4) for one in score.per_episode],
    }  # fmt: skip


def held() -> list[dict[str, Any]]:
    """Return the results so far."""
    return json.loads(JSON.read_text(encoding="utf-8")) if JSON.exists() else []


def key_of(row: dict[str, Any]) -> tuple[str, str, str, int]:
    """Return what identifies a result."""
    return row["data"], row["method"], row["case"], row["seed"]


def cells(
    found: list[dict[str, Any]], data: str, method: str, cases: Iterable[str] = CASES
) -> dict[str, dict[int, Any]]:
    """Return the results of a method by case and seed."""
    rows = [one for one in found if (one["data"], one["method"]) == (data, method)]
    return {case: by_seed for case in cases
            if (by_seed := {one["seed"]: one for one in rows if one["case"] == case})}  # fmt: skip


def table(found: list[dict[str, Any]], data: str, cases: Iterable[str] = CASES) -> None:
    """Print the table of one data set: differences are paired with the runs of the first case."""
    cases = [*cases]
    print("| " + " | ".join([data, "MB up", "MB down", "fewer bytes", "seeds", "accuracy, %",
                             "difference", "over episodes"]) + " |")  # fmt: skip
    print("|---" + "|---:" * 7 + "|")
    for method in METHODS:
        by_case = cells(found, data, method, cases)
        plain = by_case.get(cases[0], {})
        for case, runs in by_case.items():
            seeds = sorted(runs.keys() & plain.keys())
            pairs = [(runs[s], plain[s]) for s in seeds]
            up, down = (fmean(mine[way] for mine, _ in pairs) / 1e6 for way in ("up", "down"))
            fewer = fmean(its["up"] + its["down"] for _, its in pairs) / 1e6 / (up + down)
            accuracy = 100 * fmean(mine["accuracy"] for mine, _ in pairs)
            row = [f"{method}, {case}", f"{up:.2f}", f"{down:.2f}", f"{fewer:.1f}",
                   str(len(seeds)), f"{accuracy:.1f}", "", ""]  # fmt: skip
            if case != cases[0]:
                over = [100 * (mine["accuracy"] - its["accuracy"]) for mine, its in pairs]
                spread = f" ± {half_width(over):.1f}" if over[1:] else ""
                episodes = [
                    [100 * (a - b) for a, b in zip(*both, strict=True)]
                    for both in ((mine["per_episode"], its["per_episode"]) for mine, its in pairs)
                ]
                means = [fmean(one) for one in zip(*episodes, strict=True)]
                row[-2:] = [f"{fmean(over):+.1f}{spread}", f"± {half_width(means):.1f}"]
            print("| " + " | ".join(row) + " |")
    print()


def draw(found: list[dict[str, Any]]) -> None:
    """Draw the means over seeds, with a bar from the lowest to the highest."""

    def panels(figure: Any) -> None:
        axes = figure.subplots(1, len(DATA), sharey=False)
        for ax, data in zip(axes, DATA, strict=True):
            for i, method in enumerate(METHODS):
                by_case = cells(found, data, method)
                for j, (case, runs) in enumerate(by_case.items()):
                    every = [100 * one["accuracy"] for one in runs.values()]
                    sent = fmean(one["up"] + one["down"] for one in runs.values()) / 1e6
                    mean = fmean(every)
                    error = [[mean - min(every)], [max(every) - mean]]
                    ax.errorbar(sent, mean, error, marker="osD^v"[[*CASES].index(case)], ms=5,
                                color=PALETTE[i], capsize=2, lw=1)  # fmt: skip
                    if j == 0:
                        ax.axhline(mean, color=PALETTE[i], lw=0.8, ls=DASHES[2])
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            ax.xaxis.set_minor_formatter(NullFormatter())
            ax.set(title=data, xlabel="megabytes sent in training, up and down")
            ax.grid(visible=True)
        axes[0].set_ylabel("accuracy, %")
        lines = [axes[0].plot([], [], color=PALETTE[i], label=m)[0] for i, m in enumerate(METHODS)]
        lines += [axes[0].plot([], [], color=INK, marker="osD^v"[j], ls="", label=case)[0]
                  for j, case in enumerate(CASES)]  # fmt: skip
        figure.legend(handles=lines, loc="outside lower center", ncols=4)

    FIGURE.write_text(drawing("Accuracy against megabytes", (7.2, 4), panels), encoding="utf-8")


def main() -> None:
    """Train what is missing, print the tables, and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", choices=[*DATA, "draw"])
    parser.add_argument("--only", default="", help="one of the methods")
    options = parser.parse_args()
    wanted = [] if options.data == "draw" else [
        (options.data, method, case, seed)
        for seed in SEEDS for method in METHODS for case in (*CASES, *SECURE)
        if options.only in ("", method)
        and (case in CASES or (options.data == "cifar_fs" and method in SECURE_METHODS))
    ]  # fmt: skip
    wanted.sort(key=lambda one: one[2] == NO_FEEDBACK)  # the others are compared first
    for one in wanted:
        if one not in map(key_of, held()):
            row = trained(*one)
            rows = [*held(), row]  # another process may have added some
            lines = ",\n".join(json.dumps(r) for r in sorted(rows, key=key_of))
            JSON.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
            print(*one, f"{100 * row['accuracy']:.2f}", row["seconds"], flush=True)
    for data in DATA:
        table(held(), data)
    table(held(), "cifar_fs", SECURE)
    draw(held())


if __name__ == "__main__":
    main()
