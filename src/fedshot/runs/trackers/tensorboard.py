"""The TensorBoard tracker."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshot.runs.trackers.notes import MARK, result_name


class TensorBoard:
    """Writes event files into the run's folder; `tensorboard --logdir runs` shows them."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        del name, settings  # the run's folder has them
        place = folder / "tensorboard"
        held = _steps(place)
        self.last = max(held.get(MARK, [-1]))
        self._held = held
        summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        writer: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._summary, self._event = summary, event
        self._writer = writer.EventFileWriter(str(place))

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Write a round as one event, so that readers see all of its metrics or none."""
        items = [self._summary.Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        summary = self._summary.Summary(value=items)
        self._writer.add_event(
            self._event.Event(wall_time=time.time(), step=round, summary=summary)
        )
        self._writer.flush()

    def end(self, round: int, values: Mapping[str, float]) -> None:
        """Write the test's metrics, unless this round already has them."""
        if round not in self._held.get(result_name(values), []):
            self.log(round, values)

    def close(self, *, done: bool) -> None:
        """Close the event file."""
        del done
        self._writer.close()


def _steps(folder: Path) -> dict[str, list[int]]:
    """Return the rounds of every tag in the event files, without an incomplete last event."""
    if not folder.exists():
        return {}
    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    seen = module.EventAccumulator(str(folder), size_guidance={module.SCALARS: 0}).Reload()
    return {tag: [e.step for e in seen.Scalars(tag)] for tag in seen.Tags()["scalars"]}
