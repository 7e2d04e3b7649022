"""Finished cells as small JSON files: a cell, its seeds, and everything needed to have it again.

results/RECIPE/VARIANT/ROW.COLUMN.json, where the variant is the budget, and how it was tuned. A
seed is added to the file when its training has ended; nothing else is ever written there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from fedshot.evaluation.episodic_test import HalfWidth
from fedshot.methods import user_methods
from fedshot.methods.registry import METHODS
from fedshot.recipes.provenance import TrainedPart
from fedshot.recipes.recipe import Cell
from fedshot.reports.significance import ComparisonRow, combined
from fedshot.runs.recorder import Round, Seconds
from fedshot.runs.test_protocol import TestProtocol

_NOT_THE_CELL = ("name", "seed")


class _Score(TypedDict):
    """What is relied on in a score, which `right` or `per_episode` completes."""

    accuracy: Share
    interval: HalfWidth
    tasks: str
    transductive: bool
    episodes: Annotated[int, Field(ge=1, lt=2**31)]
    unanswered: Whole
    diverged: Whole
    clients: NotRequired[dict[str, Share]]
    worst_tenth: NotRequired[Share | None]
    per_episode: NotRequired[list[Share]]
    spread: NotRequired[Share | None]


class _CellData(TypedDict):
    name: str
    digest: str
    examples: Whole
    published: Whole | None


class _Pixels(TypedDict):
    accuracy: Share
    interval: HalfWidth


def _checked_look(look: list[Any]) -> list[Any]:
    """Return a look at validation classes. Raises ValueError for anything else."""
    numbers = len(look) == 3 and all(type(value) in (int, float) for value in look)
    if not numbers or type(look[0]) is not int or not 0 <= look[1] <= 1 or not 0 <= look[2] <= 100:
        raise ValueError("expected a round, an accuracy and an interval")
    return look


SharedFeatures: TypeAlias = list[Annotated[list[Any], AfterValidator(_checked_look)]]


class _Seed(TypedDict):
    """What a table relies on of a training."""

    test: _Score
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
    validation: SharedFeatures
    faults: Whole
    skipped: Whole
    made: list[TrainedPart]
    answered: NotRequired[list[TrainedPart]]
    followed: NotRequired[str]
    pixels: NotRequired[_Pixels | Annotated[dict[str, Any], Field(max_length=0)]]


def _checked_seed(one: _Seed) -> _Seed:
    """Return a training. Raises ValueError where its right answers are no accuracies."""
    if "right" in one and not all(0 <= n <= one["queries"] > 0 for n in one["right"]):
        raise ValueError("more right answers than queries")
    return one


class _Cell(TypedDict):
    """What is relied on in the file of a cell."""

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
    """A cell with at least one seed trained.

    Args:
        recipe: the recipe's name.
        variant: budget and tuning, such as "small" or "small-tune4".
        row: key of the method.
        column: key of the column.
        settings: the whole configuration, without name and seed.
        seeds: what each training came to, by seed.
        tuned: the options that tuning chose; None without it.
    """

    recipe: str
    variant: str
    row: str
    column: str
    settings: Settings
    seeds: Mapping[int, Mapping[str, Any]]
    tuned: Mapping[str, Any] | None = None
    path: Path | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """Its cell's name in commands."""
        return f"{self.row}/{self.column}"

    @property
    def method(self) -> str:
        """The method's name in `fedshot methods`."""
        return str(self.settings["method"]["name"])

    @property
    def score(self) -> Mapping[str, Any]:
        """The test score: the mean over seeds, its interval over episodes of that mean."""
        return combined([score_of(one) for _, one in sorted(self.seeds.items())])

    @property
    def first(self) -> Mapping[str, Any]:
        """What does not depend on the seed is read here."""
        return self.seeds[min(self.seeds)]

    def command(self) -> str:
        """Return the command that makes the same numbers again."""
        budget, tuned = split(self.variant)
        words = [
            *user_methods.program(self.method),
            f"reproduce {self.recipe} --cells '{self.key}'",
        ]
        words += [f"--budget {budget}", f"--seeds {max(self.seeds) + 1}"]
        return " ".join(words + ([f"--tune {tuned}"] if tuned else []))


def split(variant: str) -> tuple[str, str]:
    """Return the budget of a variant, and how many trials it has, "" without tuning."""
    budget, _, trials = variant.partition("-tune")
    return budget, trials


