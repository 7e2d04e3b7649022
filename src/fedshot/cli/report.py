"""The commands that read runs, `report`, `status` and `compare`: each returns an exit code.

`compare` also reads cells of recipes: a cell is one row of a recipe's table in one column.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from fedshot import reports
from fedshot.core.console import say, tell
from fedshot.core.errors import ConfigError
from fedshot.core.text import joined, printable
from fedshot.recipes import results


def report(options: argparse.Namespace) -> int:
    """Write one HTML page about some runs."""
    _once(options.folders)
    groups = reports.grouped([reports.Run.read(folder) for folder in options.folders])
    rows = [
        reports.ComparisonRow.of_runs(label, runs)
        for label, runs in groups.items()
        if all(run.result for run in runs)
    ]
    rows += reports.baselines(groups)
    views = {}
    if not options.without_data:
        for label, runs in groups.items():
            tell(f"{printable(label)}: looking at its data and model")
            views[label] = reports.data_views(runs[0].folder, options.data_dir)
    path = options.to or (
        options.folders[0] / "report.html" if len(options.folders) == 1 else Path("report.html")
    )
    names = joined([printable(label) for label in groups])
    title = options.title or (names if len(groups) < 4 else f"{len(options.folders)} runs compared")
    notes = list(dict.fromkeys(view.note for view in views.values() if view.note))
    reports.write_page(path, title, rows, groups, views=views, notes=notes)
    say(str(path))
    return 0


def status(options: argparse.Namespace) -> int:
    """Print the progress of runs."""
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
    """Print a table of runs or cells, and how the first row differs from each other row."""
    _once(options.folders)
    if len(options.folders) < 2:
        (one,) = options.folders
        if not one.exists():
            raise ConfigError(f"{one} does not exist. Name two runs, or two cells of recipes.")
        raise ConfigError(f"{one} is the only one; a comparison needs two.")
    files = [path for path in options.folders if path.is_file()]
    if files and len(files) < len(options.folders):
        raise ConfigError(
            f"{files[0]} is a file, and others are folders. Name runs, or cells of recipes."
        )
    found, baselines = (_cells(files), []) if files else _rows(options.folders)
    rows = [*(row for row, _ in found), *baselines]
    (first, data), *others = found
    on_others = [f"{printable(row.label)} on {of}" for row, of in others if of != data]
    if on_others:
        tell(
            f"warning: these are results on different data, {printable(first.label)} on {data}, "
            f"{joined(on_others)}. Their accuracies do not say which method is better."
        )
    differences = [(reports.compare(first, other), of == data) for other, of in others]
    if options.json:
        say(json.dumps({"rows": json.loads(reports.as_json(rows)), "differences": [
            {"of": first.label, "to": v.other.label, "difference": v.difference,
             "interval": v.interval, "paired": v.paired, "covers_seeds": v.seeds,
             "same_data": same, "outcome": v.outcome if same else None}
            for v, same in differences
        ]}))  # fmt: skip
        return 0
    say(reports.as_text(rows, Console().width))
    for difference, same in differences:
        if same:
            say(reports.describe(first, difference))
        else:
            say(f"{first.name} and {difference.other.name} are not ranked: their data differ.")
    return 0


def _rows(
    folders: Sequence[Path],
) -> tuple[list[tuple[reports.ComparisonRow, str]], list[reports.ComparisonRow]]:
    """Return pairs (table row, name of its data), and the rows of baselines.

    Runs that differ only in the seed share a row, but if all do, each gets its own row.
    """
    runs = [reports.Run.read(folder) for folder in folders]
    groups = reports.grouped(runs)
    if len(groups) == 1:  # only the seeds differ: compare them with each other
        groups = reports.ungrouped(runs)
    rows = [
        (reports.ComparisonRow.of_runs(label, seeds), seeds[0].data)
        for label, seeds in groups.items()
    ]
    return _named(rows), reports.baselines(groups)


def _cells(files: Sequence[Path]) -> list[tuple[reports.ComparisonRow, str]]:
    """Return a pair (table row, name of its data) for each file of a finished cell.

    If the cells are from several tables, each label begins with the table's name.
    """
    held = [results.read(path) for path in files]
    tables = [f"{one.recipe} {one.variant}" for one in held]
    rows = [results.row_of(one) for one in held]
    if len(set(tables)) > 1:
        rows = [
            replace(row, label=f"{table} {row.label}")
            for table, row in zip(tables, rows, strict=True)
        ]
    data = [(one.first["data"]["name"], one.first["data"]["digest"]) for one in held]
    return _named(list(zip(rows, data, strict=True)))


def _named(
    found: Sequence[tuple[reports.ComparisonRow, tuple[str, str]]],
) -> list[tuple[reports.ComparisonRow, str]]:
    """Return each row with the name of its data, followed by a hash if names are ambiguous.

    A row counts as on the first row's data if both have the same test episodes, or if the names of
    the data are equal and a hash is unknown.
    """
    (first, data), *_ = found
    own = [
        data
        if (row.tasks and row.tasks == first.tasks)
        or (of[0] == data[0] and not (of[1] and data[1]))
        else of
        for row, of in found
    ]
    several = len({name for name, _ in own}) < len(set(own))
    return [
        (row, f"{printable(name)} ({digest[:12]})" if several else printable(name))
        for (row, _), (name, digest) in zip(found, own, strict=True)
    ]


def _once(folders: Sequence[Path]) -> None:
    """Raise ConfigError if a folder is named twice."""
    twice = {str(folder) for folder in folders if list(folders).count(folder) > 1}
    if twice:
        raise ConfigError(f"{', '.join(sorted(twice))} is named twice. Name each once.")
