"""A recipe: a published table or figure as a grid of cells; each cell is trained and tested.

A cell is one row (a method) in one column (a setting). A recipe is a YAML file. The settings of a
cell merge those of the recipe, the column, the budget, the row, and the budget's settings for the
row, in this order. Only a row names a method, and it may set only options of that method. All
methods of a column therefore get the same data, clients, test episodes and communication rounds. A
row whose method overfits may stop early; tables mark its cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from fedshot.config import settings as trees
from fedshot.config.registry import layered
from fedshot.config.schema import RunOptions
from fedshot.config.settings import Settings
from fedshot.core.errors import ConfigError, nearest

ROW_MAY_SET = ("method", "model.head", "model.norm_policy", "episode.labels", "aggregate")
"""The settings that a row may change, because they belong to its method."""
ON_FEATURES = "model.backbone"
"""What a row may change, too, if a frozen encoder computes the features of all rows."""
Kind = Literal["table", "curve", "sweep", "scatter", "picture"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_DATASET = ("name", "variant", "path", "config", "part")  # options that select the dataset
AGAINST = {"megabytes": "", "rounds": "-rounds"}
"""x axis of a table's learning curves -> suffix of the figure's file name."""


@dataclass(frozen=True)
class Column:
    """A column of a recipe's table, or a value `x` on the axis of a curve."""

    key: str
    label: str
    settings: Settings
    x: float | None = None


@dataclass(frozen=True)
class Row:
    """A row of a recipe's table: a method, with the paper's numbers."""

    key: str
    label: str  # the method's name in the paper
    settings: Settings  # the method and its options
    published: tuple[float | None, ...]  # accuracy in percent, by column; None if not given
    spread: tuple[float | None, ...]  # the paper's +- in percentage points, by column; or None
    exchanges: int = 1  # communication rounds in one round of the method
    stops_after: int | None = None  # communication rounds, if fewer than the budget's
    tune: Mapping[str, Any] = field(default_factory=dict)  # search space, plus the recipe's
    deviations: tuple[str, ...] = ()  # how the row's cells differ from the paper in every budget
    trained_as: str | None = None  # key of the row whose training this row shares; tests differ
    trained_in: Mapping[str, str] = field(default_factory=dict)  # column -> its training column
    at: Mapping[str, float] = field(default_factory=dict)  # axis (a panel of a sweep) -> x value
    own: bool = False  # whether the user added it

    @property
    def method(self) -> str:
        """The method's name in `fedshot methods`."""
        return str(self.settings["method"]["name"])


@dataclass(frozen=True)
class Budget:
    """A number of communication rounds for every method, and settings that depend on it."""

    name: str
    exchanges: int  # communication rounds
    settings: Settings = field(default_factory=dict)  # settings of all cells
    # Row -> settings, such as the start of a second phase; also for rows `trained_as` the row.
    rows: Mapping[str, Settings] = field(default_factory=dict)
    trials_as: str | None = None  # the budget, usually shorter, of the tuning trials


