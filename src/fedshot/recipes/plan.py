"""What stands in the way of a cell, and what a reader must know of its number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedshot import settings as trees
from fedshot.config import Config
from fedshot.data import find_data_dir
from fedshot.errors import ConfigError, DataError
from fedshot.methods import METHODS
from fedshot.recipes.recipe import Cell
from fedshot.recipes.results import Result
from fedshot.setting import Setting

_SAID_ELSEWHERE = ("name", "seed", "run.rounds", "run.threads", "run.validate_every")


@dataclass(frozen=True)
class Obstacle:
    """Why a cell cannot be trained: no such method yet, no data, or too little of it."""

    kind: Literal["no method", "no data", "too little data"]
    reason: str


def obstacle(cell: Cell, data_dir: str | None) -> Obstacle | None:
    """Return what stands in the way of a cell; None when nothing does.

    The data are loaded and dealt as training would, so it takes as long as that.
    """
    if cell.row.method not in METHODS:
        return Obstacle("no method", f"there is no method {cell.row.method!r} yet")
    config = Config.of(cell.settings())
    try:
        config.data.load(find_data_dir(data_dir))
    except (DataError, ConfigError) as error:
        return Obstacle("no data", str(error))
    try:
        Setting(config, data_dir)
    except (DataError, ConfigError) as error:
        return Obstacle("too little data", str(error))
    return None


def marks(cell: Cell, result: Result | None = None) -> list[str]:
    """Return what sets a cell's number apart from the paper's, one short phrase each."""
    found = budget_marks(cell)
    if result is None:
        return found
    facts = list(result.seeds.values())
    first = result.first
    data = first["data"]
    if data["published"] is None:
        found.append(f"data: {data['examples']:,} examples of a set that is larger as published")
    elif data["examples"] != data["published"]:
        found.append(f"data: {data['examples']:,} of {data['published']:,} examples")
    able = sorted({one["clients"][0] for one in facts})
    if any(one["clients"][0] < one["clients"][1] for one in facts):
        told = str(able[0]) if len(able) == 1 else f"{able[0]} to {able[-1]}"
        found.append(f"{told} of {first['clients'][1]} clients can form an episode")
    for name, text in (("unanswered", "test episodes without an answer"),
                       ("diverged", "answers that are not finite, counted as wrong")):  # fmt: skip
        total = sum(one["test"][name] for one in facts)
        if total:
            found.append(f"{total} {text}")
    if first["test"]["transductive"]:
        found.append("transductive: predictions may depend on other queries")
    for name, text in (("faults", "replies refused or lost"), ("skipped", "rounds skipped")):
        total = sum(one[name] for one in facts)
        if total:
            found.append(f"{total} {text}")
    if any(one["commit"].endswith("+") for one in facts):
        found.append("made with code that was not committed")
    return found


def budget_marks(cell: Cell) -> list[str]:
    """Return how a cell's settings differ from the paper's own."""
    whole = cell.recipe.budget("paper")
    if cell.budget is whole:
        return []
    found = []
    if cell.budget.exchanges != whole.exchanges:
        found.append(f"{cell.budget.exchanges:,} of {whole.exchanges:,} communication rounds")
    paper = Cell(cell.recipe, cell.row, cell.column, whole)
    before, now = (_told(one.settings()) for one in (paper, cell))
    for part in sorted(before.keys() | now.keys()):
        if before.get(part) != now.get(part):
            found.append(f"{part}: {_value(now.get(part))}, not {_value(before.get(part))}")
    return found


def _told(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by place; what is chosen by name, such as the backbone, in one piece."""
    flat: dict[str, Any] = {}
    tree = {**settings, "model": {**settings.get("model", {})}}
    for place in ("data", "partition", "model.backbone", "model.head", "method"):
        whole = trees.at(tree, place)
        if isinstance(whole, Mapping) and place != "method":
            flat[place.removeprefix("model.")] = dict(whole)
            trees.put(tree, place, None)
    for place, value in trees.flat(tree):
        if value is not None and place not in _SAID_ELSEWHERE:
            flat[place] = value
    return flat


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        rest = ", ".join(f"{key} {one}" for key, one in value.items() if key != "name")
        return f"{value.get('name', '')} ({rest})" if rest else str(value.get("name", ""))
    return "not set" if value is None else str(value)


def comparable(results: Mapping[str, Result]) -> list[str]:
    """Return how results of one column differ in what must be the same for all of them."""
    found = []
    for name, place in (
        ("test episodes", "test.tasks"),
        ("data", "data.digest"),
        ("partition", "partition"),
    ):
        for seed in sorted({seed for result in results.values() for seed in result.seeds}):
            every = [result.seeds[seed] for result in results.values() if seed in result.seeds]
            held = {trees.at(one, place) for one in every}
            if len(held) > 1:
                found.append(f"rows differ in their {name} at seed {seed}")
    return found


def examples(data: Any, data_dir: str | None) -> int:
    """Return how many examples of a dataset are here, loading it; 0 when it is not."""
    try:
        return len(Config.of({"data": data}).data.load(find_data_dir(data_dir)))
    except (DataError, ConfigError):
        return 0