class Results:
    """The folder of finished cells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, cell: Cell, variant: str) -> Path:
        """Return where a cell's file is."""
        return self.folder / cell.recipe.name / variant / f"{cell.stem}.json"

    def of(self, cell: Cell, variant: str, chosen: Mapping[str, Any] | None) -> CellResult | None:
        """Return what is finished of a cell as its recipe is today; None when nothing is.

        A file that was made with other settings, because the recipe has changed, is out of date
        and counts for nothing.
        """
        path = self.path(cell, variant)
        found = read(path) if path.exists() else None
        return None if found is None or outdated(found, cell, chosen) else found

    def add(
        self, cell: Cell, variant: str, chosen: Mapping[str, Any] | None, seed: int, facts: Any
    ) -> CellResult:
        """Add a seed to a cell's file and return the cell."""
        path = self.path(cell, variant)
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.lock")):  # others may add seeds of their own
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
        """Return all that is there, in the order of paths."""
        return [read(path) for path in self._files()]

    def readable(self, recipe: str = "*", variant: str = "*") -> list[CellResult]:
        """Return all that can be read: a damaged file is the matter of its own cell."""
        found = []
        for path in self._files(recipe, variant):
            with suppress(CheckpointError):
                found.append(read(path))
        return found

    def _files(self, recipe: str = "*", variant: str = "*") -> list[Path]:
        files = sorted(self.folder.glob(f"{recipe}/{variant}/*.json"))
        return [path for path in files if not path.name.endswith(".tune.json")]


def identity(cell: Cell, chosen: Mapping[str, Any] | None) -> Settings:
    """Return all settings of a cell, defaults included, without name and seed.

    Beside them stands the file of a method of one's own: another one is another method.
    """
    whole = Config.of(cell.settings(0, chosen)).settings
    kept = {key: value for key, value in whole.items() if key not in _NOT_THE_CELL}
    return kept | user_methods.noted(cell.row.method)


def outdated(result: CellResult, cell: Cell, chosen: Mapping[str, Any] | None) -> str | None:
    """Say in which settings a result differs from its cell as it is today; None in none."""
    if cell.row.method not in METHODS:
        return f"there is no method {cell.row.method!r}"
    try:
        return departure(result.settings, identity(cell, chosen))
    except ConfigError as error:  # of a row that was changed to what cannot be
        return f"refused as it is now: {error}"


def departure(held: Settings, now: Settings) -> str | None:
    """Say in which settings a cell, whose identity is `now`, is not what was trained; None in none.

    Options that came later had their defaults.
    """
    return difference(held, now)


def kept(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a worker told, with accuracies of episodes as counts of right answers.

    Where several clients answered an episode its accuracy is their mean, no count, and stays; so it
    does where questions differ in their number of queries, which `queries` of 0 says. What has been
    kept already stays as it is.
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
    """Return the score of one seed as `evaluation.Score` has it."""
    if "right" not in one:
        return dict(one["test"])
    return {**one["test"], "per_episode": [n / one["queries"] for n in one["right"]]}


def row_of(result: CellResult) -> ComparisonRow:
    """Return the row of a cell in a comparison: its seeds, as those of runs are."""
    every = [one for _, one in sorted(result.seeds.items())]
    spent = [(one["bytes_down"], one["bytes_up"], one["seconds"]) for one in every]
    terms = TestProtocol.of(result.settings, {"own": not every[0]["queries"]})
    return ComparisonRow.of_tests(result.key, [score_of(one) for one in every], spent, terms)


def write(path: Path, result: CellResult) -> None:
    """Write a cell's file in one step."""
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
    """Read a cell's file. Raises CheckpointError when it is no such file."""
    path = path.absolute()  # its folders' names are a part of what it says
    if path.name.endswith(".tune.json"):
        raise CheckpointError(
            f"{path} is how a method was tuned, not a cell. Name ROW.COLUMN.json."
        )
    fix = f"{records.COPY}, or remove it and train the cell again"
    tree = records.read(path, _Cell, fix)
    row, column = tree["cell"].split("/")
    found = CellResult(
        tree["recipe"], tree["variant"], row, column, tree["settings"],
        {int(seed): one for seed, one in tree["seeds"].items()}, tree["tuned"], path,
    )  # fmt: skip
    place = (path.parent.parent.name, path.parent.name, path.stem)
    if (found.recipe, found.variant, f"{row}.{column}") != place:
        raise CheckpointError(
            f"{path} is no result of a cell of this name: it holds {found.recipe}, {found.variant},"
            f" {tree['cell']}. {fix}."
        )
    return found


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def _json(tree: Any, depth: int = 0) -> str:
    """Return JSON with one line for each list, so that a file of a thousand counts stays short."""
    if isinstance(tree, dict) and tree:
        pad = " " * (depth + 1)
        lines = [f"{pad}{json.dumps(k)}: {_json(v, depth + 1)}" for k, v in tree.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"
    return json.dumps(tree)
