"""The comparison table for terminals, pages and programs; the baselines come last."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedshot.config.options import shown as as_yaml
from fedshot.core.text import count, joined, megabytes, percent, printable, seconds
from fedshot.reports.significance import ComparisonRow, against_baseline, incomparable

COLUMNS = ("method", "accuracy ± 95 %", "episodes", "seeds", "MB down", "MB up", "seconds", "note")

_UNLIKE = 3  # maximum number of settings shown that differ between two rows


def comparison(rows: Sequence[ComparisonRow]) -> Table:
    """Return the table for a terminal, with the notes below it so that it fits 80 columns.

    A narrower terminal folds its cells.
    """
    notes = [f"{printable(row.label)}: {note}." for row in rows if (note := cells(row, rows)[-1])]
    table = grid(COLUMNS[:-1], left=COLUMNS[:1], caption=[*notes, caption(rows)])
    for section in sections(rows):
        for row in section:
            add_row(table, cells(row, rows)[:-1])
        table.add_section()
    return table


def grid(
    columns: Sequence[str], left: Sequence[str], title: str = "", caption: Sequence[str] = ()
) -> Table:
    """Return an empty table for a terminal; the columns in `left` are aligned to the left.

    Title and caption are `rich.text.Text`, since `rich` reads "[red]" in a `str` as markup.
    """
    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        caption=Text("\n".join(caption)) if caption else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return table


def add_row(table: Table, texts: Iterable[str]) -> None:
    """Add a row of plain texts to a table."""
    table.add_row(*map(Text, texts))


def plain_text(table: Table, width: int) -> str:
    """Return a table as text without colours, `width` characters wide."""
    out = io.StringIO()
    Console(
        file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False
    ).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def as_text(rows: Sequence[ComparisonRow], width: int = 110) -> str:
    """Return the table as plain text."""
    return plain_text(comparison(rows), width) + "\n"


def as_json(rows: Sequence[ComparisonRow]) -> str:
    """Return the table for programs: accuracies in [0, 1], bytes, seconds."""
    return json.dumps([_values(row, rows) for row in rows], indent=1)


def sections(rows: Sequence[ComparisonRow]) -> list[list[ComparisonRow]]:
    """Return the sections of the table that are not empty: methods, then baselines."""
    parts = ([r for r in rows if not r.baseline], [r for r in rows if r.baseline])
    return [part for part in parts if part]


def cells(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> tuple[str, ...]:
    """Return a row's text for each of `COLUMNS`."""
    return (
        printable(row.label),
        percent(row.accuracy, row.interval),
        f"{row.episodes}",
        f"{row.seeds}",
        megabytes(row.bytes_down),
        megabytes(row.bytes_up),
        seconds(row.seconds),
        "; ".join(filter(None, (remark(row, rows), printable(row.note)))),
    )


