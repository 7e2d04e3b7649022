"""`fedshot.sweep`: what it takes and returns; its machinery is tested with the command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedshot as fs
from fedshot.recipes import cell_worker, sweep_runner, trials
from fedshot.recipes.jobs import Event, Job

LR = "method.optimizer.lr"


@pytest.fixture
def jobs_done(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs of all sweeps, which are run in this process."""
    done = list[Job]()

    def run(jobs: Sequence[Job], most: int | None = None) -> Iterator[Event]:
        for job in jobs:
            done.append(job)
            yield Event(job, "done", cell_worker.execute(job.order()))

    monkeypatch.setattr(trials, "Jobs", run)
    monkeypatch.setattr(sweep_runner, "Jobs", run)
    return done


def test_a_sweep_is_trained_ranked_tested_and_continued(
    small: dict[str, Any], jobs_done: list[Job], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shared: dict[str, Any] = {
        "data": "digits", "method": "fl_proto", "clients": 2, "way": 2, "rounds": 1, "seeds": 2,
        "out": tmp_path / "sweep", "progress": False,
    }  # fmt: skip
    found = fs.sweep(small, {LR: np.array([1e-3, 1e-2])}, **shared)
    assert capfd.readouterr() == ("", "")
    assert [point.rank for point in found.points] == [1, 2]
    assert {point.options[LR] for point in found.points} == {0.001, 0.01}
    first, second = found.points
    assert found.best == first
    assert (first.state, second.test) == ("chosen", None)
    assert [run.finished for run in first.runs] == [True, True]
    scores = [run.result.accuracy for run in first.runs]
    assert first.test == pytest.approx(np.mean(scores))
    assert found.table.to_pandas()["validation"].tolist() == [first.validation, second.validation]
    assert "2 of 2 points finished" in str(found)
    assert (found.path / "table.csv").exists()
    jobs_done.clear()
    more = fs.sweep(small, {LR: "1e-3,1e-2"}, **shared)
    assert (jobs_done, more.points) == ([], found.points)


@pytest.mark.parametrize(
    ("over", "others", "said"),
    [
        ({LR: 0.1}, {}, r"the values of method.optimizer.lr are 0.1; expected a list"),
        ({LR: [object()]}, {}, "has a value of type object"),
        ({LR: "log:1e-4,1e-2"}, {}, "in Python, random=N"),
        ({"method": ["fl_proto"], "method.name": ["fedmeta"]}, {}, "given values twice"),
        ({}, {}, "needs an option with several values"),
        ({LR: [0.1]}, {"data": (np.zeros((2, 8, 8)), [0, 1])}, "data is a tuple in memory"),
        ({LR: [0.1]}, {"seeds": 0}, "seeds is 0; expected 1 or more"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(
    over: dict[str, Any], others: dict[str, Any], said: str, small: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(fs.ConfigError, match=said):
        fs.sweep(small, over, out=tmp_path, progress=False, **{"data": "digits", **others})
