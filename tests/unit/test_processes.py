"""Forked workers: who does what, what comes back, and what happens when one of them ends."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedshot import tree
from fedshot.config import Config
from fedshot.errors import ConfigError
from fedshot.fleets import Processes
from fedshot.fleets.crew import Crew, Packet
from fedshot.sections import RunOptions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")


def square(n: int) -> Packet:
    return Packet({"square": n * n, "pid": os.getpid()}, bytes([n % 256]) * n)


def all_of(workers: int, work: Callable[[int], Packet], numbers: list[int]) -> dict[int, Packet]:
    with Crew(workers, work, numbers) as crew:
        return dict(crew)


def children() -> set[int]:
    tasks = Path("/proc/self/task")
    return {int(p) for t in tasks.iterdir() for p in (t / "children").read_text().split()}


@pytest.mark.parametrize("workers", [1, 2, 5, 50])
def test_every_number_is_worked_once_by_another_process(workers: int) -> None:
    before = children()
    found = all_of(workers, square, list(range(40)))
    assert {n: p.head["square"] for n, p in found.items()} == {n: n * n for n in range(40)}
    assert all(p.data == bytes([n % 256]) * n for n, p in found.items())
    pids = {p.head["pid"] for p in found.values()}
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= min(workers, 40)
    assert children() == before


def test_a_packet_larger_than_a_pipe_arrives_whole() -> None:
    big = os.urandom(3 << 20)
    found = all_of(2, lambda n: Packet({}, big[n:]), [0, 1, 2])
    assert all(p.data == big[n:] for n, p in found.items())


def test_many_numbers_wait_for_a_free_worker() -> None:
    """More than a pipe holds, given out as workers ask."""
    found = all_of(2, lambda _: Packet({}, b""), list(range(20_000)))
    assert len(found) == 20_000


def test_a_slow_number_does_not_hold_up_the_others() -> None:
    def slow(n: int) -> Packet:
        time.sleep(0.5 if n == 0 else 0.0)
        return square(n)

    with Crew(2, slow, list(range(20))) as crew:
        order = [n for n, _ in crew]
    assert order[-1] == 0


def test_an_error_is_told_in_the_worker_s_words() -> None:
    def fails(n: int) -> Packet:
        if n == 3:
            raise ValueError("three is one too many")
        return square(n)

    before = children()
    with pytest.raises(RuntimeError, match=r"(?s)in a worker process: .*three is one too many"):
        all_of(2, fails, list(range(6)))
    assert children() == before


def test_a_worker_that_is_killed_is_missed() -> None:
    def dies(n: int) -> Packet:
        if n == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return square(n)

    before = children()
    with pytest.raises(RuntimeError, match="by signal 9, as when memory runs out"):
        all_of(2, dies, [0, 1, 2])
    assert children() == before


def test_who_leaves_early_leaves_no_worker_behind() -> None:
    before = children()
    with Crew(2, lambda n: (time.sleep(60), square(n))[1], [0, 1]):
        assert len(children() - before) == 2
    assert children() == before


def test_ctrl_c_is_for_the_process_that_asked() -> None:
    def hit(n: int) -> Packet:
        os.kill(os.getpid(), signal.SIGINT)
        return square(n)

    assert set(all_of(2, hit, [1, 2])) == {1, 2}


def test_workers_do_without_the_threads_of_the_process_that_forked_them() -> None:
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    torch.set_num_threads(2)
    (torch.randn(400, 400, requires_grad=True) @ torch.randn(400, 400)).sum().backward()

    def work(n: int) -> Packet:
        torch.set_num_threads(1)
        w = torch.ones(300, 300, requires_grad=True)
        (w @ w).sum().backward()
        assert w.grad is not None
        return Packet({"sum": float(w.grad.sum())}, b"")

    try:
        found = all_of(2, work, [1, 2])
    finally:
        stop.set()
        other.join()
        torch.set_num_threads(1)
    assert {p.head["sum"] for p in found.values()} == {2 * 300.0**3}


def test_several_workers_of_several_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.threads is 2 with run\.fleet 'processes'"):
        Processes(None, 2, 2)  # type: ignore[arg-type]


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"forks, and only on Linux; this is darwin"):
        RunOptions(fleet="processes")


def test_a_run_counts_the_same_bytes_and_ends_in_the_same_bits(tmp_path: Path) -> None:
    from fedshot.experiment import Experiment
    from fedshot.setting import Setting

    found = []
    for fleet in ("threads", "processes"):
        config = Config.of({
            "data": "digits", "partition": {"clients": 4}, "method": "f2l",
            "model": {"backbone": {"name": "mlp"}, "head": {"name": "linear", "way": 3}},
            "episode": {"way": 3, "query": 3},
            "test": {"way": 3, "query": 3, "episodes": 4, "validation_episodes": 4},
            "run": {"rounds": 2, "fleet": fleet, "workers": 2, "threads": 1},
        })  # fmt: skip
        folder = tmp_path / fleet
        experiment = Experiment(Setting(config), folder)
        records = [dataclasses.replace(record, seconds=0.0) for record in experiment.run()]
        ledger = json.loads((folder / "ledger.json").read_text())
        found.append((records, ledger, tree.digest(experiment.server)))
    assert found[0] == found[1]
