"""A run that many tests read, continue or damage is trained once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .runs import finished

Trained = Callable[..., Path]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Copy the folder of a finished run without a result to a place, and return that."""
    made: dict[str, Path] = {}

    def copied(folder: Path, *changes: dict[str, Any]) -> Path:
        text = json.dumps(changes)
        if text not in made:
            made[text] = finished(tmp_path_factory.mktemp("trained") / "run", *changes).folder
        return Path(shutil.copytree(made[text], folder))

    return copied
