"""Draw the figures of docs/lessons.md from the files below results/.

    python benchmarks/findings.py docs/findings

A figure shows, for each row, the mean test accuracy of a cell and its 95 % interval over episodes
(or clients); seeds of a cell are averaged episode by episode.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from scipy.stats import t

RESULTS = Path(__file__).parents[1] / "results"
BLUE, GREY = "#1f6fb4", "#8a8f98"

# Runs that are not cells of a recipe; docs/lessons.md has their commands.
SAME_STEP = (69.5, 0.6)

Row = tuple[str, str | tuple[float, float]]
FC100, CIFAR, SHORT = "fedfsl-fc100/head-tune4", "cifar-fs/paper-tune4", "cifar-fs/small"
HUFF, FRL, OWN = "f2l-huffpost/paper", "frl-e1/paper", "pfedfsl-table1/small"
FIGURES: dict[str, tuple[str, list[Row], str]] = {
    "control": ("FC100, IID, 5-shot, 40 rounds, tuned", [
        ("FedAvg and class means", f"{FC100}/fedavg-probe.iid-5"),
        ("FedFSL-MI-Adv", f"{FC100}/mi-adv.iid-5"),
        ("FedFSL-MI", f"{FC100}/mi.iid-5"),
        ("FedFSL-naive", f"{FC100}/naive.iid-5"),
        ("FedFSL-prox", f"{FC100}/prox.iid-5"),
        ("training alone", f"{FC100}/local.iid-5"),
    ], "fedavg-probe"),
    "together": ("CIFAR-FS, IID, 200 rounds", [
        ("FedFSL-naive, 5-shot", f"{CIFAR}/naive.iid-5"),
        ("training alone, 5-shot", f"{CIFAR}/local.iid-5"),
        ("FedFSL-naive, 1-shot", f"{CIFAR}/naive.iid-1"),
        ("training alone, 1-shot", f"{CIFAR}/local.iid-1"),
    ], "naive"),
    "step": ("CIFAR-FS, IID, 5-shot, 200 rounds", [
        ("FedFSL-prox, step 0.00206", f"{CIFAR}/prox.iid-5"),
        ("FedFSL-MI, step 0.00206", f"{CIFAR}/mi.iid-5"),
        ("FedFSL-MI-Adv, step 0.00206", f"{CIFAR}/mi-adv.iid-5"),
        ("FedFSL-naive, step 0.00206", SAME_STEP),
        ("FedFSL-naive, step 0.001", f"{CIFAR}/naive.iid-5"),
    ], "naive"),
    "rounds": ("CIFAR-FS, IID, 5-shot, 40 rounds (upper four) and 200", [
        ("FedAvg and class means, 40", f"{SHORT}/fedavg-probe.iid-5"),
        ("Meta-Baseline, 40", f"{SHORT}/meta-baseline.iid-5"),
        ("FL-Proto, 40", f"{SHORT}/fl-proto.iid-5"),
        ("FedFSL-prox, 40", f"{SHORT}/prox.iid-5"),
        ("FedAvg and class means, 200", f"{CIFAR}/fedavg-probe.iid-5"),
        ("Meta-Baseline, 200", f"{CIFAR}/meta-baseline.iid-5"),
        ("FL-Proto, 200", f"{CIFAR}/fl-proto.iid-5"),
        ("FedFSL-prox, 200", f"{CIFAR}/prox.iid-5"),
    ], "fedavg-probe"),
    "f2l": ("HuffPost, IID, 5-shot, 200 rounds", [
        ("FL-Proto", f"{HUFF}/fl-proto.iid-5"),
        ("F2L, head of prototypes (ours)", f"{HUFF}/f2l-prototypes.iid-5"),
        ("training alone", f"{HUFF}/local.iid-5"),
        ("F2L, head learned from zero", f"{HUFF}/f2l.iid-5"),
    ], "f2l"),
    "frl-rounds": ("CIFAR-100, groups of ten, shards, distance-based FRL", [
        ("3 local rounds at test", f"{FRL}/proto.cifar-noniid"),
        ("2 rounds", f"{FRL}/proto-r2.cifar-noniid"),
        ("1 round", f"{FRL}/proto-r1.cifar-noniid"),
        ("class means alone", f"{FRL}/proto-r0.cifar-noniid"),
    ], "proto-r0"),
    "frl-bytes": ("CIFAR-100, groups of ten, IID", [
        ("FRL, linear (76 GB and more)", f"{FRL}/linear.cifar-iid"),
        ("FRL, distance-based", f"{FRL}/proto.cifar-iid"),
        ("FedAvg and class means (0.6 GB)", f"{FRL}/probe-mean.cifar-iid"),
        ("one-shot FL", f"{FRL}/one-shot.cifar-iid"),
        ("fine-tuning by FedAvg", f"{FRL}/finetune.cifar-iid"),
    ], "probe-mean"),
    "personal": ("five classes of five images at each client; CIFAR-100 (upper) and MNIST", [
        ("pFedFSL, CIFAR-100", f"{OWN}/pfedfsl-paper.cifar100-n5-k5-path"),
        ("Ditto, CIFAR-100", f"{OWN}/ditto.cifar100-n5-k5-path"),
        ("FedAvg, CIFAR-100", f"{OWN}/fedavg.cifar100-n5-k5-path"),
        ("pFedFSL, MNIST", f"{OWN}/pfedfsl-paper.mnist-n5-k5-path"),
        ("Ditto, MNIST", f"{OWN}/ditto.mnist-n5-k5-path"),
        ("FedAvg, MNIST", f"{OWN}/fedavg.mnist-n5-k5-path"),
    ], "fedavg."),
    "norm": ("CIFAR-100, groups of ten, shards, FRL with GPAL: one model, two ways to test", [
        ("batch norm of each client", f"{FRL}/gpal-own.cifar-noniid"),
        ("batch norm of the group", f"{FRL}/gpal.cifar-noniid"),
    ], "gpal-own"),
    "seeds": ("FC100, Dirichlet, 5-shot, 40 rounds: each seed alone, and all", [], ""),
}  # fmt: skip


def scores(cell: str) -> dict[str, np.ndarray]:
    """Return, for each seed of a cell, the accuracies over episodes (or clients) in percent."""
    seeds = json.loads((RESULTS / f"{cell}.json").read_text(encoding="utf-8"))["seeds"]
    found = {}
    for name, seed in seeds.items():
        if seed["test"]["clients"]:
            found[name] = 100 * np.array(list(seed["test"]["clients"].values()))
        else:
            found[name] = 100 * np.array(seed["right"]) / seed["queries"]
    return found


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the mean and the half-width of its 95 % interval."""
    n = len(values)
    return float(values.mean()), float(t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n))


