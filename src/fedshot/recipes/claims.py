"""The central claims of the papers, and whether the finished cells reproduce them.

`claims.yaml` lists the claims. A claim compares one row of a recipe's table with others, column by
column; each pair (row, column) is a cell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import product
from typing import Literal

from pydantic import TypeAdapter

from fedshot.config import settings as trees
from fedshot.recipes.index import CLAIMS
from fedshot.recipes.results import row_of
from fedshot.recipes.runner import State
from fedshot.reports.significance import Difference, compare

Status = Literal["reproduced", "not shown", "contradicted", "not run"]
STATUS_SYMBOLS: dict[Status, str] = {
    "reproduced": '<circle cx="7" cy="7" r="6" fill="#0a9471"/>',
    "not shown": '<path d="M7 0 14 7 7 14 0 7z" fill="#d9950a"/>',
    "contradicted": '<path d="M2 2 12 12M12 2 2 12" stroke="#d64545" stroke-width="3.5"/>',
    "not run": '<circle cx="7" cy="7" r="5" fill="none" stroke="#767b85" stroke-width="2"/>',
}
"""Status -> its symbol as SVG, in 14 x 14 pixels; symbols differ in colour and shape."""


@dataclass(frozen=True)
class Claim:
    """A paper's claim that a recipe's row `better` has higher accuracies than the rows `worse`."""

    claim: str
    recipe: str
    variant: str  # budget and tuning of the cells
    better: str
    worse: tuple[str, ...]
    columns: tuple[str, ...] = ()  # empty for all columns
    caveat: str = ""


@dataclass(frozen=True)
class Selection:
    """Cells (rows and columns of a recipe's table) that the front page of results shows."""

    title: str
    recipe: str
    variant: str
    columns: tuple[str, ...]
    rows: tuple[str, ...] = ()  # empty for all finished rows


@dataclass(frozen=True, kw_only=True)
class Paper(Selection):
    """A paper: the cells of its recipe that the front page shows, and its claims."""

    source: str
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class Front:
    """The front page of results: the papers, and cells from one recipe's table as a leaderboard."""

    papers: dict[str, Paper]
    leaderboard: Selection


@dataclass(frozen=True)
class ClaimResult:
    """The comparisons that decide a claim: row `better` with each row of `worse`, by column.

    Comparisons with an unfinished cell are left out. `published` holds the paper's differences, in
    percentage points, for columns on the paper's data. `seeds` holds, for each comparison, the
    smaller number of seeds of its two rows. `untrained` counts the comparisons in which validation
    chose round 0 of the better row for every seed.
    """

    claim: Claim
    differences: tuple[Difference, ...]
    published: tuple[float, ...]
    seeds: tuple[int, ...]
    untrained: int = 0

    @property
    def status(self) -> Status:
        """The claim's status.

        "reproduced" if all intervals are above 0; "contradicted" if at least one is below 0 and
        none is above; "not run" without comparisons; else "not shown". A claim is always "not
        shown" if a comparison is of an untrained model, which tells nothing about the method.
        """
        n, above, below = len(self.differences), self.count("above"), self.count("below")
        if not n:
            return "not run"
        if self.untrained:
            return "not shown"
        if above == n:
            return "reproduced"
        return "contradicted" if below and not above else "not shown"

    def count(self, outcome: str) -> int:
        """Return the number of comparisons with this outcome: "above", "below" or "unclear"."""
        return sum(one.outcome == outcome for one in self.differences)


def load() -> Front:
    """Return the content of `claims.yaml`."""
    text = resources.files("fedshot.recipes").joinpath(CLAIMS).read_text(encoding="utf-8")
    tree = trees.parse(text, origin=CLAIMS)
    return TypeAdapter(Front).validate_python(tree)


def check_claim(claim: Claim, cells: Mapping[str, State]) -> ClaimResult:
    """Compare the rows of a claim, column by column.

    `cells` are the finished cells (rows and columns) of the recipe's table in the claim's variant,
    i.e. its budget and tuning. They are keyed by "row/column". Cells trained on different data are
    not compared.
    """
    columns = claim.columns or dict.fromkeys(state.cell.column.key for state in cells.values())
    differences, published, seeds, untrained = [], [], [], 0
    for column, worse in product(columns, claim.worse):
        ours, other = (cells.get(f"{row}/{column}") for row in (claim.better, worse))
        if ours is None or other is None or ours.result is None or other.result is None:
            continue
        if len({one["data"]["digest"] for one in (*ours.finished, *other.finished)}) > 1:
            continue  # a difference would be one between data
        differences.append(compare(row_of(ours.result), row_of(other.result)))
        seeds.append(min(len(ours.finished), len(other.finished)))
        untrained += all(one["round"] == 0 for one in ours.finished)
        if ours.cell.published is not None and other.cell.published is not None:
            published.append(ours.cell.published - other.cell.published)
    return ClaimResult(claim, tuple(differences), tuple(published), tuple(seeds), untrained)
