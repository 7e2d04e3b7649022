"""Ten clients hold the digits 0 to 4; recognise 5 to 9 from one example each.

    python examples/digits.py --out runs/demo

Trains FSL-local, FL-Proto and FedFSL-naive on scikit-learn's handwritten digits (8 x 8 pixels),
each with three seeds, and prints them beside two floors: raw pixels and an untrained encoder.
Writes OUT/report.html. Started again after an interruption, it repeats no finished round.

The width of the encoder, the step size and the number of rounds were chosen by holding out pairs of
the digits 0 to 4; the digits 5 to 9 chose nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from fedshot import reports
from fedshot.config import Config
from fedshot.evaluation import pixel_logits, score
from fedshot.experiment import Experiment, Setting
from fedshot.printing import print_in_any_encoding
from fedshot.protocol import answer_at_server

METHODS: dict[str, dict[str, Any]] = {
    "FSL-local": {"name": "fsl_local", "learner_name": "proto"},
    "FL-Proto": {"name": "fl_proto"},
    "FedFSL-naive": {"name": "fedfsl_naive", "inner": {"lr": 0.1}},
}
SEEDS = (0, 1, 2)
LOOK = (0, 5, 10, 15, 20)  # rounds drawn in the curve; none of them chooses anything


def settings(method: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return one run's settings; what is not said has its default."""
    return {
        "name": f"{method['name']}-{seed}",
        "seed": seed,
        "data": {"name": "digits"},
        "split": {"base": ["0-4"], "novel": ["5-9"]},
        "partition": {"name": "dirichlet", "clients": 10, "alpha": 10.0},
        "episode": {"way": 5, "shot": 1, "query": 10},
        "model": {"backbone": {"name": "mlp", "hidden": [256]}},
        "method": method | {"optimizer": {"lr": 1e-4}},
        "run": {"rounds": LOOK[-1]},
        "test": {"way": 5, "shot": 1, "query": 15, "episodes": 1000},
    }


def train(label: str, seed: int, folder: Path, say: Any) -> Experiment:
    """Train one method with one seed; for the first seed, measure new digits on the way."""
    config = Config.of(settings(METHODS[label], seed))
    experiment = Experiment(Setting(config), folder / config.name)
    for record in experiment.run():
        say(f"{label}, seed {seed}: round {record.round} of {config.run.rounds}")
        if seed == SEEDS[0] and record.round in LOOK:
            found = experiment.answer(experiment.setting.test)
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


def floors(experiment: Experiment) -> list[reports.Row]:
    """Return what no training reaches: raw pixels, and the encoder before round 1."""
    exam = experiment.setting.test
    pixels = score(answer_at_server(pixel_logits, exam.questions), exam)
    untrained = experiment.answer_untrained(exam)
    return [
        reports.Row("raw pixels", pixels, floor=True, note="nearest class mean"),
        reports.Row("untrained encoder", untrained, floor=True, note="FL-Proto at round 0"),
    ]


def main() -> int:
    """Train, print, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    out = parser.parse_args().out
    print_in_any_encoding()
    console = Console()
    rows, groups, curves, looks = [], {}, [], {}
    with console.status("") as status:
        for label in METHODS:
            made = [train(label, seed, out, status.update) for seed in SEEDS]
            seen = [
                reports.Run.read(experiment.folder, f"{label}, seed {seed}")
                for seed, experiment in zip(SEEDS, made, strict=True)
            ]
            rows.append(reports.Row.of_runs(label, seen))
            groups[label] = seen
            curves.append(curve(label, seen[0]))
            looks[label] = reports.look(seen[0].folder)
            if label == "FL-Proto":
                below = floors(made[0])
    rows += below
    console.print(reports.comparison(rows))
    page = out / "report.html"
    reports.write_page(
        page,
        "Five new digits from one example each",
        rows,
        groups,
        curves,
        looks,
        [
            "Ten clients hold the digits 0 to 4 of scikit-learn's handwritten digits, 8 by 8 "
            "pixels each. The test asks for 5 to 9, which no client trained on. Five base classes "
            "teach an encoder little about new ones: this is a check that everything works, not "
            "a benchmark."
        ],
    )
    console.print(f"The page: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
