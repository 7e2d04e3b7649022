"""Select the results that are up to date with the current recipe.

A result is of one cell (row and column of a recipe), and out of date if its settings have changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.text import printable
from fedshot.methods.registry import METHODS
from fedshot.recipes import tuning
from fedshot.recipes.recipe import Cell, Recipe
from fedshot.recipes.results import CellResult, outdated, split
from fedshot.recipes.runner import State


def current(
    name: str, variant: str, results: Sequence[CellResult], recipe: Recipe | None
) -> tuple[list[State], list[str]]:
    """Return a `State` for each up-to-date result, and a text for each that is out of date.

    Args:
        name: name of the recipe of all `results`.
        variant: budget and tuning of all `results`, such as "small-tune4".
        results: finished cells.
        recipe: the current recipe; None if it no longer exists.
    """
    budget = split(variant)[0]
    if recipe is None or budget not in recipe.budgets:
        return [], [f"{name}/{variant}: there is no such recipe or budget"]
    by_key = {result.key: result for result in results}
    states, left_out = [], []
    for cell in recipe.cells(budget):
        result = by_key.pop(cell.key, None)
        if result is None:
            continue
        changed = outdated(result, cell, result.tuned) or _trials_changed(result, cell)
        if changed:
            left_out.append(f"{name}/{variant}, {cell.key}: out of date, {printable(changed)}")
        else:
            states.append(State(cell, result=result))
    left_out += [f"{name}/{variant}, {key}: the recipe has no such cell" for key in by_key]
    return states, left_out


def _trials_changed(result: CellResult, cell: Cell) -> str | None:
    """Return why the tuning trials of a result are out of date; None if they are valid."""
    trials = split(result.variant)[1]
    if not trials or result.path is None or cell.row.method not in METHODS:
        return None
    if not trials.isdecimal():
        return f"{result.variant} names no number of trials"
    file = result.path.parent / tuning.name(cell.row)
    try:
        wanted = tuning.trials(cell.recipe, cell.row, int(trials))
        chosen = tuning.read(file, tuning.cell_of(cell.recipe, cell.budget.name, cell.row), wanted)
    except (CheckpointError, ConfigError) as error:
        return str(error)
    if chosen is None:
        return f"{file.name}, its trials, is missing or of another search"
    return None if chosen == result.tuned else f"{file.name}, its trials, chose other options"
