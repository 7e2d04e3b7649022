"""Ten clients hold 120 synthetic characters; recognise 50 others from one example each.

    python examples/glyphs.py --out runs/demo

Trains each client alone (FSL-local) and all together (FL-Proto), each with three seeds, on
characters of 20 x 20 pixels that fedshot draws itself. Prints them beside two baselines, raw pixels
and an untrained encoder, and writes OUT/report.html. Started again after an interruption, it
repeats no finished round.

The step size was chosen on the 30 validation characters; the 50 novel ones chose nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from fedshot import reports
from fedshot.config.load import Config
from fedshot.core.console import print_in_any_encoding
from fedshot.evaluation.episodic_test import score
from fedshot.evaluation.raw_baselines import pixel_logits
from fedshot.protocol.method import predict_at_server
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

METHODS: dict[str, dict[str, Any]] = {
    "FSL-local": {"name": "fsl_local", "learner_name": "proto"},
    "FL-Proto": {"name": "fl_proto"},
}
SEEDS = (0, 1, 2)
LOOK = (0, 5, 10)  # rounds drawn in the curve; none of them chooses anything


def settings(method: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return one run's settings; what is not said has its default."""
    return {
        "name": f"{method['name']}-{seed}",
        "seed": seed,
        "data": {"name": "glyphs"},
        "partition": {"name": "classes", "clients": 10},
        "episode": {"way": 5, "shot": 1, "query": 5},
        "model": {"backbone": {"name": "conv4", "width": 32}},
        "method": method | {"optimizer": {"lr": 0.01}},
        "run": {"rounds": LOOK[-1], "validate_every": 5},
        "test": {"way": 5, "shot": 1, "query": 15, "episodes": 400, "validation_episodes": 100},
    }


def train(label: str, seed: int, folder: Path) -> Experiment:
    """Train one method with one seed; for the first seed, measure new characters on the way."""
    config = Config.of(settings(METHODS[label], seed))
    experiment = Experiment(PreparedRun(config), folder / config.name)
    for record in experiment.run():
        if record.round not in LOOK:
            continue
        print(f"{label}, seed {seed}: round {record.round} of {LOOK[-1]}", file=sys.stderr)
        if seed == SEEDS[0]:
            found = experiment.evaluate(experiment.prepared.test)
            point = [record.round, found.accuracy, found.interval]
            with (experiment.folder / "curve.jsonl").open("a") as file:
                file.write(json.dumps(point) + "\n")
    if not (experiment.folder / "result.json").exists():
        experiment.result()
    return experiment


def curve(label: str, run: reports.Run) -> reports.Series:
    """Return the accuracies that `train` measured on the way."""
    lines = (run.folder / "curve.jsonl").read_text().splitlines()
    points = {round: (round, accuracy, half) for round, accuracy, half in map(json.loads, lines)}
    return reports.Series.measured(label, list(points.values()), [run])


def baselines(experiment: Experiment) -> list[reports.ComparisonRow]:
    """Return what no training reaches: raw pixels, and the encoder before round 1."""
    episodic_test = experiment.prepared.test
    pixels = score(predict_at_server(pixel_logits, episodic_test.eval_episodes), episodic_test)
    untrained = experiment.evaluate_untrained(episodic_test)
    return [
        reports.ComparisonRow("raw pixels", pixels, baseline=True, note="nearest class mean"),
        reports.ComparisonRow(
            "untrained encoder", untrained, baseline=True, note="FL-Proto at round 0"
        ),
    ]


def main() -> int:
    """Train, print, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    out = parser.parse_args().out
    print_in_any_encoding()
    console = Console()
    rows, groups, curves, views = [], {}, [], {}
    for label in METHODS:
        made = [train(label, seed, out) for seed in SEEDS]
        seen = [
            reports.Run.read(experiment.folder, f"{label}, seed {seed}")
            for seed, experiment in zip(SEEDS, made, strict=True)
        ]
        rows.append(reports.ComparisonRow.of_runs(label, seen))
        groups[label] = seen
        curves.append(curve(label, seen[0]))
        views[label] = reports.data_views(seen[0].folder)
        if label == "FL-Proto":
            below = baselines(made[0])
    rows += below
    console.print(reports.comparison(rows))
    page = out / "report.html"
    reports.write_page(
        page,
        "Five new characters from one example each",
        rows,
        groups,
        curves,
        views,
        [
            "Each of ten clients holds 12 of 120 synthetic characters that fedshot draws itself, "
            "20 by 20 pixels, 20 drawings of each. The test asks for five of 50 other characters, "
            "which no client trained on. This is a check that everything works and that training "
            "pays, not a benchmark."
        ],
    )
    console.print(f"The page: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
