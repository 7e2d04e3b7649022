"""A small recipe on digits, what a worker reports of its cells, and their finished results."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from fedshot.recipes.reading import read
from fedshot.recipes.recipe import Recipe
from fedshot.recipes.results import Results
from fedshot.recipes.runner import RecipeRunner, Request, State

SMALL: dict[str, Any] = {
    "title": "A test",
    "source": "nowhere",
    "kind": "table",
    "measure": "nothing",
    "settings": {
        "data": {"name": "digits"},
        "split": {"base": ["0-2"], "validation": ["3-4"], "novel": ["5-9"]},
        "model": {"backbone": {"name": "mlp", "hidden": [8]}},
        "episode": {"way": 3, "query": 5},
        "partition": {"name": "iid", "clients": 4},
        "test": {"way": 2, "query": 5, "episodes": 10, "validation_episodes": 5},
        "run": {"threads": 1},
    },
    "columns": {
        "one": {"label": "1-shot"},
        "five": {"label": "5-shot", "settings": {"test": {"shot": 5}}},
    },
    "rows": {
        "proto": {
            "label": "FL-Proto",
            "settings": {"method": {"name": "fl_proto"}, "model": {"head": "none"}},
            "published": [50.0, None],
        },
        "local": {
            "label": "Local",
            "settings": {"method": {"name": "fsl_local", "learner_name": "proto"}},
            "published": [40.0, 60.0],
            "spread": [1.5, None],
            "tune": {"method.local_steps": {"choice": [1, 2, 3]}},
        },
    },
    "tune": {"method.optimizer.lr": {"log": [1e-4, 1e-2]}},
    "budgets": {
        "paper": {"exchanges": 10},
        "small": {"exchanges": 2, "settings": {"model": {"backbone": {"hidden": [4]}}}},
    },
}  # fmt: skip


def changed(**parts: Any) -> dict[str, Any]:
    return deepcopy(SMALL) | parts


def example(**parts: Any) -> Recipe:
    return read("t", changed(**parts))


def made(commit: str, cores: int = 2, after: int = -1) -> dict[str, Any]:
    """Who trained a seed, from which round on."""
    machine = {"cores": cores, "machine": "x86", "torch": "2", "processor": "x86",
               "kernels": "compiled"}  # fmt: skip
    return {"after_round": after, "commit": commit, "code": commit, "machine": machine}


def facts(accuracy: float = 0.5, **other: Any) -> dict[str, Any]:
    """What a worker tells of a finished training."""
    each = [accuracy] * 10
    test = {"accuracy": accuracy, "interval": 0.1, "episodes": 10, "unanswered": 0, "diverged": 0,
            "tasks": "abc", "transductive": False, "clients": {}, "worst_tenth": None,
            "confusion": {}, "spread": None, "missing": [], "per_episode": each}  # fmt: skip
    return {
        "test": test, "queries": 10, "round": 2, "rounds": 2, "bytes_down": 10, "bytes_up": 10,
        "seconds": 1.0, "validation": [[0, 0.3, 0.1], [2, 0.4, 0.1]],
        "data": {"name": "digits", "digest": "d", "examples": 1797, "published": 1797},
        "partition": "p", "clients": [4, 4], "left_out": {}, "faults": 0, "skipped": 0,
        "made": [made("0123")], "validated": True, **other,
    }  # fmt: skip


def finished_cells(
    recipe: Recipe, folder: Path, *patterns: str, budget: str = "small"
) -> list[State]:
    """Cells with a finished seed each."""
    results = Results(folder)
    return [
        State(cell, result=results.add(cell, budget, None, 0, facts()))
        for cell in recipe.cells(budget, patterns)
    ]


def runner(recipe: Recipe, folder: Path, *patterns: str, **asked: Any) -> RecipeRunner:
    """A runner of one seed, unless another number is asked for."""
    options: dict[str, Any] = {"seeds": 1, "jobs": 1, "runs": folder / "runs", "results": folder}
    return RecipeRunner(Request(recipe, "small", patterns, **options | asked))
