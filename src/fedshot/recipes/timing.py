"""What a cell will take on this machine, from a few rounds of it and not from a guess.

A measured visit has few local steps, and one of many is reckoned from them: a visit of 50 steps of
a ResNet-12 takes minutes. Measurements are kept beside the decoded data, by kind of machine and by
what costs time: the seed, the numbers of rounds and local steps, who holds which sample, and how
large a step size or a weight is, do not. A cell that cannot be formed is kept as such, until there
is more data or less.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from functools import cache
from typing import Any, NotRequired

from typing_extensions import TypedDict

from fedshot.config.load import Config
from fedshot.config.schema import RunOptions
from fedshot.core import records, storage
from fedshot.core.errors import CheckpointError
from fedshot.core.locks import locked
from fedshot.core.records import Finite, Whole
from fedshot.evaluation.episodic_test import TestOptions
from fedshot.methods.registry import METHODS
from fedshot.protocol.method import PHASE_OPTIONS
from fedshot.recipes import provenance
from fedshot.recipes.plan import examples
from fedshot.recipes.recipe import Cell

_FILE = "step-times.json"


class _Cost(TypedDict):
    clients: Whole
    step: Finite
    question: Finite
    own: NotRequired[bool]


class _Refused(TypedDict):
    refused: str
    examples: Whole


_START = 4.0  # seconds of a process before its first round: Python, torch, the data
_FREE = ("name", "seed", "partition")
_STEPS = 3  # local steps of a measured visit


def seconds(cell: Cell) -> float | None:
    """Return what one seed of a cell takes from beginning to end; None when not measured."""
    found = _held().get(key(cell))
    if found is None or "refused" in found:
        return None
    settings = cell.settings()
    run, test = _sizes(json.dumps({part: settings.get(part, {}) for part in ("run", "test")}))
    visits = run.cohort or int(settings["partition"].get("clients", found["clients"]))
    looks = 1 + -(-run.rounds // run.validate_every)
    peeks = run.choose == "best_on_test_classes"  # and every look is at the whole test
    look = test.episodes if peeks else test.validation_episodes
    eval_episodes = test.episodes + looks * look
    if found.get("own"):  # a question for each client
        validated = peeks or settings["partition"].get("validation", 0) > 0
        eval_episodes = found["clients"] * (1 + looks * validated)
    rounds = 0 if cell.lead else run.rounds  # another cell's training is this one's, too
    work = rounds * visits * steps(settings) * found["step"]
    total: float = _START + work + eval_episodes * found["question"]
    return total


def refused(cell: Cell, data_dir: str | None) -> str | None:
    """Return why the cell cannot be formed from the data that is here; None where it can."""
    data = cell.settings()["data"]
    present = examples(data, data_dir)
    if not present:
        return f"no data: {data['name']}"
    found = _held().get(key(cell), {})
    if "refused" not in found or found["examples"] != present:
        return None
    reason: str = found["refused"]
    return reason


def key(cell: Cell) -> str:
    """Return the name of what a cell's time depends on, this machine included."""
    tree = {name: part for name, part in cell.settings().items() if name not in _FREE}
    tree["run"] = {k: v for k, v in tree["run"].items() if k not in ("rounds", "validate_every")}
    method = {k: _without_size(v) for k, v in tree["method"].items() if k != "local_steps"}
    for option in PHASE_OPTIONS:  # of all rounds, whose number does not count either
        if option in method:
            method[option] = bool(method[option])
    tree["method"] = method
    dealt = cell.settings().get("partition", {})
    if own := {name: dealt[name] for name in ("way", "shot") if name in dealt}:
        tree["dealt"] = own  # all that a client holds is a few images of a few classes
    here = _machine()
    parts = [tree, *(here[name] for name in ("processor", "cores", "torch", "kernels"))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def unknown(cells: Sequence[Cell], data_dir: str | None) -> list[Cell]:
    """Return a cell for each cost among those of present data that is not known yet."""
    found = {key(cell): cell for cell in reversed(cells)}
    return [
        cell
        for name, cell in reversed(found.items())
        if (name not in _held() or "refused" in _held()[name]) and refused(cell, data_dir) is None
    ]


def short(cell: Cell) -> dict[str, Any]:
    """Return settings of two short rounds of one client, and of a few questions.

    Where every episode is dealt anew to all clients, all of them take part.
    """
    settings = cell.settings()
    if "local_steps" in _options(settings):
        few = min(steps(settings), _STEPS)
        settings = {**settings, "method": settings["method"] | {"local_steps": few}}
    alone = settings.get("partition", {}).get("name") != "redealt"
    run = settings["run"] | {"rounds": 2, "cohort": 1 if alone else None, "validate_every": 1000}
    test = settings.get("test", {}) | {"episodes": 10, "validation_episodes": 2}
    return {**settings, "run": run, "test": test}


def keep(cell: Cell, found: Mapping[str, Any]) -> None:
    """Remember what was measured of a cell, or why it was refused."""
    path = storage.cache_folder() / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{_FILE}.lock")):  # another process may keep one, too
        held = _read() | {key(cell): dict(found)}
        storage.write_bytes(path, json.dumps(held, indent=1).encode(), sync=False)
    _held.cache_clear()


def steps(settings: Mapping[str, Any]) -> int:
    """Return the local steps of a visit; 1 for a method that has no such option."""
    default = _options(settings).get("local_steps")
    return int(settings["method"].get("local_steps", default.default if default else 1))


def _options(settings: Mapping[str, Any]) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(METHODS[settings["method"]["name"]])}


def _without_size(value: Any) -> Any:
    """Return an option with 1.0 for all numbers that are not whole, but zero: it may save work."""
    if isinstance(value, Mapping):
        return {name: _without_size(part) for name, part in value.items()}
    return 1.0 if isinstance(value, float) and value else value


@cache
def _sizes(parts: str) -> tuple[RunOptions, TestOptions]:
    config = Config.of(json.loads(parts))
    return config.run, config.test


@cache
def _machine() -> dict[str, Any]:
    return provenance.machine()


@cache
def _held() -> dict[str, Any]:
    return _read()


def _read() -> dict[str, Any]:
    try:
        found: dict[str, Any] = records.read(
            storage.cache_folder() / _FILE, dict[str, _Cost | _Refused]
        )
    except (OSError, CheckpointError):
        return {}
    return found
