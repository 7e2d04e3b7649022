"""The Weights & Biases tracker, online or offline."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshot.runs.trackers.notes import PROJECT, note, noted


class Wandb:
    """A Weights & Biases run.

    Its id and last round are stored beside the run's records, since the offline mode cannot be
    queried.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._path = folder / "wandb.json"
        held = noted(self._path)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), dir=str(folder), name=name,
            id=held.get("id"), resume="allow", config=dict(settings),
        )  # fmt: skip
        self._id = str(self._run.id)
        self.last = max(int(held.get("round", -1)), int(self._run.step) - 1)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Log a round as a step."""
        self._run.log(dict(values), step=round, commit=True)
        note(self._path, {"id": self._id, "round": round})

    def end(self, round: int, values: Mapping[str, float]) -> None:
        """Write the test's metrics into the summary of the run."""
        self._run.summary.update({**values, "test/round": round})

    def close(self, *, done: bool) -> None:
        """Finish the tracked run, as failed unless training is `done`."""
        self._run.finish(exit_code=0 if done else 1)