def remark(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> str:
    """Return a warning about a row, or "".

    It warns if the row does not beat the best baseline, or has other test episodes or was trained
    under other conditions than the first row of `rows`.
    """
    found, first = [], rows[0]
    difference = against_baseline(row, rows)
    if difference and difference.outcome != "above":
        verb = "below" if difference.outcome == "below" else "does not beat"
        found.append(f"{verb} {printable(difference.other.label)} ({difference})")
    if row.tasks and first.tasks and row.tasks != first.tasks:
        apart = incomparable(row, first)
        found.append(
            f"not ranked with {printable(first.label)}: {apart}"
            if apart
            else f"other test episodes than {printable(first.label)}"
        )
    if row.conditions and first.conditions and (unlike := _unlike(row, first)):
        found.append(f"not trained like {printable(first.label)}: {unlike}")
    return "; ".join(found)


def _unlike(row: ComparisonRow, first: ComparisonRow) -> str:
    """Return the conditions of training in which two rows differ; "" if they are alike.

    An option that only one row has counts if it names a component, such as `attack.name`.
    """
    mine, theirs = row.conditions, first.conditions
    found = [
        (key, mine.get(key, "unset"), theirs.get(key, "unset"))
        for key in {**theirs, **mine}
        if key.endswith(".name") or (key in mine and key in theirs)
    ]
    differ = [(key, *map(_written, values)) for key, *values in found if values[0] != values[1]]
    shown = [printable(f"{key} {own} (not {other})") for key, own, other in differ]
    more = f" and {count(len(shown) - _UNLIKE, 'other setting')}" if len(shown) > _UNLIKE else ""
    return f"{joined(shown[:_UNLIKE])}{more}"


def _written(value: object) -> str:
    return value if isinstance(value, str) else as_yaml(value)


def caption(rows: Sequence[ComparisonRow]) -> str:
    """Return the caption of the table, which explains the columns."""
    parts = [
        "Accuracy in percent: mean over test episodes, ± the half-width of its 95 % interval over "
        "episodes."
    ]
    if any(row.tested.own for row in rows):
        parts.append(
            "Where clients are tested on images of their own classes, each client is one episode."
        )
    if any(row.seeds > 1 for row in rows):
        parts.append(
            "Several seeds are evaluated on the same episodes: accuracies are averaged over seeds "
            "for each episode, and the interval is over episodes of that mean. The notes state the "
            "standard deviation over seeds. MB and seconds are means per run."
        )
    if len(sections(rows)) > 1:
        parts.append(
            "The last section holds the baselines. A method beats them only if the 95 % interval "
            "of its difference from the best one, paired by episode, lies above 0."
        )
    parts.append("1 MB is 1,000,000 bytes, all clients together.")
    return " ".join(parts)


def _values(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> dict[str, object]:
    found = against_baseline(row, rows)
    names = ("accuracy", "interval", "episodes", "seeds", "bytes_down", "bytes_up", "seconds",
             "tasks", "note")  # fmt: skip
    values = {name: getattr(row, name) for name in names}
    against = found and {
        "baseline": found.other.label,
        **{name: getattr(found, name) for name in ("difference", "interval", "paired", "outcome")},
    }
    more = {"remark": remark(row, rows), "against_baseline": against}
    return {"label": row.label, "baseline": row.baseline, **values, **more}


def comparison_values(rows: Sequence[ComparisonRow]) -> dict[str, Any] | None:
    """Return the table's values for the page's template, with bars for intervals; None if empty."""
    if not rows:
        return None
    low, high = _scale(rows)
    baselines = [row.accuracy for row in rows if row.baseline]

    def along(share: float) -> str:
        return f"{100 * (100 * share - low) / (high - low):.2f}%"

    def values(row: ComparisonRow) -> dict[str, Any]:
        label, accuracy, *numbers, _ = cells(row, rows)
        mean, _, half = accuracy.partition(" ± ")
        left, right = max(row.accuracy - row.interval, 0.0), min(row.accuracy + row.interval, 1.0)
        exact = (row.episodes, row.seeds, row.bytes_down, row.bytes_up, row.seconds)
        return {
            "label": label,
            "baseline": row.baseline,
            "accuracy": row.accuracy,
            "mean": mean,
            "half": half,
            "left": along(left),
            "width": f"{100 * 100 * (right - left) / (high - low):.2f}%",
            "at": along(row.accuracy),
            "numbers": list(zip(COLUMNS[2:-1], exact, numbers, strict=True)),
            "remark": remark(row, rows),
            "note": row.note,
        }

    bars = f"Bars show the interval and the mean on a scale from {low} to {high} %."
    line = " The thin vertical line is the best baseline." if baselines else ""
    return {
        "columns": [name.replace(" ± 95 %", ", %") for name in COLUMNS],
        "sections": [[values(row) for row in section] for section in sections(rows)],
        "line": along(max(baselines)) if baselines else "",
        "caption": f"{caption(rows)} {bars}{line}",
    }


def _scale(rows: Sequence[ComparisonRow]) -> tuple[int, int]:
    """Return the ends of the bars' scale: two whole percentages that enclose all intervals."""
    lows = (100 * (row.accuracy - row.interval) for row in rows)
    highs = (100 * (row.accuracy + row.interval) for row in rows)
    low = min(max(math.floor(min(lows)), 0), 99)
    return low, max(min(math.ceil(max(highs)), 100), low + 1)
