"""One line for each recipe: is its data here, do its methods exist, how long will it take?"""

from __future__ import annotations

import argparse
import io
import json
from collections import Counter
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedshot.core.machine import cores
from fedshot.core.text import count
from fedshot.data.sources.publishers import PUBLISHERS
from fedshot.data.sources.verification import published_size
from fedshot.methods.registry import METHODS
from fedshot.recipes import timing
from fedshot.recipes.plan import examples
from fedshot.recipes.recipe import Recipe


@dataclass(frozen=True)
class Line:
    """What the list says of a recipe.

    Args:
        name: the recipe's.
        title: what it is about.
        source: paper and table.
        data: the dataset, and how much of it is here.
        methods: its methods that exist.
        missing: its methods that do not.
        cells: cells whose method exists.
        all_cells: all its cells.
        refused: why cells cannot be formed from the data that is here, and how many.
        seconds: of the cells that can, all seeds; None when one is not measured, or there is none.
    """

    name: str
    title: str
    source: str
    data: str
    methods: tuple[str, ...]
    missing: tuple[str, ...]
    cells: int
    all_cells: int
    refused: dict[str, int]
    seconds: float | None


def overview(
    recipe: Recipe, budget: str, seeds: int, data_dir: str | None, jobs: int | None
) -> Line:
    """Return the line of a recipe; nothing is trained."""
    able = [name for name in recipe.methods if name in METHODS]
    every = recipe.cells(budget) if recipe.rows else []
    ready = [cell for cell in every if cell.row.method in METHODS]
    here = "; ".join(_data(data, data_dir) for data in _datasets(recipe, budget))
    refused = [timing.refused(cell, data_dir) for cell in ready]
    able_now = [cell for cell, why in zip(ready, refused, strict=True) if why is None]
    each = [timing.seconds(cell) for cell in able_now]
    known = [one for one in each if one is not None]
    total: float | None = None
    if each and len(known) == len(each):
        at_once = jobs or max(1, cores() // ready[0].settings()["run"]["threads"])
        total = seeds * sum(known) / at_once
    return Line(
        recipe.name, recipe.title, recipe.source, here, tuple(able),
        tuple(name for name in recipe.methods if name not in METHODS),
        len(ready), len(every), dict(Counter(filter(None, refused))), total,
    )  # fmt: skip


def overview_text(lines: list[Line], options: argparse.Namespace) -> str:
    """Return the list as a table."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("recipe", "what", "data here", "cells", "methods to come", "time"):
        made.add_column(name, overflow="fold", justify="right" if name == "cells" else "left")
    for line in lines:
        cells = f"{line.cells}/{line.all_cells}" if line.all_cells else "picture"
        texts = (line.name, f"{line.title}\n{line.source}", line.data, cells,
                 ", ".join(line.missing) or "-", _time(line))  # fmt: skip
        made.add_row(*(Text(text) for text in texts))
    out = io.StringIO()
    Console(file=out, width=130, color_system=None, force_terminal=False).print(made)
    said = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    said.append(
        "Cells: those whose method exists, of all. Time: of those, budget "
        f"{options.budget or 'small, or the first'}, {count(options.seeds, 'seed')}, on this "
        "machine, from two rounds of each; of those that can be formed from the data here, where "
        "not all can. `--measure` times what says 'not measured'."
    )
    return "\n".join(said)


def overview_json(lines: list[Line]) -> str:
    """Return the list for programs."""
    return json.dumps([asdict(line) for line in lines], indent=1)


def duration(seconds: float) -> str:
    """Return seconds as people say them, e.g. "40 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def _time(line: Line) -> str:
    lacking = sum(line.refused.values())
    if line.cells == lacking:
        return "none can be formed" if line.cells else "-"
    text = "not measured" if line.seconds is None else duration(line.seconds)
    return text + (f"\nfor {line.cells - lacking} of {line.cells}" if lacking else "")


def _datasets(recipe: Recipe, budget: str) -> list[str]:
    """Return the data of all columns, each once, as JSON."""
    if not recipe.rows:
        return [json.dumps(recipe.settings["data"], sort_keys=True)]
    row = next(iter(recipe.rows))
    cells = recipe.cells(budget, [f"{row}/*"])
    found = (json.dumps(cell.settings()["data"], sort_keys=True) for cell in cells)
    return list(dict.fromkeys(found))


def _data(data: str, data_dir: str | None) -> str:
    chosen = json.loads(data)
    source = chosen["name"]
    n, whole = examples(chosen, data_dir), published_size(source)
    if not n:
        return f"{source}: missing"
    if n == whole:
        return f"{source}: all {n:,}"
    if source not in PUBLISHERS:
        return f"{source}: {n:,}"
    return f"{source}: {n:,}" + (f" of {whole:,}" if whole else ", a part")
