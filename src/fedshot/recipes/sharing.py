"""Trainings that several recipes have in common: what one has finished, the others take over.

Settings and seed say all of a training. So the whole method among its ablations is the row of the
paper's table, and training it again would give its numbers again, to the last digit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedshot.recipes.recipe import Cell
from fedshot.recipes.results import CellResult, departure, identity


def shared(
    cell: Cell,
    variant: str,
    chosen: Mapping[str, Any] | None,
    every: Iterable[CellResult],
    seen: Mapping[str, Any] | None,
) -> dict[int, dict[str, Any]]:
    """Return what other cells' trainings with exactly a cell's settings came to, by seed.

    Args:
        cell: of which recipe, row, column and budget.
        variant: its budget and tuning.
        chosen: the options that tuning chose for it; None without tuning.
        every: finished cells of any recipe.
        seen: the facts of the data that is here; what was trained on other data is left out.

    Returns:
        the facts of each seed, and in "shared" whose training it is.
    """
    own = (cell.recipe.name, variant, cell.key)
    alike = [r for r in every
             if r.method == cell.row.method and (r.recipe, r.variant, r.key) != own]  # fmt: skip
    if not alike:
        return {}
    wanted = identity(cell, chosen)
    found: dict[int, dict[str, Any]] = {}
    for result in alike:
        if departure(result.settings, wanted) is None:
            here = result.recipe == cell.recipe.name
            whose = f"{result.key} of {result.variant if here else result.recipe}"
            for seed, one in result.seeds.items():
                if seen and one["data"]["digest"] != seen["data"]["digest"]:
                    continue
                found.setdefault(seed, {"shared": whose, **one})  # whose own training it is stays
    return found
