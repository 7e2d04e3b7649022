"""The comparison table for the terminal, as text and as JSON; the baselines come last."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedshot.core.text import megabytes, percent, printable, seconds
from fedshot.reports.significance import ComparisonRow, against_baseline

COLUMNS = ("method", "accuracy ± 95 %", "episodes", "seeds", "MB down", "MB up", "seconds", "note")


def comparison(rows: Sequence[ComparisonRow]) -> Table:
    """Return the table for a terminal, with the notes below it so that it fits 80 columns."""
    shown = [(row, cells(row, rows)) for row in rows]
    notes = [f"{printable(row.label)}: {note}." for row, (*_, note) in shown if note]
    text = Text("\n".join([*notes, caption(rows)]))
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=text,
        caption_justify="left",
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    for name in COLUMNS[:-1]:
        left = name == "method"
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=True)
    for section in sections(rows):
        for row in section:
            # Text, not str: rich would interpret "[red]" in a label as markup.
            table.add_row(*(Text(cell) for cell in cells(row, rows)[:-1]))
        table.add_section()
    return table


def as_text(rows: Sequence[ComparisonRow], width: int = 110) -> str:
    """Return the table as plain text, without colours."""
    return plain_text(comparison(rows), width)


def plain_text(table: Table, width: int) -> str:
    """Return a table as plain text of `width` characters, also in a notebook."""
    out = io.StringIO()
    Console(
        file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False
    ).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n") + "\n"


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
    """Return a warning if a row does not beat the best baseline, or has other episodes; else ""."""
    found = []
    difference = against_baseline(row, rows)
    if difference and difference.outcome != "above":
        verb = "below" if difference.outcome == "below" else "does not beat"
        found.append(f"{verb} {printable(difference.other.label)} ({difference})")
    if row.tasks and rows[0].tasks and row.tasks != rows[0].tasks:
        found.append(f"other test episodes than {printable(rows[0].label)}")
    return "; ".join(found)


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
            "of its difference to the best one, paired by episode, lies above 0."
        )
    parts.append("1 MB is 1,000,000 bytes, all clients together.")
    return " ".join(parts)


def _values(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> dict[str, object]:
    found = against_baseline(row, rows)
    names = ("accuracy", "interval", "episodes", "seeds", "bytes_down", "bytes_up", "seconds",
             "tasks", "note")  # fmt: skip
    values = {name: getattr(row, name) for name in names}
    against = found and {
        "floor": found.other.label,
        **{name: getattr(found, name) for name in ("difference", "interval", "paired", "outcome")},
    }
    return {"label": row.label, "floor": row.baseline, **values, "against_floor": against}
