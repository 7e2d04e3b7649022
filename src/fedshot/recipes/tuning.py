"""Hyper-parameter search with the same number of trials for every method (row of a recipe).

Trial 0 is the recipe without changes. The other trials draw each option from its search space; rows
that search an option in the same space draw the same values. The trials train in the recipe's first
column with the seed `SEED`. Their budget is that of the cells, or the budget that this one names in
`trials_as`. The options of the trial with the highest validation accuracy, at the round that would
be tested, become the row's options in all columns. Trials that diverge are not chosen. Novel
classes are never used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from fedshot.config.registry import difference
from fedshot.config.schema import not_honest
from fedshot.core import records, storage
from fedshot.core.errors import ConfigError
from fedshot.core.locks import locked
from fedshot.core.seeds import Key
from fedshot.recipes.recipe import Cell, Recipe, Row
from fedshot.recipes.results import identity, validation_curve

SEED = 1_000
"""Seed of all trials; the trainings in tables have smaller seeds."""

Chosen = Mapping[str, Any]


def trials(recipe: Recipe, row: Row, n: int) -> list[dict[str, Any]]:
    """Return the options of each of n trials, by dotted key path.

    Raises ConfigError if the recipe has no search space.
    """
    spaces = {**recipe.tune, **row.tune}
    if not spaces and n > 1:
        raise ConfigError(f"recipe {recipe.name} has no search space (tune); leave out --tune.")
    key = Key(0).at("tune")
    return [{}] + [
        {place: _draw(space, key.at(i, place)) for place, space in spaces.items()}
        for i in range(1, n)
    ]


def path(folder: Path, recipe: Recipe, variant: str, row: Row) -> Path:
    """Return the file of a row's trials in a results folder."""
    return folder / recipe.name / variant / name(row)


def name(row: Row) -> str:
    """Return the name of the file of a row's trials."""
    return f"{row.key}.tune.json"


def cell_of(recipe: Recipe, budget: str, row: Row) -> Cell:
    """Return the cell in which a row is tuned.

    Raises ConfigError as `check_honest` does.
    """
    shorter = recipe.budget(recipe.budget(budget).trials_as or budget)
    cell = Cell(recipe, row, next(iter(recipe.columns.values())), shorter)
    check_honest(cell.key, cell.settings())
    return cell


def check_honest(what: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if settings validate on the test classes or with only one client."""
    reasons = not_honest(settings)
    if reasons:
        raise ConfigError(
            f"--tune judges trials on validation classes, but for {what}: {'; '.join(reasons)}. "
            "Leave out --tune, or set run.choose to 'validation' and test.first_client_only to "
            "false in the recipe's first column."
        )


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
    """Return the chosen options in a file of trials; None if it is missing or out of date.

    The file must be of this cell, with its current settings, and of the trials `wanted`.
    """
    if not file.exists():
        return None
    tree = records.read(file, _Trials, "Remove it")
    changed = difference(tree["settings"], identity(cell, None))
    tried = [trial["options"] for trial in tree["trials"]]
    same = tried == wanted and tree["tuned_in"] == cell.key and not changed
    return dict(tree["chosen"]) if same else None


def data_of(file: Path) -> str:
    """Return the hash of the data that the trials of a file were trained on."""
    return str(records.read(file, _Trials, "Remove it")["data"]["digest"])


def write(
    file: Path, cell: Cell, wanted: list[dict[str, Any]], facts: Sequence[Mapping[str, Any]]
) -> Chosen:
    """Write the finished trials and return the options of the best trial (the first, if tied).

    Raises ConfigError if all trials diverge.
    """
    best = [None if one.get("diverged") else _tested(one) for one in facts]
    accuracies = [accuracy for accuracy in best if accuracy is not None]
    if not accuracies:
        raise ConfigError(
            f"all {len(wanted)} trials of {cell.key} diverge, the last in {facts[-1]['diverged']}"
        )
    chosen = wanted[best.index(max(accuracies))]
    content = {
        "tuned_in": cell.key,
        "seed": SEED,
        "chosen": chosen,
        "settings": identity(cell, None),
        "data": facts[0]["data"],
        "made": [one["made"] for one in facts],
        "trials": [
            {"options": options, "best_validation": accuracy, "validation": one["validation"]}
            | ({"diverged": one["diverged"]} if accuracy is None else {})
            for options, accuracy, one in zip(wanted, best, facts, strict=True)
        ],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_name(f".{file.name}.lock")):
        storage.write_bytes(file, f"{json.dumps(content, indent=1)}\n".encode(), sync=True)
    return chosen


def _tested(facts: Mapping[str, Any]) -> float:
    """Return the validation accuracy at the round that would be tested."""
    return validation_curve(facts)[facts["round"]]


def _draw(space: Mapping[str, Any], key: Key) -> Any:
    """Draw a value from `{log: [a, b]}`, `{linear: [a, b]}` or `{choice: [...]}`.

    Numbers are rounded to three significant digits.
    """
    kind, values = next(iter(space.items()))
    u = float(key.numpy().random())
    if kind == "choice":
        return values[int(u * len(values))]
    low, high = values
    if kind == "log":
        return float(f"{math.exp(math.log(low) + u * (math.log(high) - math.log(low))):.3g}")
    return float(f"{low + u * (high - low):.3g}")
