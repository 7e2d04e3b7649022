"""The MLflow tracker, for a server or a folder."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshot.core.errors import ConfigError
from fedshot.core.regular_files import real_path
from fedshot.runs.trackers.notes import MARK, PROJECT, note, noted, result_name

_BATCH = 100  # maximum number of parameters per request
_LONG = 500  # maximum length of a parameter


class MLflow:
    """An MLflow run at $MLFLOW_TRACKING_URI, else in a folder `mlruns` beside the run's folder."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            # MLflow reads this variable when it opens a store; a folder needs no server.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (real_path(folder).parent / "mlruns").as_uri()
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._error: Any = mlflow.MlflowException
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        path = folder / "mlflow.json"
        self._id = str(noted(path).get("id", ""))
        if not self._id:
            self._id = self._made(name, settings)
            note(path, {"id": self._id})
        else:
            self._reopen(path)
        self.last = max((m.step for m in self._history(MARK)), default=-1)

    def _reopen(self, path: Path) -> None:
        """Continue a run in MLflow. Raises ConfigError if MLflow no longer has it."""
        fix = f"Restore it there, or delete {path} to start a new one."
        try:
            held = self._client.get_run(self._id)
        except self._error as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise ConfigError(f"MLflow has no run {self._id} any more. {fix}") from None
        if held.info.lifecycle_stage == "deleted":
            raise ConfigError(f"run {self._id} was deleted in MLflow. {fix}")
        if held.info.status != "FINISHED":
            self._client.update_run(self._id, status="RUNNING")

    def _made(self, name: str, settings: Mapping[str, Any]) -> str:
        held = self._client.get_experiment_by_name(PROJECT)
        experiment = held.experiment_id if held else self._client.create_experiment(PROJECT)
        made = self._client.create_run(experiment, run_name=name).info.run_id
        params = [self._entities.Param(k, str(v)[:_LONG]) for k, v in settings.items()]
        for first in range(0, len(params), _BATCH):
            self._client.log_batch(made, params=params[first : first + _BATCH])
        return str(made)

    def _history(self, name: str) -> list[Any]:
        return list(self._client.get_metric_history(self._id, name))

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Log a round in one request; the metric `MARK` comes last, and `last` is read from it."""
        now = int(1000 * time.time())
        order = sorted(values, key=lambda name: name == MARK)
        metrics = [self._entities.Metric(k, float(values[k]), now, round) for k in order]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, round: int, values: Mapping[str, float]) -> None:
        """Log the test's metrics, unless this round already has them."""
        if round not in {m.step for m in self._history(result_name(values))}:
            self.log(round, values)
        self._client.set_terminated(self._id)

    def close(self, *, done: bool) -> None:
        """Mark the run as failed if its training did not finish."""
        if not done:
            self._client.set_terminated(self._id, status="FAILED")
