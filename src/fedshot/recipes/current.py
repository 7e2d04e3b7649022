"""Which finished cells belong to a recipe as it is today."""

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
    """Return the states of results that fit today's recipe, and why the others do not.

    Args:
        name: of the recipe.
        variant: budget and tuning of the results.
        results: finished cells of this recipe and variant.
        recipe: the recipe; None where there is none any more.
    """
    budget = split(variant)[0]
    if recipe is None or budget not in recipe.budgets:
        return [], [f"{name}/{variant}: there is no such recipe or budget"]
    held = {result.key: result for result in results}
    states, left = [], []
    for cell in recipe.cells(budget):
        result = held.pop(cell.key, None)
        if result is None:
            continue
        changed = outdated(result, cell, result.tuned) or _trials_changed(result, cell)
        if changed:
            left.append(f"{name}/{variant}, {cell.key}: out of date, {printable(changed)}")
        else:
            states.append(State(cell, result=result))
    left += [f"{name}/{variant}, {key}: the recipe has no such cell" for key in held]
    return states, left


def _trials_changed(result: CellResult, cell: Cell) -> str | None:
    """Say what is wrong with the trials that a result's options come from; None for nothing."""
    trials = split(result.variant)[1]
    if not trials or result.path is None or cell.row.method not in METHODS:
        return None
    if not trials.isdecimal():
        return f"{result.variant} names no number of trials"
    file = result.path.parent / tuning.name(cell.row)
    try:
        tried = tuning.trials(cell.recipe, cell.row, int(trials))
        chosen = tuning.read(file, tuning.cell_of(cell.recipe, cell.budget.name, cell.row), tried)
    except (CheckpointError, ConfigError) as error:  # of a search that is gone, or refused today
        return str(error)
    if chosen is None:
        return f"{file.name}, its trials, is missing or of another search"
    return None if chosen == result.tuned else f"{file.name}, its trials, chose other options"
