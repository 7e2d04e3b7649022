"""What this process does to the machine's memory, and what a fork of it can still do."""

from __future__ import annotations

import multiprocessing
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedshot.config.load import Config
from fedshot.fleets.threads import Threads
from fedshot.runs.prepare import PreparedRun


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
def test_predictions_kept_between_large_blocks_do_not_fragment_memory() -> None:
    """Large blocks between small ones that stay: 400 episodes hold no more than 32 do."""
    code = """
import resource, torch
from fedshot.core.machine import keep_freed_memory
from fedshot.evaluation.raw_baselines import pixel_logits
from fedshot.learners.learner import EvalEpisode
from fedshot.protocol.method import predict_at_server

class Episodes:
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def __getitem__(self, u):
        x, query = (torch.full((300, 32, 32, 3), u % 250, dtype=torch.uint8) for _ in range(2))
        y = torch.arange(5).repeat(60)
        return EvalEpisode(x, y, query, torch.arange(5))

def held(n):
    predict_at_server(pixel_logits, Episodes(n))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

assert keep_freed_memory()
torch.set_num_threads(1)
print(held(32), held(400))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, last = map(int, ran.stdout.split())
    assert last < first + 150


FORKS = "fork" in multiprocessing.get_all_start_methods()


def ends_in_a_fork(work: Callable[[], Any]) -> bool:
    """Whether a forked process does the work; the suite's own limit of time ends a deadlock."""
    child = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    child.start()
    try:
        child.join()
    finally:
        child.kill()
    return child.exitcode == 0


@pytest.mark.skipif(not FORKS, reason="a system without fork")
def test_a_fork_of_a_process_that_computed_with_several_threads_computes_on() -> None:
    config = Config.of(
        {
            "data": {"name": "digits"},
            "partition": {"name": "iid", "clients": 2},
            "episode": {"way": 2, "shot": 1, "query": 2},
            "model": {"backbone": {"name": "conv4", "width": 4}},
            "method": {"name": "fl_proto"},
            "test": {"way": 2, "episodes": 2},
        }
    )
    x = torch.ones(300, 300)

    def compute() -> None:
        torch.set_num_threads(2)
        assert torch.equal(x @ x, torch.full((300, 300), 300.0))
        PreparedRun(config)

    compute()
    assert ends_in_a_fork(compute)


@pytest.mark.skipif(not FORKS, reason="a system without fork")
def test_a_fleet_of_threads_goes_on_in_a_fork() -> None:
    fleet = Threads(None, 2)  # type: ignore[arg-type]

    def count() -> None:
        assert fleet.parallel_map(len, ["a", "bc", "def"]) == [1, 2, 3]

    count()
    assert ends_in_a_fork(count)
