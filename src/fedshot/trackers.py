"""Records sent on to TensorBoard, Weights & Biases or MLflow: thin sinks of metrics.jsonl.

The records on the disk stay the truth. A sink is first brought up to them, round by round, from the
last one that it has; so a run that was killed goes on in the same tracked run, each round once. A
round that is repeated after a kill has the same figures and is not sent again.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fedshot import storage
from fedshot.errors import ConfigError
from fedshot.evaluation import Score
from fedshot.recorder import Record, Recorder
from fedshot.settings import Settings, flat

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_PROJECT = "fedshot"
_MARK = "cost/megabytes_down"  # every round has it
_BATCH = 100  # settings that MLflow takes at once
_LONG = 500  # letters of a setting that it takes


class Sink(Protocol):
    """Where figures go. `last` is the last round that it has, -1 for none."""

    last: int

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Take the figures of a round, all or none of them."""
        ...

    def end(self, round: int, values: Mapping[str, float]) -> None:
        """Take the test's figures; those that are there already stay as they are."""
        ...

    def close(self) -> None:
        """Make sure that everything is where it belongs."""
        ...


def check(kind: str) -> None:
    """Refuse a tracker whose package is missing, before anything is done."""
    if importlib.util.find_spec(_PACKAGES[kind]) is None:
        raise ConfigError(
            f"tracker is {kind!r}, and the package {kind} is not installed. Install the extra "
            "`tracking` (pip install 'fedshot[tracking]'), or leave --tracker out."
        )


class Tracker:
    """A run's sink, opened and brought up to the records on the disk before training goes on.

    Args:
        kind: "tensorboard", "wandb" or "mlflow"; None for none.
        folder: the run's.
        name: the run's.
        settings: the whole configuration, shown beside the figures.
        tell: takes a sentence for the person who waits.

    Raises:
        ConfigError: the package is missing, or the tracker refuses.
    """

    def __init__(
        self,
        kind: str | None,
        folder: Path,
        name: str,
        settings: Settings,
        tell: Callable[[str], None],
    ) -> None:
        self._kind, self._folder, self._tell = kind, folder, tell
        self._sink: Sink | None = None
        if kind is None:
            return
        check(kind)
        held = Recorder(folder).records()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._sink = _SINKS[kind](folder, name, dict(flat(settings)))
            for record in held:
                self._send(record)
        except Exception as error:  # each package has errors of its own
            raise ConfigError(
                f"tracker {kind} cannot be opened: {error or type(error).__name__}. Set it up as "
                "its own documentation says, or leave --tracker out."
            ) from error

    def record(self, record: Record) -> None:
        """Send a round, if the sink does not have it."""
        self._try(lambda: self._send(record.to_json()))

    def result(self, score: Score, round: int) -> None:
        """Send the test's score, at the round that was tested."""
        values = {"test/accuracy": score.accuracy, "test/interval": score.interval}
        if score.worst_tenth is not None:
            values["test/worst_tenth"] = score.worst_tenth
        self._try(lambda: self._sink and self._sink.end(round, values))

    def close(self) -> None:
        """Make sure that what was sent is where it belongs."""
        self._try(lambda: self._sink and self._sink.close())
        self._sink = None

    def _send(self, record: Mapping[str, Any]) -> None:
        if self._sink is not None and record["round"] > self._sink.last:
            self._sink.log(record["round"], _figures(record))
            self._sink.last = record["round"]

    def _try(self, action: Callable[[], Any]) -> None:
        """Do it; a tracker that fails under way does not end a training of days."""
        try:
            action()
        except Exception as error:  # each package has errors of its own
            self._sink = None
            self._tell(
                f"tracker {self._kind} failed and is left out from here on ({error}); training "
                f"goes on. `fedshot resume {self._folder} --tracker {self._kind}` sends the rest"
            )


