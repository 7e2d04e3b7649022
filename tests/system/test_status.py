"""`fedshot status`: what is said of runs at any stage."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedshot.cli.main import main
from fedshot.core.locks import only_one
from fedshot.reports.status import Status, runs_below

from .conftest import Trained
from .runs import CHOOSING, experiment, stopped


def records(folder: Path, change: Any) -> None:
    """Replace the records of a run by what is made of them."""
    file = folder / "metrics.jsonl"
    held = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(change(one)) + "\n" for one in held))


def test_every_stage_has_its_name(tmp_path: Path, trained: Trained) -> None:
    half = stopped(tmp_path / "stopped", 2).folder
    untested = trained(tmp_path / "untested")
    ended = trained(tmp_path / "ended")
    experiment(ended).result()
    (trained(tmp_path / "broken") / "config.yaml").write_text("{")
    (trained(tmp_path / "lost") / "config.yaml").unlink()
    (tmp_path / "no run").mkdir()
    (tmp_path / "no run" / "checkpoints").write_text("")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "config.yaml").write_text("run: fast")
    found = [Status.of(run) for run in runs_below(tmp_path)]
    assert [(Path(one.run).name, one.state, one.round) for one in found] == [
        ("broken", "unreadable", -1),
        ("ended", "ended", 4),
        ("lost", "unreadable", -1),
        ("others", "unreadable", -1),
        ("stopped", "stopped", 2),
        ("untested", "untested", 4),
    ]
    assert "has lost its config.yaml" in found[2].why
    assert list(runs_below(half)) == [half]
    assert Status.of(ended).left == Status.of(untested).left == 0


@pytest.mark.parametrize(
    "files",
    [
        {"config.yaml": "run: fast", "result.json": "{}"},
        {"config.yaml": "run: {rounds: many}"},
        {"config.yaml": "run: {id: 3}"},
        {"config.yaml": "run: {rounds: 3}", "result.json": '{"rounds": "x"}'},
        {"config.yaml": "run: {rounds: 3}", "metrics.jsonl": '{"step": 1}\n'},
        {"config.yaml": "[1]"},
    ],
)
def test_folders_of_other_programs_do_not_end_it(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert Status.of(tmp_path).state == "unreadable"


@pytest.mark.skipif(sys.platform == "win32", reason="no process locks files so there")
def test_who_trains_is_known_by_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def free(file: Any) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)

    folder = stopped(tmp_path / "run", 2).folder
    with only_one(folder / ".lock"):
        assert Status.of(folder).state == "training"
    assert Status.of(folder).state == "stopped"
    with (folder / ".lock").open("rb") as file:  # who looks holds it for an instant
        fcntl.flock(file, fcntl.LOCK_SH)
        assert Status.of(folder).state == "stopped"
        monkeypatch.setattr("time.sleep", lambda _: free(file))
        with only_one(folder / ".lock") as held:
            assert held
    monkeypatch.setattr("fedshot.reports.status.in_training", lambda _: None)
    assert Status.of(folder).state == "not ended"


def test_the_time_left_is_that_of_the_last_rounds(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run", 3, {"run": {"rounds": 10}}).folder
    told = iter((None, 10.0, None, 21.0))
    records(folder, lambda one: one | {"elapsed": next(told), "ended": "2026-01-01T02:00:30+00:00"})
    found = Status.of(folder, now=1767232900.0)  # 02:01:40
    assert (found.pace, found.left, found.ago) == (15.5, 7 * 15.5, 70)
    records(folder, lambda one: one | {"elapsed": None, "seconds": 5.0})
    assert Status.of(folder).pace == 5


def test_a_clock_that_is_set_back_shortens_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Back(datetime):
        """A minute earlier each time that it is asked."""

        asked = 0

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            cls.asked += 1
            return datetime(2026, 1, 1, tzinfo=tz) - timedelta(minutes=cls.asked)

    ticks = count()
    monkeypatch.setattr("fedshot.runs.experiment.datetime", Back)
    clocks = SimpleNamespace(monotonic=lambda: 7.0 * next(ticks), perf_counter=time.perf_counter)
    monkeypatch.setattr("fedshot.runs.experiment.time", clocks)
    folder = stopped(tmp_path / "run", 3, {"run": {"rounds": 10}}).folder
    found = Status.of(folder, now=0.0)
    assert (found.pace, found.left, found.ago) == (7, 49, 0)


def test_the_round_that_validation_chose_is_told_and_no_test_score(tmp_path: Path) -> None:
    every = {"run": {"validate_every": 1}}
    honest = Status.of(stopped(tmp_path / "honest", 2, CHOOSING, every).folder)
    assert honest.chosen in (0, 1, 2)
    assert honest.validation is not None
    peeks = {"run": {"validate_every": 1, "choose": "best_on_test_classes"}}
    assert Status.of(stopped(tmp_path / "peeks", 2, CHOOSING, peeks).folder).validation is None
    assert Status.of(stopped(tmp_path / "none", 2).folder).validation is None


def test_the_command_prints_a_line_for_each_run_or_json(
    tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment(trained(tmp_path / "deep" / "below" / "a")).result()
    stopped(tmp_path / "b", 2, {"run": {"unreliable": {"drop": 0.2}, "below_quorum": "skip"}})
    assert main(["status", str(tmp_path), str(tmp_path / "b")]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["state", "round"]
    assert [(line.split()[0], line.split()[1], Path(line.split()[-1]).name) for line in lines] == [
        ("stopped", "2/4", "b"),
        ("ended", "4/4", "a"),
    ]
    assert main(["status", str(tmp_path / "b"), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["state"], one["round"], one["rounds"]) == ("stopped", 2, 4)
    assert one["faults"] > 0


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "a")
    for wrong in (tmp_path / "nowhere", tmp_path / "a" / "config.yaml"):
        assert main(["status", str(tmp_path / "a"), str(wrong)]) == 2
        out, err = capsys.readouterr()
        assert f"there is no run in {wrong}. Name the" in err
        assert out.splitlines()[1].startswith("untested")  # the other run is shown all the same
