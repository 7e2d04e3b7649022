"""Check whether a cell (row and column of a recipe's table) can be trained, and note how it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from fedshot.config import settings as trees
from fedshot.config.load import Config
from fedshot.config.registry import defaults
from fedshot.config.schema import not_honest
from fedshot.core.errors import ConfigError, DataError
from fedshot.core.text import count
from fedshot.data.sources.publishers import PUBLISHERS, published_size
from fedshot.methods.registry import METHODS
from fedshot.methods.user_methods import FILES
from fedshot.recipes.provenance import kinds, versions
from fedshot.recipes.recipe import Cell
from fedshot.recipes.results import CellResult, split
from fedshot.reports.significance import untrained
from fedshot.runs.prepare import PreparedRun, data_digest, read_examples

_NOT_COMPARED = ("name", "seed", "run.rounds", "run.threads", "run.validate_every")


@dataclass(frozen=True)
class Obstacle:
    """Why a cell (row and column of a recipe's table) cannot be trained."""

    kind: Literal["no method", "no data", "too little data", "refused"]
    reason: str


def check_cell(cell: Cell, data_dir: str | None) -> tuple[Obstacle | None, dict[str, Any] | None]:
    """Return (why a cell of a recipe's table cannot be trained, facts about its data); one is None.

    The facts are those of `facts_of`. The data are loaded and partitioned as for training with seed
    0, which takes as long.
    """
    if cell.row.method not in METHODS:
        reason = (
            f"there is no method {cell.row.method!r}. For a method of your own, set "
            f"{FILES}=my_method.py"
        )
        return Obstacle("no method", reason), None
    try:
        config = Config.of(cell.settings())
        read_examples(config, data_dir)
    except DataError as error:
        return Obstacle("no data", str(error)), None
    except ConfigError as error:
        return Obstacle("refused", _refusal(cell, error)), None
    try:
        return None, facts_of(PreparedRun(config, data_dir))
    except DataError as error:
        return Obstacle("too little data", str(error)), None
    except ConfigError as error:
        return Obstacle("refused", str(error)), None


def _refusal(cell: Cell, error: ConfigError) -> str:
    hint = " In a row, set an option to null to remove what the recipe or the budget sets."
    return f"{error}{hint if cell.row.own and 'Remove it' in str(error) else ''}"


def facts_of(prepared: PreparedRun) -> dict[str, Any]:
    """Return facts about a run's data and partition: name, hashes, number of examples, clients.

    They show whether two runs are comparable, and whether the data are complete. "clients" is
    [clients that can form an episode, all clients]; "left_out" says why the others cannot.
    """
    partition = hashlib.sha256()
    for rows in prepared.client_split.train:
        partition.update(len(rows).to_bytes(8, "little") + rows.astype("<i8").tobytes())
    return {
        "data": {
            "name": prepared.dataset.name,
            "digest": prepared.dataset.digest,
            "examples": len(prepared.dataset),
            "published": published_size(prepared.config.settings["data"]["name"]),
        },
        "partition": partition.hexdigest(),
        "clients": [len(prepared.clients), len(prepared.client_split.train)],
        "left_out": {str(c): reason for c, reason in sorted(prepared.left_out.items())},
        "validated": prepared.validation is not None,
    }


def marks(
    cell: Cell, result: CellResult | None = None, facts: Mapping[str, Any] | None = None
) -> list[str]:
    """Return how the conditions of a cell of a recipe's table differ from the paper's, in phrases.

    Args:
        cell: the cell, i.e. a row and a column of the table.
        result: the results of the cell's finished seeds, if any.
        facts: what `facts_of` returned for the cell; used only without a `result`.
    """
    found = [*not_honest(cell.settings()), *cell.recipe.deviations, *cell.row.deviations]
    found += budget_marks(cell)
    if cell.row.own:
        found.insert(0, "a row that was added to the recipe")
    if result is None:
        return found + (data_marks([facts]) if facts else [])
    every = list(result.seeds.values())
    if result.tuned is not None:
        options = ", ".join(f"{place.rpartition('.')[2]} {value}"
                            for place, value in result.tuned.items())  # fmt: skip
        trials = split(result.variant)[1]
        budget = f" of budget {cell.budget.trials_as}" if cell.budget.trials_as else ""
        found.append(f"tuned with {trials} trials{budget}: {options or 'the recipe as it stands'}")
    found += data_marks(every)
    for name, text in (("unanswered", "test episodes without a prediction"),
                       ("diverged", "predictions not finite, counted as wrong")):  # fmt: skip
        total = sum(one["test"][name] for one in every)
        if total:
            found.append(f"{total} {text}")
    found += untrained([one["round"] for one in every if one["rounds"]])
    if any(one["test"]["transductive"] for one in every):
        found.append("transductive: predictions may depend on other queries")
    for name, text in (("followed", "whose rounds are the same"),
                       ("shared", "which has the same settings")):  # fmt: skip
        others = sorted({one[name] for one in every if name in one})
        found += [f"shares the training of {other}, {text}" for other in others]
    if cell.exchanges < cell.budget.exchanges:
        found.append(
            f"stops after {count(cell.exchanges, 'communication round')}; other rows have "
            f"{cell.budget.exchanges:,}"
        )
    times = max(one.get("exchanges", 0) for one in every)
    if times > cell.row.exchanges:
        found.append(
            f"has {count(times, 'exchange')} with its clients in a round, but as many rounds as a "
            f"method with {cell.row.exchanges}"
        )
    for name, text in (("faults", "replies rejected or lost"), ("skipped", "rounds skipped")):
        total = sum(one[name] for one in every)
        if total:
            found.append(f"{total} {text}")
    return found + seed_marks(result) + made_marks(every)


def seed_marks(result: CellResult) -> list[str]:
    """Return notes on missing seeds of a cell, and on seeds that cannot be compared."""
    seeds, found = list(result.seeds), []
    if seeds != list(range(len(seeds))):
        found.append(f"only seeds {', '.join(map(str, seeds))}")
    for name, place in (("test episodes", "test.tasks"), ("data", "data.digest")):
        if len({trees.at(one, place) for one in result.seeds.values()}) > 1:
            found.append(f"NOT ONE CELL: its seeds differ in their {name}")
    return found


def data_marks(every: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes on missing examples, and on clients that cannot form an episode.

    `every` holds what `facts_of` returned for the training run of each seed.
    """
    found = []
    for data in {one["data"]["digest"]: one["data"] for one in every}.values():
        if data["published"] is None and data["name"] not in PUBLISHERS:
            continue  # a user's own data set is complete
        if data["published"] is None:
            found.append(f"data: {data['examples']:,} examples; the whole set is larger")
        elif data["examples"] != data["published"]:
            found.append(f"data: {data['examples']:,} of {data['published']:,} examples")
    able = sorted({one["clients"][0] for one in every})
    if any(one["clients"][0] < one["clients"][1] for one in every):
        number = str(able[0]) if len(able) == 1 else f"{able[0]} to {able[-1]}"
        found.append(f"{number} of {every[0]['clients'][1]} clients can form an episode")
    return found


def made_marks(every: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes on the code and the machines that trained the runs of a cell's seeds.

    `every` holds the facts about the training run of each seed.
    """
    found = []
    # A cell that shares a training has two histories: of its training and of its test.
    histories = [parts for one in every for parts in (one["made"], one.get("answered", []))]
    if any(len(versions(parts)) > 1 or len(kinds(parts)) > 1 for parts in histories):
        found.append("stopped, and resumed with other code or on another machine")
    elif len(versions(part for one in every for part in one["made"])) > 1:
        found.append("seeds trained by several versions of the code")
    parts = [part for history in histories for part in history]
    if any(part["commit"].endswith("+") or part["commit"] == "unknown" for part in parts):
        found.append("trained with code that was not committed")
    if len(kinds(parts)) > 1:
        found.append("seeds trained on several kinds of machine")
    return found


def budget_marks(cell: Cell) -> list[str]:
    """Return how a cell's settings differ from those under the recipe's budget "paper"."""
    paper = cell.recipe.budgets.get("paper")
    if paper is None or cell.budget is paper:
        return []
    found = []
    if cell.budget.exchanges != paper.exchanges:
        found.append(f"{cell.budget.exchanges:,} of {paper.exchanges:,} communication rounds")
    theirs, ours = (replace(cell, budget=budget).settings() for budget in (paper, cell.budget))
    unset = defaults(theirs) | defaults(ours)
    before, now = _by_place(theirs), _by_place(ours)
    for place in sorted(before.keys() | now.keys()):
        old, new = (values.get(place, unset.get(place)) for values in (before, now))
        if old != new:
            was = "not set with the budget paper" if old is None else f"not {_value(old)}"
            found.append(f"{place}: {_value(new)}, {was}")
    return found


def _by_place(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key path; a component such as the backbone stays one value."""
    flat: dict[str, Any] = {}
    tree = {**settings, "model": {**settings.get("model", {})}}
    for place in ("data", "partition", "model.backbone", "model.head", "model.encoder", "method"):
        whole = trees.at(tree, place)
        if isinstance(whole, Mapping) and place != "method":
            flat[place.removeprefix("model.")] = dict(whole)
            trees.put(tree, place, None)
    for place, value in trees.flat(tree):
        if value is not None and place not in _NOT_COMPARED:
            flat[place] = value
    return flat


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        rest = ", ".join(f"{key} {one}" for key, one in value.items() if key != "name")
        return f"{value.get('name', '')} ({rest})" if rest else str(value.get("name", ""))
    return "not set" if value is None else str(value)


def comparable(results: Mapping[str, CellResult]) -> list[str]:
    """Return how the results in one column of a recipe's table differ in what must be equal.

    These are the seeds, the test episodes, the data and the partition.
    """
    found = []
    if len({tuple(result.seeds) for result in results.values()}) > 1:
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


def examples(settings: Mapping[str, Any], data_dir: str | None) -> int:
    """Return the number of examples of the settings' dataset; 0 if the data are missing."""
    return _examples(_data_of(settings), data_dir)


def digest(settings: Mapping[str, Any], data_dir: str | None) -> str | None:
    """Return the hash of the settings' dataset; None if the data or the encoder are missing."""
    return _digest(_data_of(settings), data_dir)


def _data_of(settings: Mapping[str, Any]) -> str:
    """Return the settings of the data and of a frozen encoder, as JSON."""
    encoder = trees.at(settings, "model.encoder")
    part = {"model": {"encoder": encoder}} if encoder else {}
    return json.dumps({"data": settings["data"], **part}, sort_keys=True)


@cache  # each dataset is loaded once
def _examples(settings: str, data_dir: str | None) -> int:
    try:
        return len(read_examples(Config.of(json.loads(settings)), data_dir))
    except (DataError, ConfigError):
        return 0


@cache
def _digest(settings: str, data_dir: str | None) -> str | None:
    try:
        return data_digest(Config.of(json.loads(settings)), data_dir)
    except (DataError, ConfigError):
        return None