def _figures(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a record by the name they have in every tracker."""
    found = {f"train/{name}": float(value) for name, value in record["metrics"].items()}
    if record["validation"]:
        found["validation/accuracy"] = record["validation"]["accuracy"]
        found["validation/interval"] = record["validation"]["interval"]
    return found | {
        "cost/megabytes_down": record["bytes_down"] / 1e6,
        "cost/megabytes_up": record["bytes_up"] / 1e6,
        "cost/seconds": record["seconds"],
        "faults": float(len(record["faults"])),
    }


class _TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        del name, settings  # the folder's name and config.yaml stand beside the events
        place = folder / "tensorboard"
        held = _tensorboard_steps(place)
        self.last = max(held.get(_MARK, [-1]))
        self._ended = "test/accuracy" in held
        summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        writer: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._summary, self._event = summary, event
        self._writer = writer.EventFileWriter(str(place))

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Write one event, which a reader takes whole or not at all."""
        items = [self._summary.Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        summary = self._summary.Summary(value=items)
        self._writer.add_event(
            self._event.Event(wall_time=time.time(), step=round, summary=summary)
        )
        self._writer.flush()

    def end(self, round: int, values: Mapping[str, float]) -> None:
        """Write the test's figures once."""
        if not self._ended:
            self.log(round, values)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _tensorboard_steps(folder: Path) -> dict[str, list[int]]:
    """Return the rounds of every tag in the event files; a last event cut short is left out."""
    if not folder.exists():
        return {}
    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    seen = module.EventAccumulator(str(folder), size_guidance={module.SCALARS: 0}).Reload()
    return {tag: [e.step for e in seen.Scalars(tag)] for tag in seen.Tags()["scalars"]}


class _Wandb:
    """A run of Weights & Biases. Its id and last round are kept beside the run's records.

    What the service has cannot be asked in its offline mode, so the note says it.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._note = folder / "wandb.json"
        held = _noted(self._note)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT), dir=str(folder), name=name,
            id=held.get("id"), resume="allow", config=dict(settings),
        )  # fmt: skip
        self._id = str(self._run.id)
        self.last = max(int(held.get("round", -1)), int(self._run.step) - 1)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Send a round as a step."""
        self._run.log(dict(values), step=round, commit=True)
        _note(self._note, {"id": self._id, "round": round})

    def end(self, round: int, values: Mapping[str, float]) -> None:
        """Put the test's figures into the summary of the run."""
        self._run.summary.update({**values, "test/round": round})

    def close(self) -> None:
        """Finish this session of the run."""
        self._run.finish()


class _MLflow:
    """A run of MLflow, at $MLFLOW_TRACKING_URI, else in a folder `mlruns` beside the run's."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            # MLflow reads this when a store is opened; a folder is what works without a server.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (folder.resolve().parent / "mlruns").as_uri()
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        note = folder / "mlflow.json"
        self._id = str(_noted(note).get("id", ""))
        if not self._id:
            self._id = self._made(name, settings)
            _note(note, {"id": self._id})
        self.last = max((m.step for m in self._history(_MARK)), default=-1)

    def _made(self, name: str, settings: Mapping[str, Any]) -> str:
        held = self._client.get_experiment_by_name(_PROJECT)
        experiment = held.experiment_id if held else self._client.create_experiment(_PROJECT)
        made = self._client.create_run(experiment, run_name=name).info.run_id
        params = [self._entities.Param(k, str(v)[:_LONG]) for k, v in settings.items()]
        for first in range(0, len(params), _BATCH):
            self._client.log_batch(made, params=params[first : first + _BATCH])
        return str(made)

    def _history(self, name: str) -> list[Any]:
        return list(self._client.get_metric_history(self._id, name))

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Send a round in one request; what `last` is read from goes last."""
        now = int(1000 * time.time())
        order = sorted(values, key=lambda name: name == _MARK)
        metrics = [self._entities.Metric(k, float(values[k]), now, round) for k in order]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, round: int, values: Mapping[str, float]) -> None:
        """Send the test's figures once."""
        if not self._history("test/accuracy"):
            self.log(round, values)
        self._client.set_terminated(self._id)

    def close(self) -> None:
        """Nothing is held open."""


def _noted(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(found)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}). Remove it to begin a new tracked run."
        ) from None


def _note(path: Path, content: Mapping[str, Any]) -> None:
    storage.write_bytes(path, json.dumps(content).encode(), sync=False)


_SINKS: Mapping[str, Any] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _MLflow}
