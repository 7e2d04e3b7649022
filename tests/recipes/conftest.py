"""What the tests of recipes share: jobs that are trained in the process of the tests."""

from __future__ import annotations

import json

import pytest

from fedshot.core.errors import FedshotError
from fedshot.recipes import cell_worker, runner, trials
from fedshot.recipes.jobs import Event, Job, Jobs


class JobsHere(Jobs):
    """One job after the other; a worker's order and its answer go through JSON."""

    def _start(self, job: Job) -> None:
        order = json.loads(json.dumps(job.order()))
        try:
            done = cell_worker.execute(order)
            event = Event(job, "done", json.loads(json.dumps(done)))
        except FedshotError as error:
            told = {"reason": str(error), "error": type(error).__name__}
            event = Event(job, "refused", told)
        self._running[job.key] = (job, None)  # type: ignore[assignment]
        self._events.put(event)

    def _has_room(self, job: Job) -> bool:
        return not self._running


@pytest.fixture
def jobs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes start no process for a training."""
    monkeypatch.setattr(cell_worker, "_emit", lambda *_: None)
    for module in (runner, trials):
        monkeypatch.setattr(module, "Jobs", JobsHere)
