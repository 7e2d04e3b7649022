"""The commands that read finished runs: a page of them, and a comparison in the terminal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from fedshot import reports
from fedshot.errors import ConfigError
from fedshot.printing import say, tell
from fedshot.recipes import results
from fedshot.words import joined, printable


def report(options: argparse.Namespace) -> int:
    """Write the page of some runs."""
    _once(options.folders)
    groups = reports.grouped([reports.Run.read(folder) for folder in options.folders])
    rows = [
        reports.Row.of_runs(label, runs)
        for label, runs in groups.items()
        if all(run.result for run in runs)
    ]
    rows += reports.baselines(groups)
    looks = {}
    if not options.without_data:
        for label, runs in groups.items():
            tell(f"{printable(label)}: looking at its data and model")
            looks[label] = reports.look(runs[0].folder, options.data_dir)
    path = options.to or (
        options.folders[0] / "report.html" if len(options.folders) == 1 else Path("report.html")
    )
    names = joined([printable(label) for label in groups])
    title = options.title or (names if len(groups) < 4 else f"{len(options.folders)} runs compared")
    notes = list(dict.fromkeys(look.note for look in looks.values() if look.note))
    reports.write_page(path, title, rows, groups, looks=looks, notes=notes)
    say(str(path))
    return 0


def status(options: argparse.Namespace) -> int:
    """Print how runs are getting on."""
    runs: dict[Path, None] = {}
    for folder in options.folders:
        below = list(reports.runs_below(folder))
        if not below:
            raise ConfigError(
                f"there is no run in {folder}. Name the folder of a run, or one that holds some."
            )
        runs |= dict.fromkeys(below)
    all_of = [reports.Status.of(run) for run in runs]
    if options.json:
        say(json.dumps([asdict(one) for one in all_of]))
    else:
        say(reports.as_table(all_of))
    return 0


def compare(options: argparse.Namespace) -> int:
    """Print the comparison of some runs or cells, and what the first is to each of the others."""
    _once(options.folders)
    if len(options.folders) < 2:
        (one,) = options.folders
        if not one.exists():
            raise ConfigError(f"{one} does not exist. Name two runs, or two cells of recipes.")
        raise ConfigError(f"{one} is one; a comparison needs two.")
    files = [path for path in options.folders if path.is_file()]
    if files and len(files) < len(options.folders):
        raise ConfigError(
            f"{files[0]} is a file, and others are folders. Name runs, or cells of recipes."
        )
    rows = _cells(files) if files else _rows(options.folders)
    verdicts = [reports.compare(rows[0], other) for other in rows[1:] if not other.floor]
    if options.json:
        say(json.dumps({"rows": json.loads(reports.as_json(rows)), "differences": [
            {"of": rows[0].label, "to": v.other.label, "difference": v.difference,
             "interval": v.interval, "paired": v.paired, "covers_seeds": v.seeds,
             "outcome": v.outcome}
            for v in verdicts
        ]}))  # fmt: skip
        return 0
    say(reports.as_text(rows, Console().width))
    for verdict in verdicts:
        say(reports.told(rows[0], verdict))
    return 0


def _rows(folders: Sequence[Path]) -> list[reports.Row]:
    runs = [reports.Run.read(folder) for folder in folders]
    groups = reports.grouped(runs)
    if len(groups) == 1:  # seeds of one thing, which their reader wants apart
        groups = reports.apart(runs)
    rows = [reports.Row.of_runs(label, seeds) for label, seeds in groups.items()]
    return rows + reports.baselines(groups)


def _cells(files: Sequence[Path]) -> list[reports.Row]:
    """Return the rows of finished cells, each with its table where there are several."""
    held = [results.read(path) for path in files]
    tables = [f"{one.recipe} {one.variant}" for one in held]
    rows = [results.row_of(one) for one in held]
    if len(set(tables)) == 1:
        return rows
    return [
        replace(row, label=f"{table} {row.label}") for table, row in zip(tables, rows, strict=True)
    ]


def _once(folders: Sequence[Path]) -> None:
    """Raise ConfigError where a place is named twice."""
    twice = {str(folder) for folder in folders if list(folders).count(folder) > 1}
    if twice:
        raise ConfigError(f"{', '.join(sorted(twice))} is named twice. Name each once.")
