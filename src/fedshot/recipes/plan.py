"""What stands in the way of a cell, and what a reader must know of its number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from fedshot.config import settings as trees
from fedshot.config.load import Config
from fedshot.config.registry import defaults
from fedshot.config.schema import not_honest
from fedshot.core.errors import ConfigError, DataError
from fedshot.core.text import count
from fedshot.data.files.places import find_data_dir
from fedshot.data.sources.publishers import PUBLISHERS
from fedshot.data.sources.verification import published_size
from fedshot.methods.registry import METHODS
from fedshot.methods.user_methods import FILES
from fedshot.recipes.provenance import kinds, versions
from fedshot.recipes.recipe import Cell
from fedshot.recipes.results import CellResult, split
from fedshot.runs.prepare import PreparedRun

_SAID_ELSEWHERE = ("name", "seed", "run.rounds", "run.threads", "run.validate_every")


@dataclass(frozen=True)
class Obstacle:
    """Why a cell cannot be trained."""

    kind: Literal["no method", "no data", "too little data", "refused"]
    reason: str


def look(cell: Cell, data_dir: str | None) -> tuple[Obstacle | None, dict[str, Any] | None]:
    """Return what stands in the way of a cell, and the facts of its data when nothing does.

    The data are loaded and dealt as training with seed 0 would, so it takes as long as that.
    """
    if cell.row.method not in METHODS:
        reason = f"there is no method {cell.row.method!r}; one of your own is known by its file, "
        return Obstacle("no method", f"{reason}{FILES}=my_method.py"), None
    try:
        config = Config.of(cell.settings())
        config.data.load(find_data_dir(data_dir))
    except DataError as error:
        return Obstacle("no data", str(error)), None
    except ConfigError as error:
        return Obstacle("refused", _refusal(cell, error)), None
    try:
        return None, facts(PreparedRun(config, data_dir))
    except DataError as error:
        return Obstacle("too little data", str(error)), None
    except ConfigError as error:
        return Obstacle("refused", str(error)), None


def _refusal(cell: Cell, error: ConfigError) -> str:
    """Return what is wrong with a cell; who adds a row of their own can change that row alone."""
    hint = " What a recipe or its budget sets a row takes away with a null."
    return f"{error}{hint if cell.row.own and 'Remove it' in str(error) else ''}"


def facts(setting: PreparedRun) -> dict[str, Any]:
    """Return what says whether two cells are comparable, and whether the data are whole."""
    deal = hashlib.sha256()
    for rows in setting.deal.train:
        deal.update(len(rows).to_bytes(8, "little") + rows.astype("<i8").tobytes())
    return {
        "data": {
            "name": setting.dataset.name,
            "digest": setting.dataset.digest,
            "examples": len(setting.dataset),
            "published": published_size(setting.config.settings["data"]["name"]),
        },
        "partition": deal.hexdigest(),
        "clients": [len(setting.clients), len(setting.deal.train)],
        "left_out": {str(c): reason for c, reason in sorted(setting.left_out.items())},
        "validated": setting.validation is not None,
    }


def marks(
    cell: Cell, result: CellResult | None = None, seen: Mapping[str, Any] | None = None
) -> list[str]:
    """Return what sets a cell's number apart from the paper's, one short phrase each.

    Args:
        cell: the cell.
        result: what is finished of it.
        seen: the facts of its data, while nothing is finished.
    """
    departs = (*cell.recipe.departs, *cell.row.departs)
    found = [*not_honest(cell.settings()), *departs, *budget_marks(cell)]
    if cell.row.own:
        found.insert(0, "a row that was added to the recipe")
    if result is None:
        return found + (data_marks([seen]) if seen else [])
    every = list(result.seeds.values())
    if result.tuned is not None:
        options = ", ".join(f"{place.rpartition('.')[2]} {value}"
                            for place, value in result.tuned.items())  # fmt: skip
        trials = split(result.variant)[1]
        where = cell.budget.trials_as
        length = f" of budget {where}" if where else ""
        found.append(f"tuned with {trials} trials{length}: {options or 'the recipe as it stands'}")
    found += data_marks(every)
    for name, text in (("unanswered", "test episodes without an answer"),
                       ("diverged", "answers that are not finite, counted as wrong")):  # fmt: skip
        total = sum(one["test"][name] for one in every)
        if total:
            found.append(f"{total} {text}")
    if any(one["test"]["transductive"] for one in every):
        found.append("transductive: predictions may depend on other queries")
    led = sorted({one["followed"] for one in every if "followed" in one})
    found += [f"the training of {lead}, whose rounds are the same" for lead in led]
    elsewhere = sorted({one["shared"] for one in every if "shared" in one})
    found += [f"the training of {whose}, which has the same settings" for whose in elsewhere]
    if cell.exchanges < cell.budget.exchanges:
        found.append(
            f"stops after {count(cell.exchanges, 'communication round')} of the "
            f"{cell.budget.exchanges:,} that others have"
        )
    talks = max(one.get("exchanges", 0) for one in every)
    if talks > cell.row.exchanges:
        found.append(
            f"talks to its clients {count(talks, 'time')} in a round, and is given the rounds of a "
            f"method that does so {count(cell.row.exchanges, 'time')}"
        )
    for name, text in (("faults", "replies refused or lost"), ("skipped", "rounds skipped")):
        total = sum(one[name] for one in every)
        if total:
            found.append(f"{total} {text}")
    return found + seed_marks(result) + made_marks(every)


def seed_marks(result: CellResult) -> list[str]:
    """Return what is to be said of which seeds there are, and of what they have in common."""
    seeds, found = sorted(result.seeds), []
    if seeds != list(range(len(seeds))):
        found.append(f"of seeds {', '.join(map(str, seeds))} alone")
    for name, place in (("test episodes", "test.tasks"), ("data", "data.digest")):
        if len({trees.at(one, place) for one in result.seeds.values()}) > 1:
            found.append(f"NOT ONE CELL: its seeds differ in their {name}")
    return found


def data_marks(every: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is missing of the data and of the clients."""
    found = []
    for data in {one["data"]["digest"]: one["data"] for one in every}.values():
        if data["published"] is None and data["name"] not in PUBLISHERS:
            continue  # one's own, all of it
        if data["published"] is None:
            found.append(f"data: {data['examples']:,} examples; the whole set is larger")
        elif data["examples"] != data["published"]:
            found.append(f"data: {data['examples']:,} of {data['published']:,} examples")
    able = sorted({one["clients"][0] for one in every})
    if any(one["clients"][0] < one["clients"][1] for one in every):
        told = str(able[0]) if len(able) == 1 else f"{able[0]} to {able[-1]}"
        found.append(f"{told} of {every[0]['clients'][1]} clients can form an episode")
    return found


