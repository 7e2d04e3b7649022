"""Draw the figures of docs/lessons.md from the files below results/.

    python benchmarks/findings.py docs/findings

A figure shows, for each row, the mean test accuracy of a cell and its 95 % interval over episodes,
as the tables of results do; seeds of a cell are averaged episode by episode.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedshot.recipes.results import CellResult, read
from fedshot.reports.figure_export import INK, PALETTE, drawing

RESULTS = Path(__file__).parents[1] / "results"

# Runs that are not cells of a recipe; docs/lessons.md has their commands.
SAME_STEP = (69.5, 0.6)

Row = tuple[str, str | tuple[float, float]]
FC100, CIFAR, SHORT = "fedfsl-fc100/head-tune4", "cifar-fs/paper-tune4", "cifar-fs/small"
HUFF, FRL, OWN = "f2l-huffpost/paper", "frl-e1/paper", "pfedfsl-table1/small"
FROZEN = "encoder-huffpost/small-tune4"
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
        ("FRL, distance-based (84 GB)", f"{FRL}/proto.cifar-iid"),
        ("FRL, linear", f"{FRL}/linear.cifar-iid"),
        ("FedAvg, ridge regression (0.6 GB)", f"{FRL}/probe-ridge.cifar-iid"),
        ("FedAvg and class means", f"{FRL}/probe-mean.cifar-iid"),
        ("one-shot FL", f"{FRL}/one-shot.cifar-iid"),
        ("fine-tuning by FedAvg", f"{FRL}/finetune.cifar-iid"),
    ], "probe-"),
    "personal": ("five classes of five images at each client; CIFAR-100 (upper) and MNIST", [
        ("pFedFSL, CIFAR-100", f"{OWN}/pfedfsl-paper.cifar100-n5-k5-path"),
        ("Ditto, CIFAR-100", f"{OWN}/ditto.cifar100-n5-k5-path"),
        ("FedAvg, CIFAR-100", f"{OWN}/fedavg.cifar100-n5-k5-path"),
        ("pFedFSL, MNIST", f"{OWN}/pfedfsl-paper.mnist-n5-k5-path"),
        ("Ditto, MNIST", f"{OWN}/ditto.mnist-n5-k5-path"),
        ("FedAvg, MNIST", f"{OWN}/fedavg.mnist-n5-k5-path"),
    ], "fedavg."),
    "norm": ("CIFAR-100, groups of ten, shards, FRL with GPAL: one training, two ways to test", [
        ("batch norm of each client", f"{FRL}/gpal-own.cifar-noniid"),
        ("batch norm of the group", f"{FRL}/gpal.cifar-noniid"),
    ], "gpal-own"),
    "seeds": ("FC100, Dirichlet, 5-shot, 40 rounds: each seed alone, and all", [], ""),
    "encoder": ("HuffPost, IID, 5-shot", [
        ("FedNCM on frozen features, 1 round", f"{FROZEN}/fedncm.iid-5"),
        ("FedAvg and class means on them, 10", f"{FROZEN}/fedavg-probe.iid-5"),
        ("FL-Proto on them, 10 rounds", f"{FROZEN}/fl-proto.iid-5"),
        ("FL-Proto from scratch, 200 rounds", f"{HUFF}/fl-proto.iid-5"),
    ], "fedncm"),
}  # fmt: skip


def cell(name: str) -> CellResult:
    """Return a cell of the results, named RECIPE/VARIANT/ROW.COLUMN."""
    return read(RESULTS / f"{name}.json")


def percent(score: Mapping[str, Any]) -> tuple[float, float]:
    """Return the accuracy and the half-width of its interval in percent."""
    return 100 * score["accuracy"], 100 * score["interval"]


def draw(title: str, rows: list[tuple[str, float, float, bool]]) -> str:
    """Return an SVG with a dot and its interval for each (label, mean, half-width, marked)."""

    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        for place, (_, mean, half, marked) in enumerate(rows):
            colour = PALETTE[0] if marked else INK
            axes.errorbar(mean, -place, xerr=half, fmt="o", color=colour, markersize=6, linewidth=2)
            at = (1.02, -place)
            axes.annotate(f"{mean:.1f}", at, xycoords=("axes fraction", "data"), va="center")
        axes.set_yticks([-place for place in range(len(rows))], [row[0] for row in rows])
        axes.set_ylim(-len(rows) + 0.4, 0.6)
        axes.margins(x=0.12)
        axes.set_xlabel("accuracy, % (95 % interval)")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
        figure.suptitle(title, x=0.01, ha="left", fontsize=9)

    return drawing(title, (7, 0.75 + 0.3 * len(rows)), fill)


def main(folder: Path) -> None:
    """Draw all figures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (title, rows, marked) in FIGURES.items():
        lines = []
        for label, of in rows:
            mean, half = of if isinstance(of, tuple) else percent(cell(of).score)
            lines.append((label, mean, half, isinstance(of, str) and f"/{marked}" in of))
        if name == "seeds":
            for label, row in (("MI-Adv", "mi-adv"), ("MI", "mi")):
                every = cell(f"{FC100}/{row}.noniid-5")
                for seed, one in sorted(every.seeds.items()):
                    alone = percent(replace(every, seeds={seed: one}).score)
                    lines.append((f"FedFSL-{label}, seed {seed}", *alone, False))
                lines.append((f"FedFSL-{label}, all seeds", *percent(every.score), True))
        (folder / f"{name}.svg").write_text(draw(title, lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
