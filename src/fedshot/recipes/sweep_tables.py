"""The table of a sweep, for terminals, CSV and JSON, and its HTML page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias

from rich.table import Table

from fedshot.core import storage
from fedshot.core.text import count, joined, percent, printable
from fedshot.recipes.sweep_runner import Point, Sweep
from fedshot.reports import Series, charts
from fedshot.reports.curves import mean_over_seeds
from fedshot.reports.figures import FigureBlock
from fedshot.reports.markup import render
from fedshot.reports.page import scripts
from fedshot.reports.significance import untrained
from fedshot.reports.table import add_row, grid

Rows: TypeAlias = Sequence[Mapping[str, Any]]
"""A table as values, as `rows` returns it."""

_NUMBERS = ("validation ± 95 %", "s.d.", "seeds", "test ± 95 %", "state")
_CURVES = 7  # points whose validation curves are drawn, the first of the ranking


def rows(sweep: Sweep) -> list[dict[str, Any]]:
    """Return the table of a sweep as values: ranked points first, None for unknown values.

    Accuracies are in [0, 1]. `interval` is the half-width of the 95 % interval over validation
    episodes, the mean over seeds; `deviation` the standard deviation over seeds. The test is that
    of the chosen point.
    """
    ranking, chosen, test = sweep.ranking, sweep.chosen, sweep.test()
    others = [one for one in sweep.points.values() if one not in ranking]
    return [
        {
            "rank": rank,
            "point": point.key,
            "chosen": point is chosen,
            **{path: point.options.get(path) for path in sweep.short},
            "validation": fmean(point.accuracies) if rank else None,
            "interval": _interval(point) if rank else None,
            "deviation": stdev(point.accuracies) if rank and sweep.seeds > 1 else None,
            "seeds": len(point.trials),
            "seconds": sum(one.get("seconds", 0.0) for one in point.trials),
            "test": test.accuracy if test and point is chosen else None,
            "test_interval": test.interval if test and point is chosen else None,
            "state": _state(point, is_chosen=point is chosen),
        }
        for rank, point in [*enumerate(ranking, 1), *((None, one) for one in others)]
    ]


def table(sweep: Sweep, found: Rows) -> Table:
    """Return the table for a terminal; `found` are the sweep's `rows`."""
    names = sweep.short
    made = grid(("", *names.values(), *_NUMBERS), (*names.values(), "state"), caption=notes(sweep))
    for row in found:
        add_row(made, [text for _, text in _cells(row, names)])
    return made


def notes(sweep: Sweep) -> list[str]:
    """Return sentences that explain the table."""
    chosen, ranked = sweep.chosen, len(sweep.ranking)
    found = [
        f"{ranked} of {count(len(sweep.points), 'point')} finished, ranked by validation accuracy "
        f"in percent: mean over {count(sweep.seeds, 'seed')}, with the mean half-width of the 95 % "
        "interval over episodes. s.d. is over seeds. The best of many validation accuracies is "
        "optimistic; the test is a fair estimate.",
    ]
    if (test := sweep.test()) and test.by_seed:
        found.append(
            f"The interval of the test is over episodes; its s.d. over seeds is "
            f"{100 * stdev(test.by_seed):.2f} points."
        )
    if all(point.diverged for point in sweep.points.values()):
        found.append("Training diverged in every point, so none is tested.")
    elif chosen is None:
        found.append("Once every point has finished, only the first is tested.")
    earlier = [p for p in sweep.points.values() if p is not chosen and sweep.is_tested(p)]
    if earlier:
        found.append(
            f"{count(len(earlier), 'other point was', 'other points were')} ranked first and "
            "tested before the sweep had all these points."
        )
    return found


def write(sweep: Sweep, found: Rows) -> list[Path]:
    """Write table.csv, table.json and index.html into the sweep's folder; return their paths.

    `found` are the sweep's `rows`.
    """
    lines = io.StringIO()
    writer = csv.DictWriter(lines, list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in found)
    texts = {"table.csv": lines.getvalue().encode(), "table.json": as_json(found).encode(),
             "index.html": _page(sweep, found)}  # fmt: skip
    for name, text in texts.items():
        storage.write_bytes(sweep.folder / name, text, sync=False)
    return [sweep.folder / name for name in texts]


def _page(sweep: Sweep, found: Rows) -> bytes:
    """Return the HTML page: the table, and figures of the validation accuracy."""
    names, curves = sweep.short, list(_curves(sweep))
    colours = {one.label: i for i, one in enumerate(curves)}
    against = [
        (name, charts.points(name, [(row[path], row["validation"], row["interval"])
                                    for row in found if row["rank"] and row[path] is not None]))
        for path, name in names.items()
    ]  # fmt: skip
    blocks = [
        FigureBlock(
            "against", f"Validation accuracy against {joined(list(names.values()))}",
            "Each dot is a point of the sweep: the mean over seeds, with the 95 % interval over "
            "validation episodes. The points also differ in the other swept options.", against,
        ),
        FigureBlock(
            "curves", "Validation accuracy during training",
            "Accuracy on validation episodes, mean over seeds, of the first points of the ranking.",
            [("rounds", charts.curves(curves, {}, "rounds", colours))],
        ),
    ]  # fmt: skip
    return render(
        "sweep.html",
        title=f"Sweep {sweep.folder.name}",
        notes=notes(sweep),
        head=("rank", *names.values(), *_NUMBERS),
        rows=[_cells(row, names) for row in found],
        blocks=blocks if sweep.ranking else [],
        **scripts(),
    )


def as_json(found: Rows) -> str:
    """Return the table of a sweep, `rows`, as JSON."""
    return json.dumps(found, indent=1) + "\n"


def _curves(sweep: Sweep) -> Iterator[Series]:
    """Yield the validation curves of the first points of the ranking, averaged over seeds."""
    for point in sweep.ranking[:_CURVES]:
        seen = [
            {round: (value, half) for round, value, half in one["validation"]}
            for one in point.trials
        ]
        yield Series.measured(sweep.label(point), mean_over_seeds(seen), (), "validation")


def _interval(point: Point) -> float:
    return fmean(half for one in point.trials for round, _, half in one["validation"]
                 if round == one["round"])  # fmt: skip


def _state(point: Point, *, is_chosen: bool) -> str:
    if point.failed:
        return f"failed: {printable(point.failed)}"
    if point.running:
        return ", ".join(f"seed {seed}: {round}/{rounds}"
                         for seed, (round, rounds) in sorted(point.running.items()))  # fmt: skip
    if point.diverged:
        return f"diverged: {printable(point.diverged)}"
    found = ["chosen"] if is_chosen else [] if point.trials else ["waiting"]
    return "; ".join([*found, *untrained([one["round"] for one in point.trials])])


def _cells(row: Mapping[str, Any], names: Mapping[str, str]) -> list[tuple[Any, str]]:
    """Return the entries of a table row as (value to sort by, text).

    `names` is `Sweep.short`: key path of each swept option -> its short name.
    """
    accuracy, test, deviation = row["validation"], row["test"], row["deviation"]
    return [
        (row["rank"] or "", str(row["rank"] or "")),
        *((_cell(row[path]), printable(_cell(row[path]))) for path in names),
        (accuracy or "", "" if accuracy is None else percent(accuracy, row["interval"])),
        (deviation or "", "" if deviation is None else f"{100 * deviation:.2f}"),
        (row["seeds"], str(row["seeds"])),
        (test or "", "" if test is None else percent(test, row["test_interval"])),
        (row["state"], row["state"]),
    ]


def _cell(value: Any) -> Any:
    return "" if value is None else json.dumps(value) if isinstance(value, list | dict) else value
