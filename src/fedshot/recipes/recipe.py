"""A recipe: one published table or figure as cells that can be trained.

A recipe is a YAML file. Its layers are merged in the order: settings of all cells, of the column,
of the budget, of the row, of the row in the budget. Only a row names a method, and a row can set
nothing else but that method's head and batch norm: within a column every method gets the same data,
clients, test episodes and communication rounds, because there is no place where they could differ.
A row may only stop early, as one that overfits, and its cells are marked.
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

ROW_MAY_SET = ("method", "model.head", "model.norm_policy", "episode.labels")
"""What a row may set: all of it is the method's."""
Kind = Literal["table", "curve", "sweep", "plane", "picture"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_WHICH_DATA = ("name", "variant", "path", "config", "part")  # not how they are cut or embedded
AGAINST = {"megabytes": "", "rounds": "-rounds"}
"""What a table's curves may be drawn against, and what the figure's name ends with."""


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
        stops_after: communication rounds after which it stops where a budget has more.
        tune: its search space, beside the table's.
        departs: how its cells, in every budget, differ from what the paper did.
        trained_as: key of the row whose training is this one's, too: they differ at the test alone.
        trained_in: for columns of which this row's training is that of another column: that one.
        at: the values that it stands for in the panels of a sweep, or of a table's second figure,
            by the name of a panel.
        own: whether it was added to the recipe.
    """

    key: str
    label: str
    settings: Settings
    published: tuple[float | None, ...]
    spread: tuple[float | None, ...]
    exchanges: int = 1
    stops_after: int | None = None
    tune: Mapping[str, Any] = field(default_factory=dict)
    departs: tuple[str, ...] = ()
    trained_as: str | None = None
    trained_in: Mapping[str, str] = field(default_factory=dict)
    at: Mapping[str, float] = field(default_factory=dict)
    own: bool = False

    @property
    def method(self) -> str:
        """The method's name in `fedshot methods`."""
        return str(self.settings["method"]["name"])


@dataclass(frozen=True)
class Budget:
    """How much work: communication rounds for every method alike, and settings that go with it.

    Args:
        name: its name in commands and files.
        exchanges: communication rounds.
        settings: of all cells.
        rows: settings of single rows, by key, such as the round in which a second phase begins;
            those that are trained as such a row have them, too.
        trials_as: the budget in which it is tuned, such as a shorter one; None for itself.
    """

    name: str
    exchanges: int
    settings: Settings
    rows: Mapping[str, Settings] = field(default_factory=dict)
    trials_as: str | None = None


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
        budgets: of fedshot's "paper", "small", and perhaps one on data that everybody has.
        axis: what a curve's x values are.
        departs: how every cell, in every budget, differs from what the paper did.
        against: what a table's validation curves are drawn against, of `AGAINST`, a figure each.
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
    against: tuple[str, ...] = ("megabytes",)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods of its rows, each once."""
        return tuple(dict.fromkeys(row.method for row in self.rows.values()))

    def title_of(self, cells: Iterable[Cell]) -> str:
        """Return the title, which names the data of these cells where they are not the paper's."""
        others = [cell.data for cell in cells if not cell.on_papers_data]
        return "; here on ".join([self.title, *dict.fromkeys(others)])

    @property
    def usual(self) -> str:
        """The budget where none is asked for: "small", or the first."""
        return "small" if "small" in self.budgets else next(iter(self.budgets), "small")

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
    def exchanges(self) -> int:
        """How many communication rounds it trains for: those of the budget, or fewer."""
        return min(self.budget.exchanges, self.row.stops_after or self.budget.exchanges)

    @property
    def stem(self) -> str:
        """Its name in files."""
        return f"{self.row.key}.{self.column.key}"

    @property
    def data(self) -> str:
        """Which data it is of, in words."""
        data = self._layered["data"]
        rest = ", ".join(f"{key} {data[key]}" for key in _WHICH_DATA[1:] if key in data)
        return f"{data['name']} ({rest})" if rest else str(data["name"])

    @property
    def on_papers_data(self) -> bool:
        """Whether the budget leaves the recipe's dataset as it is, the split of its classes too."""
        papers, mine = layered(self.recipe.settings, self.column.settings), self._layered
        return all(
            trees.at(papers, place) == trees.at(mine, place)
            for place in (*(f"data.{key}" for key in _WHICH_DATA), "split")
        )

    @property
    def published(self) -> float | None:
        """The paper's accuracy in percent; None where it is of other data than the cell's."""
        return self.row.published[self._place] if self.on_papers_data else None

    @property
    def spread(self) -> float | None:
        """The paper's own +- in percentage points; None as `published`."""
        return self.row.spread[self._place] if self.on_papers_data else None

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
        tree = self._layered
        for place, value in (chosen or {}).items():
            trees.put(tree, place, value)
        trees.put(tree, "run.rounds", max(1, self.exchanges // self.row.exchanges))
        tree["run"].setdefault("threads", 1)  # several cells at once
        looks = trees.at(tree, "run.validate_every")  # as many for every row
        looks = RunOptions.validate_every if looks is None else looks
        if type(looks) is int and looks:  # what is no number is the configuration's to refuse
            every = looks * self.exchanges // self.budget.exchanges // self.row.exchanges
            trees.put(tree, "run.validate_every", max(1, every))
        return {"name": f"{self.recipe.name}.{self.stem}", "seed": seed, **tree}

    @property
    def _layered(self) -> Settings:
        """What all layers set."""
        return layered(
            self.recipe.settings, self.column.settings, self.budget.settings, self.row.settings,
            self.budget.rows.get(self.row.trained_as or "", {}),
            self.budget.rows.get(self.row.key, {}),
        )  # fmt: skip

    @property
    def _place(self) -> int:
        return list(self.recipe.columns).index(self.column.key)
