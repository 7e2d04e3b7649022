"""How long a cell (row and column of a recipe's table) takes, estimated from two measured rounds.

A local update is measured with few steps, and the time of more steps is extrapolated. Measurements
are cached by machine and by settings, except settings that do not affect the measured times: the
seed, the numbers of rounds and local steps, the partition, and the values of step sizes and
weights. A cell that cannot run is cached as "refused", until the number of examples changes.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from functools import cache
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from fedshot.config import settings as trees
from fedshot.config.load import Config
from fedshot.config.schema import RunOptions
from fedshot.core import records, storage
from fedshot.core.errors import CheckpointError, ConfigError, FedshotError
from fedshot.core.locks import locked
from fedshot.core.records import Finite, Whole
from fedshot.evaluation.episodic_test import TestOptions
from fedshot.methods.registry import METHODS
from fedshot.protocol.method import PHASE_OPTIONS
from fedshot.recipes import provenance
from fedshot.recipes.plan import examples
from fedshot.recipes.recipe import Cell
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

_FILE = "step-times.json"
_START = 4.0  # seconds to start a process: Python, torch, the data
_MEASURED_STEPS = 3  # local steps in a measured local update


# Seconds of a "step" (local) and of a "question" (test episode); "own": clients test own classes.
_Cost = TypedDict(  # noqa: UP013
    "_Cost", {"clients": Whole, "step": Finite, "question": Finite, "own": NotRequired[bool]}
)


class _Refused(TypedDict):
    refused: str
    examples: Whole


def measure(cell: Cell, data_dir: str | None) -> dict[str, Any]:
    """Time two short rounds and a short test of a cell (row and column of a recipe's table).

    Returns the seconds of a local step ("step") and of a test episode ("question"), the number of
    clients, and whether they are tested on their own classes. If the cell cannot run, returns why.
    """
    settings = trees.merged(short(cell), {"run": {"workers": 1}})
    try:
        prepared = PreparedRun(Config.of(settings), data_dir)
        with tempfile.TemporaryDirectory() as folder:
            rounds = list(Experiment(prepared, Path(folder)).run())
            trained = Experiment(prepared, Path(folder))
            start = time.perf_counter()
            trained.evaluate(prepared.test)
            test = time.perf_counter() - start
    except FedshotError as error:
        return {"refused": str(error), "examples": examples(cell.settings(), data_dir)}
    update = rounds[-1].seconds / (prepared.config.run.cohort or len(prepared.clients))
    return {
        "step": update / steps(settings),
        "question": test / len(prepared.test),
        "clients": len(prepared.clients),
        "own": prepared.own_tests,
    }


def short(cell: Cell) -> dict[str, Any]:
    """Return settings for two short rounds of one client and a short test of a recipe's cell.

    If every episode is partitioned among all clients, all of them take part.
    """
    settings = cell.settings()
    if "local_steps" in _options(settings):
        few = min(steps(settings), _MEASURED_STEPS)
        settings = {**settings, "method": settings["method"] | {"local_steps": few}}
    resampled = settings.get("partition", {}).get("name") == "resampled"
    run = settings["run"] | {
        "rounds": 2,
        "cohort": None if resampled else 1,
        "validate_every": 1000,
    }
    test = settings.get("test", {}) | {"episodes": 10, "validation_episodes": 2}
    return {**settings, "run": run, "test": test}


def seconds(cell: Cell) -> float | None:
    """Return the estimated seconds that one seed of a cell takes; None if the cell is not measured.

    A cell is one row and column of a recipe's table. Raises ConfigError for invalid options.
    """
    cost = _held().get(key(cell))
    if cost is None or "refused" in cost:
        return None
    settings = cell.settings()
    run, test = _options_of(settings)
    cohort = run.cohort or int(settings.get("partition", {}).get("clients", cost["clients"]))
    validations = 1 + -(-run.rounds // run.validate_every)
    on_test = run.choose == "best_on_test_classes"  # each validation then runs the whole test
    each = test.episodes if on_test else test.validation_episodes
    episodes = test.episodes + validations * each
    if cost.get("own"):  # one episode for each client
        validated = on_test or settings.get("partition", {}).get("validation", 0) > 0
        episodes = cost["clients"] * (1 + validations * validated)
    rounds = 0 if cell.lead else run.rounds  # a cell that shares a training trains no rounds
    work = rounds * cohort * steps(settings) * cost["step"]
    total: float = _START + work + episodes * cost["question"]
    return total


def refused(cell: Cell, data_dir: str | None) -> str | None:
    """Return why a cell of a recipe's table cannot be trained on this machine's data, or None.

    None means that no reason is known. Either the data are missing, or options of the run or of the
    test are invalid, or `measure` failed earlier with the same number of examples.
    """
    settings = cell.settings()
    present = examples(settings, data_dir)
    if not present:
        return f"no data: {settings['data']['name']}"
    try:
        _options_of(settings)  # a measured cell's time may be for other options
    except ConfigError as error:
        return str(error)
    found = _held().get(key(cell), {})
    reason: str | None = found.get("refused") if found.get("examples") == present else None
    return reason


def unknown(cells: Sequence[Cell], data_dir: str | None) -> list[Cell]:
    """Return the cells (rows and columns of a recipe's table) whose time must be measured.

    They have no time in the cache, and their data are in `data_dir`. Of several cells with the same
    cache key, one is returned. Cells cached as "refused" are measured again if the number of
    examples has changed.
    """
    by_key = {key(cell): cell for cell in reversed(cells)}
    return [
        cell
        for name, cell in reversed(by_key.items())
        if (name not in _held() or "refused" in _held()[name]) and refused(cell, data_dir) is None
    ]


def key(cell: Cell) -> str:
    """Return a cell's key in the cache: a hash of the machine and the settings that affect time."""
    settings = cell.settings()
    tree = {k: v for k, v in settings.items() if k not in ("name", "seed", "partition")}
    tree["run"] = {k: v for k, v in tree["run"].items() if k not in ("rounds", "validate_every")}
    method = {k: _without_size(v) for k, v in tree["method"].items() if k != "local_steps"}
    for option in PHASE_OPTIONS:  # counted in rounds, whose number is ignored
        if option in method:
            method[option] = bool(method[option])
    tree["method"] = method
    partition = settings.get("partition", {})
    if few := {name: partition[name] for name in ("way", "shot") if name in partition}:
        tree["dealt"] = few  # number of images of clients that have only a few
    here = _machine()
    parts = [tree, *(here[name] for name in ("processor", "cores", "torch", "kernels"))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def keep(cell: Cell, found: Mapping[str, Any]) -> None:
    """Store what `measure` returned for a cell of a recipe's table in the cache."""
    path = storage.cache_folder() / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{_FILE}.lock")):
        _held.cache_clear()  # another process may have written
        held = _held() | {key(cell): dict(found)}
        storage.write_bytes(path, json.dumps(held, indent=1).encode(), sync=False)
    _held.cache_clear()


def steps(settings: Mapping[str, Any]) -> int:
    """Return the number of steps of a local update; 1 for a method without `local_steps`."""
    default = _options(settings).get("local_steps")
    return int(settings["method"].get("local_steps", default.default if default else 1))


def _options(settings: Mapping[str, Any]) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(METHODS[settings["method"]["name"]])}


def _without_size(value: Any) -> Any:
    """Replace nonzero floats by 1.0: only whether a float is zero affects time."""
    if isinstance(value, Mapping):
        return {name: _without_size(part) for name, part in value.items()}
    return 1.0 if isinstance(value, float) and value else value


def _options_of(settings: Mapping[str, Any]) -> tuple[RunOptions, TestOptions]:
    return _read(json.dumps({part: settings.get(part, {}) for part in ("run", "test")}))


@cache
def _read(parts: str) -> tuple[RunOptions, TestOptions]:
    config = Config.of(json.loads(parts))
    return config.run, config.test


@cache
def _machine() -> dict[str, Any]:
    return provenance.machine()


@cache
def _held() -> dict[str, Any]:
    path = storage.cache_folder() / _FILE
    try:
        found: dict[str, Any] = records.read(path, dict[str, _Cost | _Refused])
    except (OSError, CheckpointError):
        return {}
    return found
