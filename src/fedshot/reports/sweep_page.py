"""The HTML page of a sweep: its table, and figures of the validation accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedshot.core import storage
from fedshot.reports import charts
from fedshot.reports.curves import Series
from fedshot.reports.figures import FigureBlock
from fedshot.reports.markup import render
from fedshot.reports.page import scripts


def write(
    path: Path,
    *,
    title: str,
    notes: Sequence[str],
    head: Sequence[str],
    rows: Sequence[tuple[bool, Sequence[tuple[Any, str]]]],
    against: Mapping[str, Sequence[tuple[Any, float, float]]],
    curves: Sequence[Series],
) -> None:
    """Write the page.

    Args:
        path: the HTML file.
        title: title of the page.
        notes: paragraphs below the title.
        head: names of the columns of the table.
        rows: for each row whether it is the chosen point, and its cells as (value to sort by,
            text).
        against: swept option -> points as (value, accuracy, half-width of its interval), the last
            two in percent.
        curves: validation curves.
    """
    blocks = []
    if any(against.values()):
        blocks.append(FigureBlock(
            "points", f"Validation accuracy against {', '.join(against)}",
            "Each dot is a point of the sweep: the mean over seeds, with the 95 % interval over "
            "validation episodes. Points also differ in the other options.",
            [(name, charts.points(name, points)) for name, points in against.items()],
        ))  # fmt: skip
    if curves:
        colours = {one.label: i for i, one in enumerate(curves)}
        blocks.append(FigureBlock(
            "curves", "Validation accuracy during training",
            "Accuracy on validation episodes, mean over seeds, of the first points of the ranking.",
            [("rounds", charts.curves(curves, {}, "rounds", colours))],
        ))  # fmt: skip
    storage.deliver(path, render("sweep.html", title=title, notes=notes, head=head, rows=rows,
                                 blocks=blocks, **scripts()))  # fmt: skip
