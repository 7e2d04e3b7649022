"""The processes fleet: the bits of one client after another, and no process that stays behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from conformance.cases import METHODS, WHOLE
from fedshot.config.schema import RunOptions
from fedshot.conformance import checks
from fedshot.conformance.checks import Runs
from fedshot.conformance.federation import Federation, FleetCase
from fedshot.core.errors import ConfigError, WorkerError
from fedshot.fleets.worker_processes import Processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes need Linux")
PROCESSES = FleetCase("processes", lambda host: Processes(host, 2))


def begin(name: str, folder: Path) -> Federation:
    return Federation(METHODS[name], PROCESSES, folder)


def forked(run: Any) -> list[Any]:
    """Return the workers of the fleet inside its wrappers."""
    fleet = run.fleet
    while not isinstance(fleet, Processes):
        fleet = fleet.fleet
    return fleet._forked


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "synthetic" else pytest.mark.slow) for n in sorted(WHOLE)],
)
def test_results_are_those_of_one_client_after_another(name: str, tmp_path: Path) -> None:
    folders = (tmp_path / str(i) for i in count())
    checks.a_fleet_equals_the_reference(Runs(METHODS[name], PROCESSES, lambda: next(folders)), 2)


def test_an_error_of_a_client_is_raised_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin("synthetic", tmp_path)

    def train(*_: Any) -> Any:
        raise ZeroDivisionError("a bug in a client function")

    train.draw = type(run.method).train.draw  # type: ignore[attr-defined]
    monkeypatch.setattr(type(run.method), "train", train)
    with pytest.raises(ZeroDivisionError, match="a bug in a client function"):
        run.train(1)


def test_a_killed_process_is_reported_and_the_next_round_has_new_ones(tmp_path: Path) -> None:
    run = begin("synthetic", tmp_path)
    run.train(1)
    first, *_ = workers = list(forked(run))
    os.kill(first.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"exit code -9\. Memory was probably short"):
        run.train(1)
    assert not forked(run)
    assert all(not worker.process.is_alive() for worker in workers)


def test_no_process_outlives_its_fleet(tmp_path: Path) -> None:
    run = begin("synthetic", tmp_path)
    run.train(1)
    workers = list(forked(run))
    assert len(workers) == 2
    del run
    gc.collect()
    assert all(not worker.process.is_alive() for worker in workers)


@pytest.mark.slow
def test_no_process_outlives_a_killed_run(tmp_path: Path) -> None:
    script = (
        "import fedshot; fedshot.train(data='digits', method='fl_proto', way=5, rounds=100000, "
        f"run={{'fleet': 'processes', 'workers': 2}}, out={str(tmp_path / 'run')!r})"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL) as run:
        limit = time.monotonic() + 60
        while len(workers := children(run.pid)) < 2 and time.monotonic() < limit:
            time.sleep(0.1)
        run.kill()
    assert len(workers) == 2
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in found.read_text().split()] if found.exists() else []


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"run\.fleet is 'processes', which needs Linux"):
        RunOptions(fleet="processes")
