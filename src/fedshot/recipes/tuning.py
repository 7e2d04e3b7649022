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
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from fedshot.config.registry import difference
from fedshot.core import records, storage
from fedshot.core.errors import ConfigError
from fedshot.core.locks import locked
from fedshot.recipes.recipe import Cell, Recipe, Row
from fedshot.recipes.results import identity
from fedshot.recipes.trials import accuracy, check_honest, draws

SEED = 1_000
"""Seed of all trials; reported results have smaller seeds."""
_FIX = (
    "Leave out --tune, or set run.choose to 'validation' and test.first_client_only to false in "
    "the recipe's first column."
)

Chosen = Mapping[str, Any]


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


@dataclass(frozen=True)
class Search:
    """The tuning trials of a row of a recipe.

    Args:
        cell: the cell (row and column of the recipe's table) in which the row is tuned.
        trials: the options of each trial, by dotted key path.
        file: the file of the trials, once all have finished.
    """

    cell: Cell
    trials: list[dict[str, Any]]
    file: Path

    @classmethod
    def of(cls, recipe: Recipe, budget: str, row: Row, n: int, folder: Path) -> Search:
        """Return the search with n trials for the cells of `row` with `budget`.

        `folder` holds the results of these cells: results/RECIPE/VARIANT.

        Raises ConfigError if the recipe has no search space, or if the trials would be validated on
        the test classes, or with the first client only.
        """
        shorter = recipe.budget(recipe.budget(budget).trials_as or budget)
        cell = Cell(recipe, row, next(iter(recipe.columns.values())), shorter)
        check_honest(cell.key, cell.settings(), _FIX)
        spaces = {**recipe.tune, **row.tune}
        if not spaces and n > 1:
            raise ConfigError(f"recipe {recipe.name} has no search space (tune); leave out --tune.")
        return cls(cell, [{}, *draws(spaces, n - 1)], folder / f"{row.key}.tune.json")

    def read(self) -> Chosen | None:
        """Return the chosen options in the file; None if it is missing or out of date.

        The file is out of date if it is of another cell (row and column of the recipe's table), if
        the settings of the cell have changed, or if it has other trials.
        """
        if not self.file.exists():
            return None
        tree = self._content()
        changed = difference(tree["settings"], identity(self.cell, None))
        tried = [trial["options"] for trial in tree["trials"]]
        same = tried == self.trials and tree["tuned_in"] == self.cell.key and not changed
        return dict(tree["chosen"]) if same else None

    def data(self) -> str:
        """Return the hash of the data on which the trials in the file were trained."""
        return str(self._content()["data"]["digest"])

    def _content(self) -> Any:
        return records.read(self.file, _Trials, "Remove it")

    def write(self, facts: Sequence[Mapping[str, Any]]) -> Chosen:
        """Write the finished trials to the file; return the options of the best trial.

        `facts` holds what the worker reported of each trial. The first is best if several are
        equal. Raises ConfigError if all trials diverge.
        """
        accuracies = [accuracy(one) for one in facts]
        tried = zip(accuracies, self.trials, strict=True)
        finished = [(value, options) for value, options in tried if value is not None]
        if not finished:
            raise ConfigError(
                f"all {len(self.trials)} trials of {self.cell.key} diverge, the last in "
                f"{facts[-1]['diverged']}"
            )
        _, chosen = max(finished, key=itemgetter(0))
        content = {
            "tuned_in": self.cell.key,
            "seed": SEED,
            "chosen": chosen,
            "settings": identity(self.cell, None),
            "data": facts[0]["data"],
            "made": [one["made"] for one in facts],
            "trials": [
                {"options": options, "best_validation": value, "validation": one["validation"]}
                | ({"diverged": one["diverged"]} if value is None else {})
                for options, value, one in zip(self.trials, accuracies, facts, strict=True)
            ],
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.file.with_name(f".{self.file.name}.lock")):
            text = f"{json.dumps(content, indent=1)}\n"
            storage.write_bytes(self.file, text.encode(), sync=True)
        return chosen
