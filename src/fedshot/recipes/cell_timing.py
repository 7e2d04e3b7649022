"""Timing two short rounds of a cell, which nobody keeps."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from fedshot.config import settings as trees
from fedshot.config.load import Config
from fedshot.core.errors import FedshotError
from fedshot.recipes import timing
from fedshot.recipes.plan import examples
from fedshot.recipes.recipe import Cell
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun


def measure(cell: Cell, data_dir: str | None) -> dict[str, Any]:
    """Return the seconds of a local step and of a test question, or why there can be none."""
    # As in the process of a cell, which has others beside it.
    settings = trees.merged(timing.short(cell), {"run": {"workers": 1}})
    try:
        setting = PreparedRun(Config.of(settings), data_dir)
        with tempfile.TemporaryDirectory() as place:
            records = list(Experiment(setting, Path(place)).run())
            again = Experiment(setting, Path(place))
            start = time.perf_counter()
            again.answer(setting.test)
            test = time.perf_counter() - start
    except FedshotError as error:
        return {"refused": str(error), "examples": examples(cell.settings()["data"], data_dir)}
    visit = records[-1].seconds / (setting.config.run.cohort or len(setting.clients))
    return {
        "step": visit / timing.steps(settings),
        "question": test / len(setting.test),
        "clients": len(setting.clients),
        "own": setting.own_tests,
    }
