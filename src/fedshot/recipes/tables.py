"""A recipe's table for a terminal: published accuracies, fedshot's, their difference, and marks.

A line of this table is a cell, i.e. one row and column of the recipe's published table. Marks are
letters beside a cell; each refers to a note below the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import fmean
from string import ascii_lowercase
from typing import Any, NamedTuple

from rich.table import Table

from fedshot.config import settings as trees
from fedshot.core.text import percent, printable, signed
from fedshot.recipes.plan import comparable, marks
from fedshot.recipes.recipe import Recipe
from fedshot.recipes.runner import State
from fedshot.recipes.tuning import SEED
from fedshot.reports.table import add_row, grid, plain_text

_COLUMNS = ("method", "setting", "published", "ours ± 95 %", "difference", "seeds", "marks")


class ShareColumn(NamedTuple):
    """A share that some cells (rows and columns of a recipe's table) have, and its column."""

    name: str  # in JSON
    place: str  # key path in the facts about a seed's training run
    column: str  # heading
    note: str  # what the column shows; a line of the caption

    def of(self, state: State) -> float | None:
        """Return the share of a cell, its mean over seeds; None if it was not measured."""
        every = [trees.at(one, self.place) for one in state.finished]
        known = [one for one in every if one is not None]
        return fmean(known) if known else None

    def text(self, state: State) -> str:
        """Return the share of a cell in percent; "" if it was not measured."""
        found = self.of(state)
        return "" if found is None else f"{100 * found:.1f}"


_BACKDOOR = ShareColumn(
    "backdoor",
    "attack.backdoor",
    "backdoor succeeds",
    "Backdoor: percent of the queries of other classes, with the trigger, that are predicted to be "
    "of the attacker's class.",
)
_ZEROS = ShareColumn(
    "zeros",
    "metrics.zeros",
    "zeros",
    "Zeros: percent of the weights that are exactly 0 after the last round, mean over clients.",
)
_SHARES = (
    _BACKDOOR,
    _ZEROS,
    ShareColumn(
        "near_zero",
        "metrics.near_zero",
        "below 0.001",
        "Below 0.001: percent of the weights whose magnitude is below 0.001 after the last round, "
        "zeros included.",
    ),
)
_SPARSE = 0.01  # share of zeros that only a sparse model has; biases that never moved have less


class Marks:
    """Assigns letters to notes, in order of first use; a letter marks a line of a table."""

    def __init__(self) -> None:
        self._letters: dict[str, str] = {}

    def of(self, notes: Iterable[str]) -> str:
        """Return the letters of these notes, separated by spaces; new notes get new letters."""
        return " ".join(self._letters.setdefault(text, self._next()) for text in notes)

    def notes(self) -> list[str]:
        """Return all notes that have a letter, as "letter: note"."""
        return [f"{letter}: {text}" for text, letter in self._letters.items()]

    def _next(self) -> str:
        first, n = divmod(len(self._letters), len(ascii_lowercase))
        return (ascii_lowercase[first - 1] if first else "") + ascii_lowercase[n]


def table(recipe: Recipe, variant: str, states: Sequence[State]) -> Table:
    """Return a recipe's table for a terminal: a line for each cell (row and column of the recipe).

    `variant` names budget and tuning, such as "small-tune4". `states` are the cells with their
    results.
    """
    letters, extra = Marks(), shares(states)
    rows = [(state, cells(state, letters, extra)) for state in states]
    caption = [f"{printable(measure(recipe, states))}.", *_data(states), *class_means(states)]
    caption += [*(share.note for share in extra), *letters.notes(), *unfair(states)]
    title = f"{printable(recipe.title_of(state.cell for state in states))}, budget "
    title += variant.replace("-tune", ", trials ")
    columns = (*_COLUMNS[:-1], *(share.column for share in extra), _COLUMNS[-1])
    found = grid(columns, ("method", "setting", "marks"), title, caption)
    for _, group in groupby(rows, key=lambda row: row[0].cell.row.key):
        for _, texts in group:
            add_row(found, texts)
        found.add_section()
    return found


def cells(state: State, letters: Marks, extra: Iterable[ShareColumn] = ()) -> tuple[str, ...]:
    """Return the line of a cell of a recipe in the table for a terminal: a text for each column.

    `letters` assigns letters to the cell's notes; `extra` are the shares that have a column.
    """
    cell = state.cell
    return (
        printable(cell.row.label),
        printable(cell.column.label),
        published(state),
        ours(state),
        difference(state),
        str(len(state.result.seeds)) if state.result else "",
        *[share.text(state) for share in extra],
        letters.of(_notes(state)),
    )


def _notes(state: State) -> list[str]:
    found = []
    if state.result is not None or state.obstacle is None:
        found += marks(state.cell, state.result, state.facts)
    if state.result is not None and len(state.result.seeds) < state.wanted:
        found.append(f"{len(state.result.seeds)} of {state.wanted} seeds so far")
    if state.obstacle is not None:
        found.append(f"{state.obstacle.kind}: {printable(state.obstacle.reason)}")
    for seed, text in state.failed.items():
        what = "tuning" if seed == SEED else f"seed {seed}"
        other = "another process is training" in text
        found.append(
            f"{what}: {'left to another process' if other else f'failed: {printable(text)}'}"
        )
    return found


def measure(recipe: Recipe, states: Sequence[State]) -> str:
    """Return a caption: what the published numbers measure, or that they are not shown."""
    if all(state.cell.on_papers_data for state in states):
        return f"Published: {recipe.measure}"
    return f"Published on other data, and so not shown: {recipe.measure}"


def published(state: State) -> str:
    """Return the paper's accuracy and +- for a cell of a recipe's table, in percent, or "-"."""
    number, spread = state.cell.published, state.cell.spread
    if number is None:
        return "-"
    return f"{number:.2f}" + (f" ± {spread:.2f}" if spread is not None else "")


def ours(state: State) -> str:
    """Return fedshot's accuracy in a cell of a recipe's table, with its interval.

    Without a result, return the cell's progress.
    """
    if state.result is not None:
        score = state.result.score
        return percent(score["accuracy"], score["interval"])
    if state.running:
        seed, (round, rounds, accuracy) = min(state.running.items())
        validation = "" if accuracy is None else f", validation {100 * accuracy:.1f}"
        return f"seed {seed}: {round}/{rounds}{validation}"
    if state.obstacle is not None:
        return state.obstacle.kind
    return "failed" if state.failed else "waiting"


def difference(state: State) -> str:
    """Return fedshot's accuracy minus the published one in a cell of a recipe's table.

    The unit is percentage points; "" if one of the two is missing.
    """
    if state.result is None or state.cell.published is None:
        return ""
    return signed(100 * state.result.score["accuracy"] - state.cell.published)


def shares(states: Sequence[State]) -> list[ShareColumn]:
    """Return the shares that a cell has.

    Shares of weights are left out unless a cell has a sparse model, with 1 % of zeros or more.
    """
    sparse = any((_ZEROS.of(state) or 0) >= _SPARSE for state in states)
    some = _SHARES if sparse else [_BACKDOOR]
    return [share for share in some if any(share.of(state) is not None for state in states)]


def _data(states: Sequence[State]) -> list[str]:
    """Return a line with the data sets of a recipe's cells and their hashes, in a list.

    The list is empty if no data set is known yet.
    """
    every = [state.result.first if state.result else state.facts for state in states]
    held = {one["data"]["digest"]: one["data"] for one in every if one}
    texts = [f"{data['name']}, {data['examples']:,} examples ({digest[:12]})"
             for digest, data in held.items()]  # fmt: skip
    return [f"Data: {'; '.join(texts)}."] if texts else []


def class_means(states: Sequence[State]) -> list[str]:
    """Return lines with the accuracy of classification by nearest class mean in each column.

    There is a line for raw pixels and one for given features, if these accuracies are known.
    """
    lines = []
    for key, name in (("pixels", "Raw pixels"), ("features", "Given features")):
        texts = [
            f"{printable(state.cell.column.label)} {percent(held['accuracy'], held['interval'])}"
            for state in states
            if state.result
            for one in state.result.seeds.values()
            if (held := one.get(key))
        ]
        texts = list(dict.fromkeys(texts))  # all seeds and rows of a column have the same test
        if texts:
            lines.append(f"{name}, nearest class mean, on the same test: {'; '.join(texts)}.")
    return lines


def unfair(states: Sequence[State]) -> list[str]:
    """Return the reasons why rows in the same column of a recipe's table cannot be compared."""
    found = []
    for column in dict.fromkeys(state.cell.column.key for state in states):
        held = {
            s.cell.row.key: s.result for s in states if s.cell.column.key == column and s.result
        }
        found += [f"{column}: {text}" for text in comparable(held)]
    return found


def as_text(recipe: Recipe, variant: str, states: Sequence[State], width: int = 110) -> str:
    """Return a recipe's table as plain text, with a line for each cell (row and column).

    `variant` names budget and tuning, such as "small-tune4". `states` are the cells with their
    results.
    """
    return plain_text(table(recipe, variant, states), width)


def as_json(states: Sequence[State]) -> str:
    """Return the cells (rows and columns of a recipe's table) and their results as JSON.

    Accuracies are in [0, 1], published ones in percent.
    """
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
        **{share.name: share.of(state) for share in _SHARES},
        "seeds": list(state.result.seeds) if state.result else [],
        "marks": _notes(state),
        "obstacle": state.obstacle and state.obstacle.kind,
    }
