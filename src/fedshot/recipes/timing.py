"""What a cell will take on this machine, from a few rounds of it and not from a guess.

Measurements are kept beside the decoded data, by kind of machine and by what costs time: the seed,
the number of rounds and who holds which sample do not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedshot import storage
from fedshot.config import Config
from fedshot.data import cache
from fedshot.recipes import provenance
from fedshot.recipes.jobs import Job
from fedshot.recipes.recipe import Cell

_FILE = "timings.json"
_START = 4.0  # seconds of a process before its first round: Python, torch, the data
_FREE = ("name", "seed", "partition")


def seconds(cell: Cell) -> float | None:
    """Return what one seed of a cell takes from beginning to end; None when not measured."""
    found = _held().get(key(cell))
    if found is None:
        return None
    config = Config.of(cell.settings())
    rounds = config.run.rounds
    visits = config.run.cohort or int(cell.settings()["partition"].get("clients", found["clients"]))
    looks = 1 + -(-rounds // config.run.validate_every)
    questions = config.test.episodes + looks * config.test.validation_episodes
    total: float = _START + rounds * visits * found["round"] + questions * found["question"]
    return total


def key(cell: Cell) -> str:
    """Return the name of what a cell's time depends on, this machine included."""
    tree = {name: part for name, part in cell.settings().items() if name not in _FREE}
    tree["run"] = {k: v for k, v in tree["run"].items() if k not in ("rounds", "validate_every")}
    here = provenance.machine()
    parts = [tree, *(here[name] for name in ("processor", "cores", "torch", "kernels"))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def jobs(cells: Sequence[Cell], data_dir: str | None) -> Iterator[Job]:
    """Yield a measuring job for each cost among the cells that is not known yet."""
    held, seen = _held(), set()
    for cell in cells:
        name = key(cell)
        if name in held or name in seen:
            continue
        seen.add(name)
        yield Job(name, "measure", short(cell), Path(), data_dir)


def short(cell: Cell) -> dict[str, Any]:
    """Return settings of two rounds of one client, and of a few questions."""
    settings = cell.settings()
    run = settings["run"] | {"rounds": 2, "cohort": 1, "validate_every": 1000}
    test = settings["test"] | {"episodes": 10, "validation_episodes": 2}
    return {**settings, "run": run, "test": test}


def keep(name: str, facts: Mapping[str, Any]) -> None:
    """Remember a measurement."""
    path = cache.default_folder() / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    held = _held() | {name: {k: facts[k] for k in ("round", "question", "clients", "peak")}}
    storage.write_bytes(path, json.dumps(held, indent=1).encode(), sync=False)


def _held() -> dict[str, Any]:
    try:
        text = (cache.default_folder() / _FILE).read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
