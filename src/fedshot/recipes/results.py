"""Results of the cells of recipes' tables as JSON files, with everything needed to reproduce them.

A cell is one row of a recipe's table in one column. Its file is
results/RECIPE/VARIANT/ROW.COLUMN.json; the variant names the budget and the tuning. A seed is added
to the file when its training finishes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeAlias

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from fedshot.config.load import Config
from fedshot.config.registry import difference
from fedshot.config.settings import Settings
from fedshot.core import records, storage
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.locks import locked
from fedshot.core.records import Share, Whole
from fedshot.evaluation.episodic_test import HalfWidth, ScoreJson
from fedshot.methods import user_methods
from fedshot.methods.registry import METHODS
from fedshot.recipes.provenance import TrainedPart
from fedshot.recipes.recipe import Cell
from fedshot.reports.significance import ComparisonRow, combined
from fedshot.runs.recorder import Round, Seconds
from fedshot.runs.test_protocol import AttackJson, TestProtocol


class _CellData(TypedDict):
    name: str
    digest: str
    examples: Whole
    published: Whole | None


class _ClassMeans(TypedDict):
    accuracy: Share
    interval: HalfWidth


def _checked_point(point: list[Any]) -> list[Any]:
    kinds = [type(value) for value in point]
    if kinds[:1] != [int] or len(kinds) != 3 or not set(kinds) <= {int, float}:
        raise ValueError("expected a round, an accuracy and an interval")
    if not (0 <= point[1] <= 1 and 0 <= point[2] <= 100):
        raise ValueError("expected an accuracy in [0, 1] and an interval in [0, 100]")
    return point


Validated: TypeAlias = Annotated[list[Any], AfterValidator(_checked_point)]
"""A validation in a record: round, accuracy in [0, 1], half-width of its 95 % interval."""


class _Seed(TypedDict):
    """The facts about one training run that tables use."""

    test: ScoreJson
    queries: Whole
    right: NotRequired[list[Whole]]
    round: Round
    rounds: Round
    bytes_down: Whole
    bytes_up: Whole
    seconds: Seconds
    data: _CellData
    partition: str
    clients: Annotated[list[Whole], Field(min_length=2, max_length=2)]
    validation: list[Validated]
    faults: Whole
    skipped: Whole
    metrics: NotRequired[dict[str, float]]
    made: list[TrainedPart]
    answered: NotRequired[list[TrainedPart]]
    followed: NotRequired[str]
    attack: NotRequired[AttackJson]
    features: NotRequired[_ClassMeans]
    pixels: NotRequired[_ClassMeans | Annotated[dict[str, Any], Field(max_length=0)]]


def _checked_seed(one: _Seed) -> _Seed:
    if "right" in one and not all(0 <= n <= one["queries"] > 0 for n in one["right"]):
        raise ValueError("more right answers than queries")
    return one


class _Cell(TypedDict):
    recipe: str
    variant: str
    cell: Annotated[str, Field(pattern="^[^/]+/[^/]+$")]
    tuned: dict[str, Any] | None
    settings: dict[str, Any]
    seeds: Annotated[
        dict[
            Annotated[str, Field(pattern="^[0-9]{1,18}$")],
            Annotated[_Seed, AfterValidator(_checked_seed)],
        ],
        Field(min_length=1),
    ]


@dataclass(frozen=True)
class CellResult:
    """The results of a cell (row and column of a recipe's table) that has a finished seed."""

    recipe: str
    variant: str  # budget and tuning, such as "small" or "small-tune4"
    row: str
    column: str
    settings: Settings  # the whole configuration, without name and seed
    seeds: Mapping[int, Mapping[str, Any]]  # seed -> facts about its training run, in order
    tuned: Mapping[str, Any] | None = None  # options that tuning chose; None without tuning
    path: Path | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """The cell's name in commands."""
        return f"{self.row}/{self.column}"

    @property
    def method(self) -> str:
        """The method's name in `fedshot methods`."""
        return str(self.settings["method"]["name"])

    @property
    def score(self) -> Mapping[str, Any]:
        """The test score: each episode's accuracy is the mean over seeds."""
        return combined([score_of(one) for one in self.seeds.values()])

    @property
    def first(self) -> Mapping[str, Any]:
        """The facts about the training run with the lowest seed.

        For values that all seeds share, such as the data, and for plots of a single run.
        """
        return self.seeds[min(self.seeds)]

    def command(self) -> str:
        """Return the command that reproduces the cell (row and column of the recipe's table)."""
        return command([self], [f"'{self.key}'"], max(self.seeds) + 1)


def command(results: Sequence[CellResult], patterns: Sequence[str], seeds: int) -> str:
    """Return the command that reproduces cells of one recipe's table with `seeds` seeds.

    `patterns` select the cells by "row/column", quoted for the shell.
    """
    first, methods = results[0], (result.method for result in results)
    budget, trials = split(first.variant)
    words = [*user_methods.program(*methods), "reproduce", first.recipe]
    words += ["--cells", *patterns] if patterns else []
    words += ["--budget", budget, "--seeds", str(seeds)]
    return " ".join(words + (["--tune", trials] if trials else []))


def validation_curve(seed: Mapping[str, Any]) -> dict[int, float]:
    """Return round -> validation accuracy of one training run; `seed` holds its facts."""
    return {round: accuracy for round, accuracy, _ in seed["validation"]}


def split(variant: str) -> tuple[str, str]:
    """Return (budget, number of tuning trials as text) of a variant such as "small-tune4".

    The second is "" without tuning.
    """
    budget, _, trials = variant.partition("-tune")
    return budget, trials


class Results:
    """A folder of results, one file for each finished cell (row and column) of a recipe's table."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, cell: Cell, variant: str) -> Path:
        """Return the path of a cell's file; `variant` names budget and tuning: "small-tune4"."""
        return self.folder / cell.recipe.name / variant / f"{cell.stem}.json"

    def of(self, cell: Cell, variant: str, chosen: Mapping[str, Any] | None) -> CellResult | None:
        """Return the results of a cell's finished seeds from its file; None if none has finished.

        `chosen` are options that tuning chose. A file whose settings differ from the cell's current
        ones is out of date: it counts as missing.
        """
        path = self.path(cell, variant)
        found = read(path) if path.exists() else None
        return None if found is None or outdated(found, cell, chosen) else found

    def add(
        self, cell: Cell, variant: str, chosen: Mapping[str, Any] | None, seed: int, facts: Any
    ) -> CellResult:
        """Add the facts about a finished seed to a cell's file, and return the cell's results."""
        path = self.path(cell, variant)
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.lock")):  # other processes may add seeds
            before = self.of(cell, variant, chosen)
            seeds = dict(before.seeds) if before else {}
            seeds[seed] = kept(facts)
            result = CellResult(
                cell.recipe.name, variant, cell.row.key, cell.column.key, identity(cell, chosen),
                dict(sorted(seeds.items())), chosen, path,
            )  # fmt: skip
            write(path, result)
        return result

    def every(self) -> list[CellResult]:
        """Return the results of all finished cells, sorted by path."""
        return [read(path) for path in self._files("*", "*")]

    def readable(self, recipe: str = "*", variant: str = "*") -> list[CellResult]:
        """Return the results of the cells whose files can be read; damaged files are skipped."""
        found = []
        for path in self._files(recipe, variant):
            with suppress(CheckpointError):
                found.append(read(path))
        return found

    def _files(self, recipe: str, variant: str) -> list[Path]:
        files = sorted(self.folder.glob(f"{recipe}/{variant}/*.json"))
        return [path for path in files if not path.name.endswith(".tune.json")]


def identity(cell: Cell, chosen: Mapping[str, Any] | None) -> Settings:
    """Return the settings that determine the results of a cell, one row and column of a table.

    These are all settings but name and seed, defaults included. For a user's method they include
    the fingerprint of its file. `chosen` are options that tuning chose.
    """
    whole = Config.of(cell.settings(0, chosen)).settings
    kept = {key: value for key, value in whole.items() if key not in ("name", "seed")}
    return kept | user_methods.noted(cell.row.method)


def outdated(result: CellResult, cell: Cell, chosen: Mapping[str, Any] | None) -> str | None:
    """Return how a result's settings differ from its cell's current ones; None if they are equal.

    A cell is a row and a column of a recipe's table. An option that did not exist when the result
    was written counts as set to its default.
    """
    if cell.row.method not in METHODS:
        return f"there is no method {cell.row.method!r}"
    try:
        return difference(result.settings, identity(cell, chosen))
    except ConfigError as error:
        return f"its current settings are invalid: {error}"


def shared(
    cell: Cell,
    variant: str,
    chosen: Mapping[str, Any] | None,
    every: Iterable[CellResult],
    here: Mapping[str, Any] | None,
) -> dict[int, dict[str, Any]]:
    """Return seed -> facts of other cells' training runs that have exactly the settings of `cell`.

    A cell is a row and a column of a recipe's table. Settings, data and seed determine a training
    run. "shared" in the facts names the other cell.

    Args:
        cell: the cell.
        variant: its budget and tuning, such as "small-tune4".
        chosen: options that tuning chose for it.
        every: the results of finished cells of any recipe.
        here: facts about the data on this machine; runs on other data are left out. None keeps
            the runs on any data.
    """
    own = (cell.recipe.name, variant, cell.key)
    alike = [r for r in every
             if r.method == cell.row.method and (r.recipe, r.variant, r.key) != own]  # fmt: skip
    found: dict[int, dict[str, Any]] = {}
    wanted = identity(cell, chosen) if alike else {}
    for result in alike:
        if difference(result.settings, wanted) is not None:
            continue
        same_recipe = result.recipe == cell.recipe.name
        name = f"{result.key} of {result.variant if same_recipe else result.recipe}"
        for seed, one in result.seeds.items():
            if not here or one["data"]["digest"] == here["data"]["digest"]:
                found.setdefault(seed, {"shared": name, **one})  # keeps an earlier "shared"
    return found


def kept(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about a training run as they are stored, with counts in place of accuracies.

    "right" counts the correct predictions of each episode. Accuracies are stored instead if an
    episode's accuracy is a mean over clients. They are also stored if the episodes differ in their
    number of queries, in which case "queries" is 0.
    """
    if "right" in facts:
        return dict(facts)
    test, queries = dict(facts["test"]), facts["queries"]
    counts = [accuracy * queries for accuracy in test["per_episode"]]
    if not queries or any(abs(count - round(count)) > 1e-6 for count in counts):
        return {**facts, "test": test}
    del test["per_episode"]
    return {**facts, "test": test, "right": [round(count) for count in counts]}


def score_of(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return the score of one seed, with the accuracy of every episode, from the stored facts."""
    if "right" not in one:
        return dict(one["test"])
    return {**one["test"], "per_episode": [n / one["queries"] for n in one["right"]]}


def row_of(result: CellResult) -> ComparisonRow:
    """Return the result of a cell (row and column of a recipe's table) as a row of a comparison."""
    every = list(result.seeds.values())
    spent = [(one["bytes_down"], one["bytes_up"], one["seconds"]) for one in every]
    protocol = TestProtocol.of(result.settings, {"own": not every[0]["queries"]})
    return ComparisonRow.of_tests(result.key, [score_of(one) for one in every], spent, protocol)


def write(path: Path, result: CellResult) -> None:
    """Write the result of a cell of a recipe's table to its JSON file."""
    content = {
        "recipe": result.recipe,
        "cell": result.key,
        "variant": result.variant,
        "command": result.command(),
        "tuned": result.tuned,
        "settings": result.settings,
        "seeds": {str(seed): one for seed, one in result.seeds.items()},
    }
    storage.write_bytes(path, f"{_json(content)}\n".encode(), sync=True)


def read(path: Path) -> CellResult:
    """Read the result of a cell of a recipe's table from its JSON file.

    Raises CheckpointError if the file is damaged, or is not the file of a cell.
    """
    path = path.absolute()  # its folders must be named after recipe and variant
    if path.name.endswith(".tune.json"):
        raise CheckpointError(f"{path} holds trials of tuning, not a cell. Name ROW.COLUMN.json.")
    fix = f"{records.COPY}, or remove it and train the cell again"
    tree = records.read(path, _Cell, fix)
    row, column = tree["cell"].split("/")
    seeds = {int(seed): one for seed, one in tree["seeds"].items()}
    found = CellResult(
        tree["recipe"], tree["variant"], row, column, tree["settings"],
        dict(sorted(seeds.items())), tree["tuned"], path,
    )  # fmt: skip
    place = (path.parent.parent.name, path.parent.name, path.stem)
    if (found.recipe, found.variant, f"{row}.{column}") != place:
        raise CheckpointError(
            f"{path} does not match its name: it holds {found.recipe}, {found.variant}, "
            f"{tree['cell']}. {fix}."
        )
    return found


def _json(tree: Any, depth: int = 0) -> str:
    """Return indented JSON with every list on one line: a list may have a thousand counts."""
    if isinstance(tree, dict) and tree:
        pad = " " * (depth + 1)
        lines = [f"{pad}{json.dumps(k)}: {_json(v, depth + 1)}" for k, v in tree.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"
    return json.dumps(tree)
