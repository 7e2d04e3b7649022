"""The comparison as HTML: one row for each method, its interval drawn, sorted by a click."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedshot.reports.markup import e, framed
from fedshot.reports.significance import ComparisonRow
from fedshot.reports.table import COLUMNS, caption, cells, remark, sections

_SHORT = 18  # letters of a name that stay on one line


def standing(rows: Sequence[ComparisonRow]) -> str:
    """Return the table and what its figures are."""
    scale = _scale(rows)
    head = "".join(_head(name) for name in COLUMNS)
    bodies = "".join(_body(part, rows, scale) for part in sections(rows))
    floors = [row.accuracy for row in rows if row.floor]
    line = " The thin upright line is the best floor." if floors else ""
    drawn = f"Bars run from {scale[0]} to {scale[1]} %: the interval, and the mean in it.{line}"
    return (
        framed(f"<thead><tr>{head}</tr></thead>{bodies}", kind="sortable", name="Comparison")
        + f'<p class="small">{e(caption(rows))} {e(drawn)}</p>'
    )


def _head(column: str) -> str:
    words = "accuracy, %" if column.startswith("accuracy") else column
    if column == "note":
        return f'<th scope="col" class="note">{e(words)}</th>'
    kind = ' class="text"' if column == "method" else ""
    return f'<th scope="col" aria-sort="none"{kind}><button type="button">{e(words)}</button></th>'


def _body(
    part: Sequence[ComparisonRow], rows: Sequence[ComparisonRow], scale: tuple[int, int]
) -> str:
    floors = part[0].floor
    title = f'<tr class="section"><td colspan="{len(COLUMNS)}">floors</td></tr>'
    inside = "".join(_row(row, rows, scale) for row in part)
    between = title if floors and len(part) < len(rows) else ""
    kind = ' class="floors"' if floors else ""
    return f"<tbody{kind}>{between}{inside}</tbody>"


def _row(row: ComparisonRow, rows: Sequence[ComparisonRow], scale: tuple[int, int]) -> str:
    label, accuracy, *numbers, _ = cells(row, rows)
    mean, _, half = accuracy.partition(" ± ")
    values = (row.episodes, row.seeds, row.bytes_down, row.bytes_up, row.seconds)
    short = ' class="short"' if len(label) <= _SHORT else ""
    said = remark(row, rows)
    note = "; ".join(
        filter(None, (said and f"<strong>{e(said)}</strong>", row.note and e(row.note)))
    )
    return (
        f'<tr><th scope="row"{short} data-value="{e(label)}">{e(label)}</th>'
        f'<td class="accuracy" data-value="{row.accuracy!r}">{mean} <span>± {half}</span>'
        f"{_bar(row, rows, scale)}</td>"
        + "".join(
            f'<td data-value="{value!r}" data-label="{e(column)}">{e(number)}</td>'
            for column, value, number in zip(COLUMNS[2:-1], values, numbers, strict=True)
        )
        + f'<td class="note">{note}</td></tr>'
    )


def _bar(row: ComparisonRow, rows: Sequence[ComparisonRow], scale: tuple[int, int]) -> str:
    """Return the interval as a bar over the scale, the mean as a dot; the best floor as a line."""

    def at(share: float) -> str:
        return f"{100 * (100 * share - scale[0]) / (scale[1] - scale[0]):.2f}%"

    low, high = max(row.accuracy - row.interval, 0.0), min(row.accuracy + row.interval, 1.0)
    floors = [other.accuracy for other in rows if other.floor]
    line = f'<i class="floor" style="left:{at(max(floors))}"></i>' if floors else ""
    wide = f"{100 * 100 * (high - low) / (scale[1] - scale[0]):.2f}%"
    return (
        f'<span class="range" aria-hidden="true">{line}<i style="left:{at(low)};width:{wide}"></i>'
        f'<b style="left:{at(row.accuracy)}"></b></span>'
    )


def _scale(rows: Sequence[ComparisonRow]) -> tuple[int, int]:
    """Return whole percents that hold all intervals, and differ."""
    lows = (100 * (row.accuracy - row.interval) for row in rows)
    highs = (100 * (row.accuracy + row.interval) for row in rows)
    low = min(max(math.floor(min(lows)), 0), 99)
    return low, max(min(math.ceil(max(highs)), 100), low + 1)
