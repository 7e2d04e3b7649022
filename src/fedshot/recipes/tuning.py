"""Hyper-parameter search with the same number of trials for every method (row of a recipe).

Trial 0 is the recipe without changes. The other trials draw each option from its search space; rows
that search an option in the same space draw the same values. The trials train in the recipe's first
column with the seed `SEED`. Their budget is that of the cells, or the shorter budget that the
cells' budget names in `trials_as`. The options of the trial with the highest validation accuracy,
at the round that would be tested, become the row's options in all columns. Trials that diverge are
not chosen. Novel classes are never used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from fedshot.config.registry import difference
from fedshot.core import records, storage
from fedshot.core.errors import ConfigError
from fedshot.core.locks import locked
from fedshot.recipes.recipe import Cell, Recipe, Row
from fedshot.recipes.results import identity
from fedshot.recipes.trials import accuracy, best, check_honest, draws

SEED = 1_000
"""Seed of all trials; reported results have smaller seeds."""
_FIX = (
    "Leave out --tune, or set run.choose to 'validation' and test.first_client_only to false in "
    "the recipe's first column."
)

Chosen = Mapping[str, Any]


def trials(recipe: Recipe, row: Row, n: int) -> list[dict[str, Any]]:
    """Return the options of each of a row's n tuning trials, by dotted key path.

    Raises ConfigError if the recipe has no search space.
    """
    spaces = {**recipe.tune, **row.tune}
    if not spaces and n > 1:
        raise ConfigError(f"recipe {recipe.name} has no search space (tune); leave out --tune.")
    return [{}, *draws(spaces, n - 1)]


def path(folder: Path, recipe: Recipe, variant: str, row: Row) -> Path:
    """Return the path of the file of a row's tuning trials, below the results folder `folder`.

    `variant` names the budget and the tuning, such as "small-tune4".
    """
    return folder / recipe.name / variant / name(row)


def name(row: Row) -> str:
    """Return the name of the file of a row's tuning trials."""
    return f"{row.key}.tune.json"


def cell_of(recipe: Recipe, budget: str, row: Row) -> Cell:
    """Return the cell (row and column of the recipe's table) in which `row` is tuned.

    Its column is the recipe's first. Its budget is `budget`, or the budget that `budget` names in
    `trials_as`.

    Raises ConfigError if the cell's settings would validate on the test classes, or with the first
    client only.
    """
    shorter = recipe.budget(recipe.budget(budget).trials_as or budget)
    cell = Cell(recipe, row, next(iter(recipe.columns.values())), shorter)
    check_honest(cell.key, cell.settings(), _FIX)
    return cell


class _Trial(TypedDict):
    options: dict[str, Any]


class _TrialData(TypedDict):
    digest: str


class _Trials(TypedDict):
    tuned_in: str
    chosen: dict[str, Any]
    settings: dict[str, Any]
    data: _TrialData
    trials: list[_Trial]


def read(file: Path, cell: Cell, wanted: list[dict[str, Any]]) -> Chosen | None:
    """Return the chosen options in a file of tuning trials; None if it is missing or out of date.

    The file is out of date if it is of another cell (row and column of the recipe's table), if the
    settings of `cell` have changed, or if its trials are not those of `wanted`.
    """
    if not file.exists():
        return None
    tree = records.read(file, _Trials, "Remove it")
    changed = difference(tree["settings"], identity(cell, None))
    tried = [trial["options"] for trial in tree["trials"]]
    same = tried == wanted and tree["tuned_in"] == cell.key and not changed
    return dict(tree["chosen"]) if same else None


def data_of(file: Path) -> str:
    """Return the hash of the data on which the trials in a file of tuning trials were trained."""
    return str(records.read(file, _Trials, "Remove it")["data"]["digest"])


def write(
    file: Path, cell: Cell, wanted: list[dict[str, Any]], facts: Sequence[Mapping[str, Any]]
) -> Chosen:
    """Write a row's finished tuning trials to a file; return the options of the best trial.

    `wanted` holds the options of each trial, `facts` what the worker reported of it. The first is
    best if several are equal. Raises ConfigError if all trials diverge.
    """
    accuracies = [accuracy(one) for one in facts]
    first = best(accuracies)
    if first is None:
        raise ConfigError(
            f"all {len(wanted)} trials of {cell.key} diverge, the last in {facts[-1]['diverged']}"
        )
    chosen = wanted[first]
    content = {
        "tuned_in": cell.key,
        "seed": SEED,
        "chosen": chosen,
        "settings": identity(cell, None),
        "data": facts[0]["data"],
        "made": [one["made"] for one in facts],
        "trials": [
            {"options": options, "best_validation": value, "validation": one["validation"]}
            | ({"diverged": one["diverged"]} if value is None else {})
            for options, value, one in zip(wanted, accuracies, facts, strict=True)
        ],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_name(f".{file.name}.lock")):
        storage.write_bytes(file, f"{json.dumps(content, indent=1)}\n".encode(), sync=True)
    return chosen