def draw(title: str, rows: list[tuple[str, float, float, bool]], path: Path) -> None:
    """Draw one row of a dot and its interval for each (label, mean, half-width, highlighted)."""
    figure = Figure(figsize=(7, 0.75 + 0.3 * len(rows)))
    axes = figure.add_axes(
        (0.36, 0.42 / (0.75 + 0.3 * len(rows)), 0.54, 0.3 * len(rows) / (0.75 + 0.3 * len(rows)))
    )
    for place, (_, mean, half, marked) in enumerate(rows):
        colour = BLUE if marked else GREY
        axes.errorbar(mean, -place, xerr=half, fmt="o", color=colour, markersize=6, linewidth=2)
        axes.annotate(
            f"{mean:.1f}",
            (1.02, -place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=9,
        )
    axes.set_yticks([-place for place in range(len(rows))], [row[0] for row in rows], fontsize=9)
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    axes.margins(x=0.12)
    axes.set_xlabel("accuracy, % (95 % interval)", fontsize=8, color="#555555")
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e5e5e5")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.text(0.01, 0.985, title, fontsize=9, va="top", color="#333333")
    figure.savefig(path, metadata={"Date": None})


def main(folder: Path) -> None:
    """Draw all figures into a folder."""
    mpl.rcParams.update({"svg.hashsalt": "fedshot", "svg.fonttype": "none"})
    folder.mkdir(parents=True, exist_ok=True)
    for name, (title, rows, marked) in FIGURES.items():
        lines = []
        for label, cell in rows:
            mean, half = cell if isinstance(cell, tuple) else interval(
                np.mean(list(scores(cell).values()), axis=0)
            )  # fmt: skip
            lines.append((label, mean, half, isinstance(cell, str) and f"/{marked}" in cell))
        if name == "seeds":
            for label, row in (("MI-Adv", "mi-adv"), ("MI", "mi")):
                found = scores(f"{FC100}/{row}.noniid-5")
                lines += [
                    (f"FedFSL-{label}, seed {s}", *interval(v), False) for s, v in found.items()
                ]
                mean = np.mean(list(found.values()), axis=0)
                lines.append((f"FedFSL-{label}, all seeds", *interval(mean), True))
        draw(title, lines, folder / f"{name}.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
