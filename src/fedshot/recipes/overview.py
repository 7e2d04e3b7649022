"""The list of recipes: which data and methods are available, and how long a recipe takes.

A recipe is a published table. A cell is one number of the table: a row in a column.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict, dataclass

from fedshot.config.settings import Settings
from fedshot.core.machine import cores
from fedshot.core.text import count, duration
from fedshot.data.sources.publishers import PUBLISHERS, published_size
from fedshot.methods.registry import METHODS
from fedshot.recipes import timing
from fedshot.recipes.plan import examples
from fedshot.recipes.recipe import Recipe
from fedshot.reports.table import add_row, grid, plain_text


@dataclass(frozen=True)
class Line:
    """The line of one recipe in the list of recipes."""

    name: str
    title: str
    source: str
    data: str  # its data sets, and how much of each is on this machine
    methods: tuple[str, ...]  # those in fedshot or the user's own
    missing: tuple[str, ...]  # those that do not exist
    cells: int  # number of cells whose method exists
    all_cells: int
    refused: dict[str, int]  # reason -> number of cells that cannot be trained on the data here
    seconds: float | None  # for all seeds of the other cells; None if a cell is not timed


def overview(
    recipe: Recipe, budget: str, seeds: int, data_dir: str | None, jobs: int | None
) -> Line:
    """Return the line of a recipe in the list, without training anything.

    The time is estimated for `seeds` seeds and `jobs` processes at once; None for as many processes
    as the cores allow.
    """
    every = recipe.cells(budget) if recipe.rows else []
    ready = [cell for cell in every if cell.row.method in METHODS]
    refused = [timing.refused(cell, data_dir) for cell in ready]
    each = [timing.seconds(c) for c, why in zip(ready, refused, strict=True) if why is None]
    known = [one for one in each if one is not None]
    total: float | None = None
    if each and len(known) == len(each):
        at_once = jobs or max(1, cores() // ready[0].settings()["run"]["threads"])
        total = seeds * sum(known) / at_once
    return Line(
        recipe.name, recipe.title, recipe.source,
        "; ".join(_data(one, data_dir) for one in _datasets(recipe, budget)),
        tuple(name for name in recipe.methods if name in METHODS),
        tuple(name for name in recipe.methods if name not in METHODS),
        len(ready), len(every), dict(Counter(filter(None, refused))), total,
    )  # fmt: skip


def overview_text(lines: list[Line], options: argparse.Namespace) -> str:
    """Return the list as a text table, with a note on the budget and seeds of `options`."""
    columns = ("recipe", "what", "data here", "cells", "missing methods", "time")
    table = grid(columns, left=[name for name in columns if name != "cells"])
    for line in lines:
        cells = f"{line.cells}/{line.all_cells}" if line.all_cells else "picture"
        missing = ", ".join(line.missing) or "-"
        what = f"{line.title}\n{line.source}"
        add_row(table, (line.name, what, line.data, cells, missing, _time(line)))
    text = [line for line in plain_text(table, 130).splitlines() if line]
    text.append(
        "Cells: number of cells whose method exists, and of all cells. Time: estimate for the "
        "cells that can be trained on the data here, with budget "
        f"{options.budget or 'small, or the first'} and {count(options.seeds, 'seed')}, on this "
        "machine, from two rounds of each. `--measure` times the cells that are not measured."
    )
    return "\n".join(text)


def overview_json(lines: list[Line]) -> str:
    """Return the list as JSON."""
    return json.dumps([asdict(line) for line in lines], indent=1)


def _time(line: Line) -> str:
    refused = sum(line.refused.values())
    if line.cells == refused:
        return "none can be formed" if line.cells else "-"
    text = "not measured" if line.seconds is None else duration(line.seconds)
    return text + (f"\nfor {line.cells - refused} of {line.cells}" if refused else "")


def _datasets(recipe: Recipe, budget: str) -> list[Settings]:
    """Return the settings of one cell for each dataset of the recipe."""
    if not recipe.rows:
        return [recipe.settings]
    cells = recipe.cells(budget, [f"{next(iter(recipe.rows))}/*"])
    found = [cell.settings() for cell in cells]
    return list({json.dumps(one["data"], sort_keys=True): one for one in found}.values())


def _data(settings: Settings, data_dir: str | None) -> str:
    source = settings["data"]["name"]
    n, whole = examples(settings, data_dir), published_size(source)
    if not n:
        return f"{source}: missing"
    if n == whole:
        return f"{source}: all {n:,}"
    if source not in PUBLISHERS:
        return f"{source}: {n:,}"
    return f"{source}: {n:,}" + (f" of {whole:,}" if whole else ", a part")
