"""The same number of trials for every method, chosen on validation classes.

Trial 0 is the recipe as it stands. The others draw each option from its space; one that several
rows search in one space is drawn alike for all of them, so no method gets luckier step sizes. The
trials train in the recipe's first column, as long as a cell does or as those of the budget that
`trials_as` names, with a seed of their own; the one with the highest validation accuracy, at the
round that would be tested, is used for every column of its row; one that diverges has lost. Novel
classes are not looked at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from fedshot.config.schema import not_honest
from fedshot.core import records, storage
from fedshot.core.errors import ConfigError
from fedshot.core.locks import locked
from fedshot.core.seeds import Key
from fedshot.recipes.recipe import Cell, Recipe, Row
from fedshot.recipes.results import departure, identity

SEED = 1_000  # of the trials: no training that is reported has it

Chosen = Mapping[str, Any]


def trials(recipe: Recipe, row: Row, n: int) -> list[dict[str, Any]]:
    """Return n settings to try, by dotted place.

    Raises ConfigError when the recipe has no search space.
    """
    if not recipe.tune and not row.tune and n > 1:
        raise ConfigError(f"{recipe.name} says of no option where to search; leave out --tune.")
    key = Key(0).at("tune")
    found: list[dict[str, Any]] = [{}]
    for i in range(1, n):
        spaces = {**recipe.tune, **row.tune}
        found.append({place: _draw(space, key.at(i, place)) for place, space in spaces.items()})
    return found


def path(folder: Path, recipe: Recipe, variant: str, row: Row) -> Path:
    """Return where a row's trials are kept."""
    return folder / recipe.name / variant / name(row)


def name(row: Row) -> str:
    """Return the name of the file with a row's trials, beside its cells."""
    return f"{row.key}.tune.json"


def cell_of(recipe: Recipe, budget: str, row: Row) -> Cell:
    """Return the cell in which a row is tuned.

    Raises ConfigError when its looks are no honest ones: trials are judged by them.
    """
    shorter = recipe.budget(recipe.budget(budget).trials_as or budget)
    cell = Cell(recipe, row, next(iter(recipe.columns.values())), shorter)
    check_honest(cell.key, cell.settings())
    return cell


def check_honest(what: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError when the looks of a training are no honest ones to judge a trial by."""
    told = not_honest(settings)
    if told:
        raise ConfigError(
            f"--tune judges trials on validation classes, and of {what} there is to say: "
            f"{'; '.join(told)}. Leave out --tune, or set run.choose to 'validation' and "
            "test.first_client_only to false in the recipe's first column."
        )


class _Trial(TypedDict):
    options: dict[str, Any]


class _TrialData(TypedDict):
    digest: str


class _Trials(TypedDict):
    """What is relied on in a file of trials."""

    tuned_in: str
    chosen: dict[str, Any]
    settings: dict[str, Any]
    data: _TrialData
    trials: list[_Trial]


def read(file: Path, cell: Cell, wanted: list[dict[str, Any]]) -> Chosen | None:
    """Return what was chosen, when the file holds these very trials of this very cell; else None.

    Trials of a recipe that has changed since count for nothing.
    """
    if not file.exists():
        return None
    tree = records.read(file, _Trials, "Remove it")
    changed = departure(tree["settings"], identity(cell, None))
    tried = [trial["options"] for trial in tree["trials"]]
    same = tried == wanted and tree["tuned_in"] == cell.key and not changed
    return dict(tree["chosen"]) if same else None


def data_of(file: Path) -> str:
    """Return the hash of the data that the trials of a file were made on, which `read` has read."""
    return str(records.read(file, _Trials, "Remove it")["data"]["digest"])


def write(
    file: Path, cell: Cell, wanted: list[dict[str, Any]], facts: Sequence[Mapping[str, Any]]
) -> Chosen:
    """Keep the trials, all come to their end, and return the options of the best.

    Of equals the first. Raises ConfigError when all of them diverge.
    """
    best = [None if one.get("diverged") else _tested(one) for one in facts]
    held = [accuracy for accuracy in best if accuracy is not None]
    if not held:
        raise ConfigError(
            f"all {len(wanted)} trials of {cell.key} diverge, the last in {facts[-1]['diverged']}"
        )
    chosen = wanted[best.index(max(held))]
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
    with locked(file.with_name(f".{file.name}.lock")):  # another process may have made them, too
        storage.write_bytes(file, f"{json.dumps(content, indent=1)}\n".encode(), sync=True)
    return chosen


def _tested(facts: Mapping[str, Any]) -> float:
    """Return the accuracy on validation classes at the round that would be tested."""
    looks = {round: accuracy for round, accuracy, _ in facts["validation"]}
    return float(looks[facts["round"]])


def _draw(space: Mapping[str, Any], key: Key) -> Any:
    """Draw from `{log: [a, b]}`, `{linear: [a, b]}` or `{choice: [...]}`; three digits are kept."""
    kind, values = next(iter(space.items()))
    u = float(key.numpy().random())
    if kind == "choice":
        return values[int(u * len(values))]
    low, high = values
    if kind == "log":
        return float(f"{math.exp(math.log(low) + u * (math.log(high) - math.log(low))):.3g}")
    return float(f"{low + u * (high - low):.3g}")
