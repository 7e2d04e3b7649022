"""Small real runs on scikit-learn's digits, in this process or through the command line."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from fedshot.config.load import Config
from fedshot.core import storage
from fedshot.runs.checkpoint import Checkpoints
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 6, "alpha": 10.0},
    "episode": {"way": 5, "shot": 1, "query": 5},
    "model": {"backbone": {"name": "mlp", "hidden": [16]}},
    "method": {"name": "fsl_local", "learner_name": "proto", "local_steps": 2},
    "run": {"rounds": 4, "cohort": 4},
    "test": {"episodes": 20, "validation_episodes": 10},
}
"""A method with private state, partial participation, no validation classes."""

CHOOSING: dict[str, Any] = {
    "split": {"base": ["0-4"], "validation": ["5", "6"], "novel": ["7-9"]},
    "test": {"episodes": 20, "validation_episodes": 10, "way": 2},
}
"""With validation classes, so that an earlier round may be chosen."""

OWN: dict[str, Any] = {
    "split": {"base": ["0-9"], "validation": [], "novel": []},
    "partition": {"name": "pathological", "clients": 8, "way": 3, "shot": 8},
    "episode": {"way": 2, "shot": 1, "query": 1},
}
"""Clients that are tested on images of their own classes."""


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of all trees; later ones win."""
    out: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            below = isinstance(value, dict) and isinstance(out.get(key), dict)
            other_kind = below and "name" in value and value["name"] != out[key].get("name")
            out[key] = merged(out[key], value) if below and not other_kind else value
    return out


def experiment(folder: Path, *changes: dict[str, Any]) -> Experiment:
    """Open an experiment on `folder` with SMALL and the changes."""
    return Experiment(PreparedRun(_config(json.dumps(merged(SMALL, *changes)))), folder)


@cache
def _config(text: str) -> Config:
    """Return what is the same for all runs of the same settings, and takes as long as a round."""
    return Config.of(json.loads(text))


def finished(folder: Path, *changes: dict[str, Any]) -> Experiment:
    """Run an experiment to its end."""
    made = experiment(folder, *changes)
    for _ in made.run():
        pass
    return made


def stopped(folder: Path, after: int, *changes: dict[str, Any]) -> Experiment:
    """Run an experiment to the end of a round, and stop there."""
    made = experiment(folder, *changes)
    for record in made.run():
        if record.round == after:
            break
    return made


def written(folder: Path, *changes: dict[str, Any]) -> Path:
    """Write a configuration with SMALL and the changes; return its file."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(merged(SMALL, *changes)), encoding="utf-8")
    return config


def run_words(folder: Path, *changes: dict[str, Any]) -> list[str]:
    """Write a configuration; return the words that run it, in folder / "runs" / "small"."""
    return ["run", "--config", str(written(folder, *changes)), "--out", str(folder / "runs")]


def last_hash(folder: Path) -> str:
    """Return the hash of the last checkpoint: server, ledger, and the chain of private states."""
    checkpoints = Checkpoints(folder / "checkpoints")
    return checkpoints.hash(checkpoints.rounds()[-1])


def last_arrays(folder: Path) -> dict[str, Tensor]:
    """Return the arrays of the last checkpoint: the server's state."""
    checkpoints = Checkpoints(folder / "checkpoints")
    return storage.read(checkpoints.path(checkpoints.rounds()[-1]))[0]


def line(*arguments: object) -> list[str]:
    """Return the words that start fedshot in a process of its own."""
    return [sys.executable, "-m", "fedshot.cli.main", *map(str, arguments)]
