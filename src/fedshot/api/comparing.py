"""Comparisons and report pages of runs, for Python and for the commands `compare` and `report`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshot import reports
from fedshot.api.listing import Listing
from fedshot.api.training_run import TrainingRun
from fedshot.core.errors import ConfigError, as_path
from fedshot.core.text import joined, printable
from fedshot.recipes import results
from fedshot.reports.significance import incomparable
from fedshot.reports.table import remark

if TYPE_CHECKING:
    import pandas as pd

_WIDTH = 100


@dataclass(frozen=True)
class Comparison:
    """Results side by side, and how the first differs from each of the others.

    Args:
        rows: the results, then the baselines.
        differences: for each result but the first, a pair: the first result minus this one, and why
            the two are not ranked, such as "their data differ"; "" if they are.
        warning: a sentence if some results are on different data; else "".
    """

    rows: tuple[reports.ComparisonRow, ...]
    differences: tuple[tuple[reports.Difference, str], ...]
    warning: str = ""

    @property
    def table(self) -> Listing:
        """The results as rows, with accuracies in [0, 1].

        `difference` is the accuracy of the first row minus that of this row, and
        `difference_interval` the half-width of its 95 % interval. `outcome` says whether the first
        row is "above" or "below" this row; it is "unclear" if the interval includes zero. All three
        are None for the first row, for baselines, and for rows with other data or another test.
        `remark` warns of a row that does not beat the best baseline, or whose test episodes or
        training differ from those of the first row; it is "" for any other.
        """
        held = {id(found.other): found for found, apart in self.differences if not apart}
        names = ("accuracy", "interval", "episodes", "seeds", "bytes_down", "bytes_up", "seconds")
        return Listing([
            {"label": row.label, **{name: getattr(row, name) for name in names},
             "difference": found and found.difference,
             "difference_interval": found and found.interval,
             "outcome": found and found.outcome, "paired": found and found.paired,
             "baseline": row.baseline, "remark": remark(row, self.rows), "note": row.note}
            for row in self.rows for found in [held.get(id(row))]
        ])  # fmt: skip

    @property
    def sentences(self) -> list[str]:
        """Sentences on each difference: its size, and which variation its interval covers.

        The interval covers the variation over episodes and, if both results have several seeds,
        over seeds. For results on different data, or of tests that differ in way, shot or classes,
        the sentence says that they are not ranked.
        """
        first = self.rows[0]
        return [
            f"{first.name} and {found.other.name} are not ranked: {apart}." if apart else
            reports.describe(first, found)
            for found, apart in self.differences
        ]  # fmt: skip

    def to_pandas(self) -> pd.DataFrame:
        """Return `table` as a DataFrame. Raises ConfigError if pandas is not installed."""
        return self.table.to_pandas()

    def to_json(self) -> dict[str, Any]:
        """Return rows and differences as JSON values."""
        return {"rows": json.loads(reports.as_json(self.rows)), "differences": [
            {"of": self.rows[0].label, "to": found.other.label, "difference": found.difference,
             "interval": found.interval, "paired": found.paired, "covers_seeds": found.seeds,
             "not_ranked": apart, "outcome": None if apart else found.outcome}
            for found, apart in self.differences
        ]}  # fmt: skip

    def __str__(self) -> str:
        warning = [self.warning] if self.warning else []
        return "\n".join([reports.as_text(self.rows, _WIDTH), *warning, *self.sentences])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        columns = dict.fromkeys(reports.COLUMNS)
        rows = [dict(zip(columns, reports.cells(row, self.rows), strict=True)) for row in self.rows]
        texts = [*([self.warning] if self.warning else []), *self.sentences]
        return Listing(rows)._repr_html_() + "".join(f"<p>{escape(text)}</p>" for text in texts)


def compare(*runs: TrainingRun | str | os.PathLike[str]) -> Comparison:
    """Compare the first run with each of the others; the result prints as a table.

    Two runs with the same test episodes are compared episode by episode (paired). Runs that differ
    only in the seed share a row, unless that would leave a single row. Results of recipes can be
    compared in the same way: pass their files below `results/`. Each file holds the result of one
    cell, i.e. one row and column of a recipe's table.

    Args:
        runs: two or more runs, or their folders.

    Raises:
        ConfigError: fewer than two runs, or one of them twice.
        CheckpointError: a run is unfinished, or its folder holds no run.

    Example:
        ```python
        print(fs.compare("runs/a", "runs/b"))
        fs.compare("runs/a", "runs/b").to_pandas()
        ```
    """
    for one in runs:
        if isinstance(one, list | tuple):
            raise ConfigError("the runs are in a list. Write fedshot.compare(*runs).")
    return compared([one.path if isinstance(one, TrainingRun) else as_path("runs", one)
                     for one in runs])  # fmt: skip


def compared(paths: Sequence[Path]) -> Comparison:
    """Compare runs, given their folders, or cells of recipes, given their result files.

    A cell is one row and column of a recipe's table. The comparison is that of `compare`.
    """
    check_once(paths)
    if not paths:
        raise ConfigError("no runs are given; expected two runs, or two cells of recipes.")
    if len(paths) < 2:
        (one,) = paths
        if not one.exists():
            raise ConfigError(f"{one} does not exist. Name two runs, or two cells of recipes.")
        raise ConfigError(f"only {one} is given; expected two runs, or two cells of recipes.")
    files = [path for path in paths if path.is_file()]
    if files and len(files) < len(paths):
        raise ConfigError(
            f"{files[0]} is a file, and others are folders. Name only folders of runs, or only "
            "files of recipes' cells."
        )
    found, baselines = (_cells(files), []) if files else _rows(paths)
    (first, data), *others = found
    elsewhere = [f"{printable(row.label)} on {of}" for row, of in others if of != data]
    warning = (
        f"the results are on different data: {printable(first.label)} on {data}, "
        f"{joined(elsewhere)}. Their accuracies do not say which method is better."
    )
    differences = tuple(
        (
            reports.compare(first, other),
            incomparable(first, other) if of == data else "their data differ",
        )
        for other, of in others
    )
    rows = (*(row for row, _ in found), *baselines)
    return Comparison(rows, differences, warning if elsewhere else "")


def write_report(
    folders: Sequence[Path], *, to: Path | None, title: str | None, with_data: bool,
    data_dir: str | None, notify: Callable[[str], None],
) -> Path:  # fmt: skip
    """Write one HTML page about some runs, and return its path.

    Args:
        folders: folders of the runs.
        to: the file; None for report.html, in the run's folder if there is a single run, and
            otherwise in the current folder.
        title: title of the page; None to make one from the runs' labels.
        with_data: whether to load data and models for the figures that need them.
        data_dir: folder of downloaded datasets.
        notify: called with a message before the data of a group of runs are loaded.

    Raises:
        ConfigError: a folder is named twice.
        CheckpointError: a folder holds no run.
    """
    check_once(folders)
    groups = reports.grouped([reports.Run.read(folder) for folder in folders])
    rows = [
        reports.ComparisonRow.of_runs(label, runs)
        for label, runs in groups.items()
        if all(run.result for run in runs)
    ]
    rows += reports.baselines(groups)
    views = {}
    if with_data:
        for label, runs in groups.items():
            notify(f"{printable(label)}: loading its data and model")
            views[label] = reports.data_views(runs[0].folder, data_dir)
    path = to or Path(folders[0] if len(folders) == 1 else "", "report.html")
    names = joined([printable(label) for label in groups])
    title = title or (names if len(groups) < 4 else f"{len(folders)} runs compared")
    notes = list(dict.fromkeys(view.note for view in views.values() if view.note))
    reports.write_page(path, title, rows, groups, views=views, notes=notes)
    return path


def check_once(folders: Sequence[Path]) -> None:
    """Raise ConfigError if a folder is named twice."""
    twice = {str(folder) for folder in folders if list(folders).count(folder) > 1}
    if twice:
        raise ConfigError(f"{', '.join(sorted(twice))} is named twice. Name each once.")


def _rows(
    folders: Sequence[Path],
) -> tuple[list[tuple[reports.ComparisonRow, str]], list[reports.ComparisonRow]]:
    """Return pairs (table row, name of its data), and the rows of the baselines.

    Runs that differ only in the seed share a row, unless that would leave a single row.
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
    """Return a pair (table row, name of its data) for each result file of a recipe's cell.

    A cell is one row and column of a recipe's table. If the cells are from several tables, each
    label begins with the table's name.
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
    """Return each row with the name of its data; `found` pairs a row with (name, hash) of its data.

    A row is given the first row's data in two cases: both rows have the same test episodes, or
    their data have the same name and one of the two hashes is unknown.

    If different data then share a name, every name is followed by the first characters of the
    data's hash.
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
