"""A small run that tests of the API look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

import fedshot as fs

SMALL: dict[str, Any] = {
    "model": {"backbone": {"name": "mlp", "hidden": [16]}},
    "test": {"episodes": 20, "validation_episodes": 10},
    "episode": {"query": 5},
    "run": {"rounds": 3},
    "split": {"base": ["0-4"], "validation": ["5", "6"], "novel": ["7-9"]},
}


@pytest.fixture(scope="session")
def small() -> dict[str, Any]:
    return SMALL


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> fs.TrainingRun:
    folder = tmp_path_factory.mktemp("runs") / "first"
    return fs.train(
        SMALL, data="digits", method="fl_proto", clients=4, way=2, out=folder, progress=False
    )


@pytest.fixture(scope="session")
def second(first: fs.TrainingRun) -> fs.TrainingRun:
    """A run on the same test episodes as the first, whose clients keep models."""
    method = {"name": "fsl_local", "learner_name": "proto", "local_steps": 1}
    folder = Path(first.path.parent / "second")
    return fs.train(
        SMALL, data="digits", method=method, clients=4, way=2, out=folder, progress=False
    )


@pytest.fixture(scope="session")
def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, 8, 8] and labels [n] of some digits."""
    digits = load_digits()
    return (digits.images[:600] * 15).astype(np.uint8), digits.target[:600]