@dataclass(frozen=True)
class Recipe:
    """A published table or figure.

    Kinds: a "table" may also draw learning curves. In a "curve", the columns are values on an
    axis; in a "sweep", the rows are values on one or more axes. A "scatter" is a table of models
    with two-dimensional features; examples are plotted as points. A "picture" trains nothing.
    """

    name: str
    title: str
    settings: Settings  # settings of all cells
    columns: Mapping[str, Column]
    rows: Mapping[str, Row]
    budgets: Mapping[str, Budget]
    source: str = "no paper"  # the paper and the number of its table or figure
    kind: Kind = "table"
    measure: str = "nothing"  # what the published numbers measure
    # Topic -> what the paper leaves open, what was chosen, and why.
    open: Mapping[str, str] = field(default_factory=dict)
    tune: Mapping[str, Any] = field(default_factory=dict)  # search space of all rows, by key path
    axis: str = ""  # label of a curve's x axis
    deviations: tuple[str, ...] = ()  # how all cells differ from the paper in every budget
    against: tuple[str, ...] = ("megabytes",)  # x axes of a table's learning curves

    @property
    def methods(self) -> tuple[str, ...]:
        """The distinct methods of the recipe's rows."""
        return tuple(dict.fromkeys(row.method for row in self.rows.values()))

    def title_of(self, cells: Iterable[Cell]) -> str:
        """Return the title; if data sets of these cells differ from the paper's, it names them.

        A cell is one row and column of the recipe's table.
        """
        others = [cell.data for cell in cells if not cell.on_papers_data]
        return "; here on ".join([self.title, *dict.fromkeys(others)])

    @property
    def default_budget(self) -> str:
        """The name of the default budget: "small", or else the first budget."""
        return "small" if "small" in self.budgets else next(iter(self.budgets), "small")

    def budget(self, name: str) -> Budget:
        """Return a budget by name. Raises ConfigError if there is none."""
        if name not in self.budgets:
            raise ConfigError(f"{self.name} has no budget {name!r}. {nearest(name, self.budgets)}")
        return self.budgets[name]

    def cells(self, budget: str, patterns: Sequence[str] = ()) -> list[Cell]:
        """Return the cells (rows and columns) whose "row/column" matches a pattern.

        Without patterns, all cells are returned. Raises ConfigError if a pattern matches no cell.
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
                    f"no cell of {self.name} matches {pattern!r}. {nearest(pattern, keys)} Use * "
                    f"for any text, as in '{next(iter(self.rows))}/*'."
                )
        if not patterns:
            return every
        return [c for c in every if any(fnmatchcase(c.key, pattern) for pattern in patterns)]


@dataclass(frozen=True)
class Cell:
    """One number of a table: a row in a column, with a budget."""

    recipe: Recipe
    row: Row
    column: Column
    budget: Budget

    @property
    def key(self) -> str:
        """The cell's name in commands, "row/column"."""
        return f"{self.row.key}/{self.column.key}"

    @property
    def exchanges(self) -> int:
        """The cell's communication rounds: the budget's, or fewer if its row stops early."""
        return min(self.budget.exchanges, self.row.stops_after or self.budget.exchanges)

    @property
    def stem(self) -> str:
        """The cell's name in file names, "row.column"."""
        return f"{self.row.key}.{self.column.key}"

    @property
    def data(self) -> str:
        """The name of the cell's data set, and the options that select it."""
        data = self._layered["data"]
        rest = ", ".join(f"{key} {data[key]}" for key in _DATASET[1:] if key in data)
        return f"{data['name']} ({rest})" if rest else str(data["name"])

    @property
    def on_papers_data(self) -> bool:
        """Whether the cell has the paper's data set and class split; a budget may replace them."""
        papers, mine = layered(self.recipe.settings, self.column.settings), self._layered
        return all(
            trees.at(papers, place) == trees.at(mine, place)
            for place in (*(f"data.{key}" for key in _DATASET), "split")
        )

    @property
    def published(self) -> float | None:
        """The paper's accuracy of this cell in percent; None if the cell has other data."""
        return self.row.published[self._index] if self.on_papers_data else None

    @property
    def spread(self) -> float | None:
        """The paper's +- of this cell in percentage points; None if the cell has other data."""
        return self.row.spread[self._index] if self.on_papers_data else None

    @property
    def lead(self) -> Cell | None:
        """The cell whose trained models this cell tests; None if this cell is trained itself."""
        row, column = self.recipe.rows[self.row.trained_as or self.row.key], self.column
        column = self.recipe.columns[row.trained_in.get(column.key, column.key)]
        found = replace(self, row=row, column=column)
        return found if found.key != self.key else None

    @property
    def leads(self) -> bool:
        """Whether other cells share this cell's training, i.e. test its models."""
        every = self.recipe.cells(self.budget.name)
        return any(cell.lead.key == self.key for cell in every if cell.lead)

    def settings(self, seed: int = 0, chosen: Mapping[str, Any] | None = None) -> Settings:
        """Return the configuration of one training run of this cell (row and column of the table).

        Args:
            seed: seed of the training run and of the partition.
            chosen: options that tuning chose, by dotted key path.
        """
        tree = self._layered
        for place, value in (chosen or {}).items():
            trees.put(tree, place, value)
        trees.put(tree, "run.rounds", max(1, self.exchanges // self.row.exchanges))
        tree["run"].setdefault("threads", 1)  # several cells train at once
        period = trees.at(tree, "run.validate_every")
        period = RunOptions.validate_every if period is None else period
        if type(period) is int and period:  # the configuration refuses other values
            # The period is scaled, so that every row validates equally often.
            period = period * self.exchanges // self.budget.exchanges // self.row.exchanges
            trees.put(tree, "run.validate_every", max(1, period))
        return {"name": f"{self.recipe.name}.{self.stem}", "seed": seed, **tree}

    @property
    def _layered(self) -> Settings:
        return layered(
            self.recipe.settings, self.column.settings, self.budget.settings, self.row.settings,
            self.budget.rows.get(self.row.trained_as or "", {}),
            self.budget.rows.get(self.row.key, {}),
        )  # fmt: skip

    @property
    def _index(self) -> int:
        return list(self.recipe.columns).index(self.column.key)
