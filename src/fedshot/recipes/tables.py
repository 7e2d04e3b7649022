"""A recipe's table on a terminal: published, ours, interval, difference, and what sets them apart.

Marks are letters behind a cell, told below the table once each, so that no number goes without.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from string import ascii_lowercase
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedshot.core.text import percent, printable
from fedshot.recipes.plan import comparable, marks
from fedshot.recipes.recipe import Recipe
from fedshot.recipes.runner import State
from fedshot.recipes.tuning import SEED

_COLUMNS = ("method", "setting", "published", "ours ± 95 %", "difference", "seeds", "marks")
MINUS = "\N{MINUS SIGN}"


class Marks:
    """Letters for remarks, each remark one letter, in the order they are met."""

    def __init__(self) -> None:
        self._letters: dict[str, str] = {}

    def of(self, remarks: Iterable[str]) -> str:
        """Return the letters of some remarks."""
        return " ".join(self._letters.setdefault(text, self._next()) for text in remarks)

    def told(self) -> list[tuple[str, str]]:
        """Return (letter, remark) of all that were met."""
        return [(letter, text) for text, letter in self._letters.items()]

    def _next(self) -> str:
        twice, n = divmod(len(self._letters), len(ascii_lowercase))
        return (ascii_lowercase[twice - 1] if twice else "") + ascii_lowercase[n]


def table(recipe: Recipe, variant: str, states: Sequence[State]) -> Table:
    """Return the table as it stands."""
    letters = Marks()
    rows = [(state, cells(state, letters)) for state in states]
    notes = [f"{letter}: {text}" for letter, text in letters.told()]
    notes += unfair(states)
    title = recipe.title_of(state.cell for state in states)
    made = Table(
        title=Text(f"{printable(title)}, budget {variant.replace('-tune', ', trials ')}"),
        title_justify="left",
        caption=Text(
            "\n".join(
                [f"{printable(measure(recipe, states))}.", *used(states), *floors(states), *notes]
            )
        ),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in _COLUMNS:
        left = name in ("method", "setting", "marks")
        made.add_column(name, justify="left" if left else "right", overflow="fold")
    before = None
    for state, shown in rows:
        if before not in (None, state.cell.row.key):
            made.add_section()
        before = state.cell.row.key
        made.add_row(*(Text(text) for text in shown))
    return made


def cells(state: State, letters: Marks) -> tuple[str, ...]:
    """Return what stands in each column of a cell's line."""
    cell = state.cell
    return (
        printable(cell.row.label),
        printable(cell.column.label),
        published(state),
        ours(state),
        difference(state),
        str(len(state.result.seeds)) if state.result else "",
        letters.of(remarks(state)),
    )


def remarks(state: State) -> list[str]:
    """Return what must be told of a cell."""
    found = []
    if state.result is not None or state.obstacle is None:
        found += marks(state.cell, state.result, state.seen)
    if state.result is not None and len(state.result.seeds) < state.wanted:
        found.append(f"{len(state.result.seeds)} of {state.wanted} seeds so far")
    if state.obstacle is not None:
        found.append(f"{state.obstacle.kind}: {printable(state.obstacle.reason)}")
    for seed, text in state.failed.items():
        other = "another process is training" in text
        what = "tuning" if seed == SEED else f"seed {seed}"
        found.append(f"{what}: {'left to the other process' if other else 'broke off: '}"
                     f"{'' if other else printable(text)}")  # fmt: skip
    return found


def measure(recipe: Recipe, states: Sequence[State]) -> str:
    """Return what the published numbers are, and where they are left out."""
    if all(state.cell.on_papers_data for state in states):
        return f"Published: {recipe.measure}"
    return f"Published on other data, and so not shown: {recipe.measure}"


def published(state: State) -> str:
    """Return the paper's number with its own +-."""
    number, spread = state.cell.published, state.cell.spread
    if number is None:
        return "-"
    return f"{number:.2f}" + (f" ± {spread:.2f}" if spread is not None else "")


def ours(state: State) -> str:
    """Return our number, or how far it is."""
    if state.result is not None:
        score = state.result.score
        return percent(score["accuracy"], score["interval"])
    if state.running:
        seed, (round, rounds, seen) = next(iter(sorted(state.running.items())))
        looked = "" if seen is None else f", validation {100 * seen:.1f}"
        return f"seed {seed}: {round}/{rounds}{looked}"
    if state.obstacle is not None:
        return state.obstacle.kind
    return "broke off" if state.failed else "waiting"


def difference(state: State) -> str:
    """Return ours minus published, in points."""
    if state.result is None or state.cell.published is None:
        return ""
    gap = 100 * state.result.score["accuracy"] - state.cell.published
    return f"{MINUS if gap < 0 else '+'}{abs(gap):.2f}"


def used(states: Sequence[State]) -> list[str]:
    """Return a line that tells the data, with their hashes; none while nothing is known of them."""
    every = [state.result.first if state.result else state.seen for state in states]
    held = {one["data"]["digest"]: one["data"] for one in every if one}
    told = [f"{data['name']}, {data['examples']:,} examples ({digest[:12]})"
            for digest, data in held.items()]  # fmt: skip
    return [f"Data: {'; '.join(told)}."] if told else []


def floors(states: Sequence[State]) -> list[str]:
    """Return a line with what raw pixels reach in each column; none where no cell tells it."""
    told = [
        f"{printable(state.cell.column.label)} {percent(held['accuracy'], held['interval'])}"
        for state in states
        if state.result
        for one in state.result.seeds.values()
        if (held := one.get("pixels"))
    ]
    told = list(dict.fromkeys(told))  # all seeds and rows of a column have one test
    return [f"Raw pixels, nearest class mean, on the same test: {'; '.join(told)}."] if told else []


def unfair(states: Sequence[State]) -> list[str]:
    """Return sentences about columns whose rows cannot be compared; none in a fair table."""
    found = []
    for column in dict.fromkeys(state.cell.column.key for state in states):
        held = {
            s.cell.row.key: s.result for s in states if s.cell.column.key == column and s.result
        }
        found += [f"{column}: {text}" for text in comparable(held)]
    return found


def as_text(recipe: Recipe, variant: str, states: Sequence[State], width: int = 110) -> str:
    """Return the table as plain text."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(
        table(recipe, variant, states)
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def as_json(states: Sequence[State]) -> str:
    """Return the cells for programs: accuracies as shares, published ones in percent."""
    return json.dumps([_values(state) for state in states], indent=1)


def _values(state: State) -> dict[str, Any]:
    score = state.result.score if state.result else {}
    return {
        "cell": state.cell.key,
        "published_percent": state.cell.published,
        "accuracy": score.get("accuracy"),
        "interval": score.get("interval"),
        "worst_tenth": score.get("worst_tenth"),
        "spread": score.get("spread"),
        "seeds": sorted(state.result.seeds) if state.result else [],
        "marks": remarks(state),
        "obstacle": state.obstacle and state.obstacle.kind,
    }
