"""Records sent on to TensorBoard, Weights & Biases or MLflow: thin sinks of metrics.jsonl.

The records on the disk stay the truth. A sink is first brought up to them, round by round, from the
last one that it has; so a run that was killed goes on in the same tracked run, each round once. A
round that is repeated after a kill has the same figures and is not sent again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fedshot.config import settings as trees
from fedshot.config.schema import not_honest
from fedshot.config.settings import Settings, flat
from fedshot.core.errors import ConfigError
from fedshot.evaluation.episodic_test import Score
from fedshot.runs.recorder import Record, Recorder
from fedshot.runs.trackers.mlflow import MLflow
from fedshot.runs.trackers.notes import MARK
from fedshot.runs.trackers.tensorboard import TensorBoard
from fedshot.runs.trackers.wandb import Wandb


class Sink(Protocol):
    """Where figures go. `last` is the last round that it has, -1 for none."""

    last: int

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Take the figures of a round, all or none of them."""
        ...

    def end(self, round: int, values: Mapping[str, float]) -> None:
        """Take the test's figures; those that are there already stay as they are."""
        ...

    def close(self, *, done: bool) -> None:
        """Make sure that everything is where it belongs; `done` where the training has ended."""
        ...


_SINKS: Mapping[str, Callable[[Path, str, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
}


def check(kind: str) -> None:
    """Refuse a tracker whose package is missing, before anything is done."""
    if importlib.util.find_spec(kind) is None:
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
        self._named, self._done = names_of(settings), False
        if kind is None:
            return
        check(kind)
        held = Recorder(folder).records()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            sink = _SINKS[kind](folder, name, dict(flat(settings)))
            for record in held:
                _send(sink, record, self._named)
        except ConfigError:
            raise
        except Exception as error:  # each package has errors of its own
            raise ConfigError(
                f"tracker {kind} cannot be opened: {error or type(error).__name__}. Set it up as "
                "its own documentation says, or leave --tracker out."
            ) from error
        self._sink = sink

    def record(self, record: Record) -> None:
        """Send a round, if the sink does not have it."""
        self._try(lambda sink: _send(sink, record.to_json(), self._named))

    def result(self, score: Score, round: int) -> None:
        """Send the test's score, at the round that was tested."""
        values = {"test/accuracy": score.accuracy, "test/interval": score.interval}
        if score.worst_tenth is not None:
            values["test/worst_tenth"] = score.worst_tenth
        named = {self._named(name): value for name, value in values.items()}
        self._try(lambda sink: sink.end(round, named))
        self._done = True

    def close(self) -> None:
        """Make sure that what was sent is where it belongs."""
        self._try(lambda sink: sink.close(done=self._done))
        self._sink = None

    def _try(self, action: Callable[[Sink], None]) -> None:
        """Do it; a tracker that fails under way does not end a training of days."""
        if self._sink is None:
            return
        try:
            action(self._sink)
        except Exception as error:  # each package has errors of its own
            self._sink = None
            self._tell(
                f"tracker {self._kind} failed and is left out from here on ({error}); training "
                f"goes on. `fedshot resume {self._folder} --tracker {self._kind}` sends the rest"
            )


def names_of(settings: Settings) -> Callable[[str], str]:
    """Return what a figure is called in a tracker: what no honest run may report says so."""
    dishonest = bool(not_honest(settings))
    peeks = trees.at(settings, "run.choose") == "best_on_test_classes"

    def named(name: str) -> str:
        part, _, rest = name.partition("/")
        if not dishonest or part not in ("validation", "test"):
            return name
        return f"NOT_HONEST/{'looks_at_test' if peeks and part == 'validation' else part}/{rest}"

    return named


def _send(sink: Sink, record: Mapping[str, Any], named: Callable[[str], str]) -> None:
    """Send a round, if the sink does not have it."""
    if record["round"] > sink.last:
        figures = {named(name): value for name, value in _figures(record).items()}
        sink.log(record["round"], figures)
        sink.last = record["round"]


def _figures(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a record by the name they have in every tracker."""
    found = {f"train/{name}": float(value) for name, value in record["metrics"].items()}
    if record["validation"]:
        found["validation/accuracy"] = record["validation"]["accuracy"]
        found["validation/interval"] = record["validation"]["interval"]
    return found | {
        MARK: record["bytes_down"] / 1e6,
        "cost/megabytes_up": record["bytes_up"] / 1e6,
        "cost/seconds": record["seconds"],
        "faults": float(len(record["faults"])),
    }