def made_marks(every: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is to be said of the code and the machines that trained the seeds."""
    found = []
    # Who trained, and who answered with models that were trained before.
    hands = [hand for one in every for hand in (one["made"], one.get("answered", []))]
    if any(len(versions(hand)) > 1 or len(kinds(hand)) > 1 for hand in hands):
        found.append("stopped, and gone on with under other code or on another machine")
    elif len(versions(part for one in every for part in one["made"])) > 1:
        found.append("seeds by several versions of the code")
    parts = [part for hand in hands for part in hand]
    if any(part["commit"].endswith("+") or part["commit"] == "unknown" for part in parts):
        found.append("made with code that was not committed")
    if len(kinds(parts)) > 1:
        found.append("seeds of several kinds of machine")
    return found


def budget_marks(cell: Cell) -> list[str]:
    """Return how a cell's settings differ from the paper's own."""
    whole = cell.recipe.budgets.get("paper")
    if whole is None or cell.budget is whole:
        return []
    found = []
    if cell.budget.exchanges != whole.exchanges:
        found.append(f"{cell.budget.exchanges:,} of {whole.exchanges:,} communication rounds")
    paper = Cell(cell.recipe, cell.row, cell.column, whole)
    before, now = (_told(one.settings()) for one in (paper, cell))
    unsaid = defaults(paper.settings()) | defaults(cell.settings())
    for part in sorted(before.keys() | now.keys()):
        was, is_now = (told.get(part, unsaid.get(part)) for told in (before, now))
        if was != is_now:
            found.append(f"{part}: {_value(is_now)}, not {_value(was)}")
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


def comparable(results: Mapping[str, CellResult]) -> list[str]:
    """Return how results of one column differ in what must be the same for all of them."""
    found = []
    if len({tuple(sorted(result.seeds)) for result in results.values()}) > 1:
        found.append("rows differ in their seeds")
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
    """Return how many examples of a dataset are here, loading it once; 0 when it is not."""
    return _here(json.dumps(data, sort_keys=True), data_dir)[0]


def digest(data: Any, data_dir: str | None) -> str | None:
    """Return the hash of a dataset, loading it once; None when it is not here."""
    return _here(json.dumps(data, sort_keys=True), data_dir)[1]


@cache  # cells of the same data share one look
def _here(data: str, data_dir: str | None) -> tuple[int, str | None]:
    try:
        found = Config.of({"data": json.loads(data)}).data.load(find_data_dir(data_dir))
    except (DataError, ConfigError):
        return 0, None
    return len(found), found.digest
