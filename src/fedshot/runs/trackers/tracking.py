"""Forwarding of records to TensorBoard, Weights & Biases or MLflow.

The records on the disk remain authoritative. When a tracker is opened, it receives the rounds that
it lacks. A run that was killed and resumed continues in the same tracked run. Each round is logged
once: a round that is trained again has the same values and is not sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fedshot.config import settings as trees
from fedshot.config.schema import not_honest
from fedshot.config.settings import Settings, flat
from fedshot.core.errors import ConfigError, check_word
from fedshot.core.extras import require
from fedshot.core.text import typed
from fedshot.evaluation.episodic_test import Score
from fedshot.runs.recorder import Record, Recorder
from fedshot.runs.trackers.mlflow import MLflow
from fedshot.runs.trackers.notes import MARK
from fedshot.runs.trackers.tensorboard import TensorBoard
from fedshot.runs.trackers.wandb import Wandb


class Sink(Protocol):
    """The interface of a tracker; `last` is the last round logged there, -1 if none."""

    last: int

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a round atomically."""
        ...

    def end(self, round: int, values: Mapping[str, float]) -> None:
        """Log the test's metrics, unless they are logged already."""
        ...

    def close(self, *, done: bool) -> None:
        """Flush everything and mark the run as finished if `done`, else as failed."""
        ...


_SINKS: Mapping[str, Callable[[Path, str, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
}


def check(kind: str) -> None:
    """Raise ConfigError if there is no such tracker, or its package is missing."""
    check_word("tracker", kind, _SINKS)
    require("tracking", f"the tracker {kind!r}", kind)


class Tracker:
    """Sends a run's records to a tracker, beginning with those on the disk that the tracker lacks.

    Args:
        kind: "tensorboard", "wandb" or "mlflow"; None for no tracker.
        folder: folder of the run.
        settings: the whole configuration, logged with the metrics.
        tell: called with messages for the user.

    Raises:
        ConfigError: the package is missing, or the tracker cannot be opened.
    """

    def __init__(
        self,
        kind: str | None,
        folder: Path,
        settings: Settings,
        tell: Callable[[str], None],
    ) -> None:
        self._kind, self._folder, self._tell = kind, folder, tell
        self._sink: Sink | None = None
        self._named, self._done = names_of(settings), False
        if kind is None:
            return
        check(kind)
        held = Recorder(folder).records()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            sink = _SINKS[kind](folder, settings["name"], dict(flat(settings)))
            for record in held:
                _send(sink, record, self._named)
        except ConfigError:
            raise
        except Exception as error:  # each package has errors of its own
            raise ConfigError(
                f"tracker {kind} cannot be opened: {error or type(error).__name__}. Set it up as "
                "described in its documentation, or omit the tracker."
            ) from error
        self._sink = sink

    def record(self, record: Record) -> None:
        """Log a round, unless it is logged already."""
        self._try(lambda sink: _send(sink, record.to_json(), self._named))

    def result(self, score: Score, round: int) -> None:
        """Log the test's score at the tested round."""
        values = {"test/accuracy": score.accuracy, "test/interval": score.interval}
        if score.worst_tenth is not None:
            values["test/worst_tenth"] = score.worst_tenth
        named = {self._named(name): value for name, value in values.items()}
        self._try(lambda sink: sink.end(round, named))
        self._done = True

    def close(self) -> None:
        """Flush and close the tracker."""
        self._try(lambda sink: sink.close(done=self._done))
        self._sink = None

    def _try(self, action: Callable[[Sink], None]) -> None:
        """Run an action; a tracker that fails is dropped, and training continues."""
        if self._sink is None:
            return
        try:
            action(self._sink)
        except Exception as error:  # each package has errors of its own
            self._sink = None
            self._tell(
                f"tracker {self._kind} failed and receives nothing more ({error}); training "
                f"continues. `fedshot resume {typed(self._folder)} --tracker {self._kind}` "
                "sends the rest"
            )


def names_of(settings: Settings) -> Callable[[str], str]:
    """Return a function from a metric's name to its name in the tracker.

    If the results are biased, it puts NOT_HONEST/ before the names of validation and test metrics.
    """
    dishonest = bool(not_honest(settings))
    peeks = trees.at(settings, "run.choose") == "best_on_test_classes"

    def named(name: str) -> str:
        part, _, rest = name.partition("/")
        if not dishonest or part not in ("validation", "test"):
            return name
        return f"NOT_HONEST/{'looks_at_test' if peeks and part == 'validation' else part}/{rest}"

    return named


def _send(sink: Sink, record: Mapping[str, Any], named: Callable[[str], str]) -> None:
    """Log a round, unless it is logged already."""
    if record["round"] > sink.last:
        values = {named(name): value for name, value in _metrics(record).items()}
        sink.log(record["round"], values)
        sink.last = record["round"]


def _metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a record, keyed by their names in trackers."""
    found = {f"train/{name}": float(value) for name, value in record["metrics"].items()}
    if record["validation"]:
        found["validation/accuracy"] = record["validation"]["accuracy"]
        found["validation/interval"] = record["validation"]["interval"]
    if "simulated" in record:
        found["cost/simulated_hours"] = record["simulated"] / 3600
    return found | {
        MARK: record["bytes_down"] / 1e6,
        "cost/megabytes_up": record["bytes_up"] / 1e6,
        "cost/seconds": record["seconds"],
        "faults": float(len(record["faults"])),
    }
