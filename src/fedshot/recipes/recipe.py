"""A recipe: one published table or figure as cells that can be trained.

A recipe is a YAML file beside this one. Its layers are merged in the order: settings of all cells,
of the column, of the budget, of the row. Only a row names a method, and a row can set nothing else
but that method's head and batch norm: within a column every method gets the same data, clients,
test episodes and communication rounds, because there is no place where they could differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from fedshot import settings as trees
from fedshot.errors import ConfigError, nearest
from fedshot.settings import Settings

ROW_MAY_SET = ("method", "model.head", "model.norm_policy")
"""What a row may set: all of it is the method's."""
Kind = Literal["table", "curve", "sweep", "plane", "picture"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_KEYS = {"title", "source", "kind", "measure", "open", "settings", "columns", "rows", "tune",
         "budgets", "axis", "departs"}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column of a table, or one value on the x axis of a figure."""

    key: str
    label: str
    settings: Settings
    x: float | None = None


@dataclass(frozen=True)
class Row:
    """A method of a table, with what the paper says of it.

    Args:
        key: its name in commands and files.
        label: its name in the paper.
        settings: the method and its hyper-parameters.
        published: accuracy in percent for each column; None where the paper gives none.
        spread: the paper's own +-, likewise.
        exchanges: communication rounds that one round of the method takes.
        tune: its search space, beside the table's.
        departs: how its cells, in every budget, differ from what the paper did.
        trained_as: key of the row whose training is this one's, too: they differ at the test alone.
        trained_in: for columns of which this row's training is that of another column: that one.
        at: the values that it stands for in the panels of a sweep, by the name of a panel.
        own: whether it was added to the recipe.
    """

    key: str
    label: str
    settings: Settings
    published: tuple[float | None, ...]
    spread: tuple[float | None, ...]
    exchanges: int = 1
    tune: Mapping[str, Any] = field(default_factory=dict)
    departs: tuple[str, ...] = ()
    trained_as: str | None = None
    trained_in: Mapping[str, str] = field(default_factory=dict)
    at: Mapping[str, float] = field(default_factory=dict)
    own: bool = False

    @property
    def method(self) -> str:
        """The method's name in `fedshot methods`."""
        chosen = self.settings["method"]
        return str(chosen["name"] if isinstance(chosen, Mapping) else chosen)


@dataclass(frozen=True)
class Budget:
    """How much work: communication rounds for every method alike, and settings that go with it."""

    name: str
    exchanges: int
    settings: Settings


@dataclass(frozen=True)
class Recipe:
    """One table or figure.

    Args:
        name: of its file.
        title: what it is about.
        source: paper, and the number of the table or figure.
        kind: one of `KINDS`: "table"; "curve", its columns values on an axis; "sweep", its rows
            values on one or several axes; "plane", a table of models with two features, drawn as
            well; "picture", which trains nothing.
        measure: what the published numbers are.
        open: what the paper leaves open: what was chosen, and why.
        settings: of every cell.
        columns: its columns, by key.
        rows: its rows, by key.
        tune: the search space that all rows share.
        budgets: "paper", "small", and perhaps one on data that everybody has.
        axis: what a curve's x values are.
        departs: how every cell, in every budget, differs from what the paper did.
    """

    name: str
    title: str
    source: str
    kind: Kind
    measure: str
    open: Mapping[str, str]
    settings: Settings
    columns: Mapping[str, Column]
    rows: Mapping[str, Row]
    tune: Mapping[str, Any]
    budgets: Mapping[str, Budget]
    axis: str = ""
    departs: tuple[str, ...] = ()

    @classmethod
    def load(cls, name: str) -> Recipe:
        """Read a recipe. Raises ConfigError when there is none of that name."""
        if name not in names():
            raise ConfigError(f"there is no recipe {name!r}. {nearest(name, names())}")
        return _loaded(name)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods of its rows, each once."""
        return tuple(dict.fromkeys(row.method for row in self.rows.values()))

    @property
    def source_name(self) -> str:
        """The dataset's name in `fedshot data list`."""
        chosen = self.settings.get("data", "")
        return str(chosen["name"] if isinstance(chosen, Mapping) else chosen)

    def budget(self, name: str) -> Budget:
        """Return a budget. Raises ConfigError when the recipe has none of that name."""
        if name not in self.budgets:
            raise ConfigError(f"{self.name} has no budget {name!r}. {nearest(name, self.budgets)}")
        return self.budgets[name]

    def cells(self, budget: str, patterns: Sequence[str] = ()) -> list[Cell]:
        """Return the cells whose "row/column" fits one of the patterns; all without any.

        Raises ConfigError when a pattern fits none.
        """
        every = [
            Cell(self, row, column, self.budget(budget))
            for row in self.rows.values()
            for column in self.columns.values()
        ]
        for pattern in patterns:
            if not any(fnmatchcase(cell.key, pattern) for cell in every):
                keys = [cell.key for cell in every]
                raise ConfigError(
                    f"no cell of {self.name} fits {pattern!r}. {nearest(pattern, keys)} A star "
                    f"stands for anything, as in '{next(iter(self.rows))}/*'."
                )
        if not patterns:
            return every
        return [c for c in every if any(fnmatchcase(c.key, pattern) for pattern in patterns)]


@dataclass(frozen=True)
class Cell:
    """One number of a table: a method under one setting."""

    recipe: Recipe
    row: Row
    column: Column
    budget: Budget

    @property
    def key(self) -> str:
        """Its name in commands."""
        return f"{self.row.key}/{self.column.key}"

    @property
    def stem(self) -> str:
        """Its name in files."""
        return f"{self.row.key}.{self.column.key}"

    @property
    def published(self) -> float | None:
        """The paper's accuracy in percent."""
        return self.row.published[self._place]

    @property
    def spread(self) -> float | None:
        """The paper's own +- in percentage points."""
        return self.row.spread[self._place]

    @property
    def lead(self) -> Cell | None:
        """The cell whose training is this one's; None for one that is trained itself."""
        row, column = self.recipe.rows[self.row.trained_as or self.row.key], self.column
        column = self.recipe.columns[row.trained_in.get(column.key, column.key)]
        found = replace(self, row=row, column=column)
        return found if found.key != self.key else None

    @property
    def leads(self) -> bool:
        """Whether other cells follow this one."""
        every = self.recipe.cells(self.budget.name)
        return any(cell.lead.key == self.key for cell in every if cell.lead)

    def settings(self, seed: int = 0, chosen: Mapping[str, Any] | None = None) -> Settings:
        """Return the configuration of one training of this cell.

        Args:
            seed: of training and of the partition.
            chosen: what tuning found, by dotted place.
        """
        tree = trees.layered(
            self.recipe.settings, self.column.settings, self.budget.settings, self.row.settings
        )
        for place, value in (chosen or {}).items():
            trees.put(tree, place, value)
        rounds = max(1, self.budget.exchanges // self.row.exchanges)
        trees.put(tree, "run.rounds", rounds)
        looks = trees.at(tree, "run.validate_every")  # as often for every row, by exchanges
        if looks:
            trees.put(tree, "run.validate_every", max(1, looks // self.row.exchanges))
        return {"name": f"{self.recipe.name}.{self.stem}", "seed": seed, **tree}

    @property
    def _place(self) -> int:
        return list(self.recipe.columns).index(self.column.key)


@cache
def names() -> tuple[str, ...]:
    """Return the names of all recipes, in order."""
    files = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))


@cache
def _loaded(name: str) -> Recipe:
    text = _folder().joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return read(name, trees.parse(text, lambda _: False, origin=f"{name}.yaml"))


def read(name: str, tree: Any) -> Recipe:
    """Make a recipe of what its file holds.

    Raises ConfigError when something is missing, unknown or unfair.
    """
    if not isinstance(tree, dict):
        raise ConfigError(f"recipe {name} holds {tree!r:.60}; expected keys and values.")
    unknown = tree.keys() - _KEYS
    if unknown:
        raise ConfigError(f"recipe {name}: {nearest(min(unknown), _KEYS)}")
    kind = tree.get("kind")
    if kind not in KINDS:
        raise ConfigError(f"recipe {name}: kind is {kind!r}; expected one of {', '.join(KINDS)}.")
    columns = {key: _column(key, one) for key, one in (tree.get("columns") or {}).items()}
    recipe = Recipe(
        name=name,
        title=tree["title"],
        source=tree["source"],
        kind=kind,
        measure=tree["measure"],
        open=tree.get("open") or {},
        settings=tree["settings"],
        columns=columns,
        rows={key: row_of(name, key, one, len(columns))
              for key, one in (tree.get("rows") or {}).items()},
        tune=tree.get("tune") or {},
        budgets={key: Budget(key, one["exchanges"], one.get("settings") or {})
                 for key, one in (tree.get("budgets") or {}).items()},
        axis=tree.get("axis", ""),
        departs=tuple(tree.get("departs") or ()),
    )  # fmt: skip
    check(recipe)
    return recipe


def check(recipe: Recipe) -> None:
    """Raise ConfigError for a recipe whose parts do not belong together."""
    name, kind, columns = recipe.name, recipe.kind, recipe.columns
    if kind != "picture" and not (
        recipe.rows and columns and {"paper", "small"} <= recipe.budgets.keys()
    ):
        raise ConfigError(f"recipe {name} needs rows, columns, and the budgets paper and small.")
    for row in (row for row in recipe.rows.values() if row.trained_as):
        lead = recipe.rows.get(str(row.trained_as))
        if lead is None or lead.trained_as or lead.exchanges != row.exchanges:
            raise ConfigError(
                f"recipe {name}, row {row.key} is trained as {row.trained_as!r}; expected another "
                "row of as many exchanges that is trained itself."
            )
    for row in recipe.rows.values():
        for column, there in row.trained_in.items():
            if not {column, there} <= columns.keys() or there in row.trained_in or row.trained_as:
                raise ConfigError(
                    f"recipe {name}, row {row.key} in {column} is trained in {there!r}; expected "
                    "another column in which the row is trained itself."
                )
    if kind == "curve" and not all(column.x is not None for column in columns.values()):
        raise ConfigError(f"recipe {name} is a curve; every column needs an x.")
    for row in recipe.rows.values() if kind == "sweep" else ():
        if not row.at or not all(isinstance(x, int | float) for x in row.at.values()):
            raise ConfigError(
                f"recipe {name} is a sweep, and the at of row {row.key} is {dict(row.at)}; "
                "expected an axis and a number, or several. YAML reads 1e-5 as a word: write "
                "0.00001."
            )


def _column(key: str, tree: Mapping[str, Any]) -> Column:
    return Column(key, tree["label"], tree.get("settings") or {}, tree.get("x"))


def row_of(name: str, key: str, tree: Mapping[str, Any], n: int) -> Row:
    """Return a row of a recipe with n columns. Raises ConfigError for one that is unfair."""
    own, tune = tree.get("settings") or {}, tree.get("tune") or {}
    for place in (*(place for place, _ in trees.flat(own)), *tune):
        if not any(f"{place}.".startswith(f"{may}.") for may in ROW_MAY_SET):
            raise ConfigError(
                f"recipe {name}, row {key} sets {place}; a row may set {', '.join(ROW_MAY_SET)} "
                "alone, so that all methods of a column get the same."
            )
    for place, space in tune.items():
        check_space(f"recipe {name}, row {key}: the search space of {place}", space)
    published, spread = tree.get("published") or [None] * n, tree.get("spread") or [None] * n
    if len(published) != n or len(spread) != n:
        raise ConfigError(f"recipe {name}, row {key} has {len(published)} numbers, {n} columns.")
    return Row(
        key, tree["label"], own, tuple(published), tuple(spread), tree.get("exchanges", 1),
        tune, tuple(tree.get("departs") or ()), tree.get("trained_as"),
        tree.get("trained_in") or {}, tree.get("at") or {},
    )  # fmt: skip


def check_space(what: str, space: Any) -> None:
    """Raise ConfigError unless a search space is one."""
    one = isinstance(space, dict) and len(space) == 1
    if not one or not _is_space(*next(iter(space.items()))):
        raise ConfigError(
            f"{what} is {space!r:.60}; expected {{log: [0.001, 0.1]}}, {{linear: [0, 1]}} or "
            "{choice: [1, 5, 10]}. (YAML reads 1e-3 as a word: write 0.001.)"
        )


def _is_space(kind: Any, values: Any) -> bool:
    if kind == "choice" or not isinstance(values, list):
        return isinstance(values, list) and bool(values)
    if len(values) != 2 or not all(isinstance(x, int | float) for x in values):
        return False
    return (
        kind in ("log", "linear") and (0 if kind == "log" else -math.inf) < values[0] <= values[1]
    )


def _folder() -> Any:
    return resources.files("fedshot.recipes")
