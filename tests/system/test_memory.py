"""Promise 4: memory does not grow with the number of clients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from .runs import line

PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak(folder: Path, data: Path, clients: int) -> int:
    """Run FSL-local with `clients` private models, 10 sampled a round; return its peak in KiB."""
    settings = {
        "name": f"k{clients}",
        "data": {"name": "npz", "path": str(data)},
        "split": {"base": ["0-4"], "novel": ["5-9"]},
        "partition": {"name": "iid", "clients": clients},
        "episode": {"way": 5, "shot": 1, "query": 1},
        "model": {"backbone": {"name": "conv4", "width": 64}},
        "method": {"name": "fsl_local", "learner_name": "proto", "local_steps": 2},
        "run": {"rounds": 20, "cohort": 10},
        "test": {"episodes": 50, "query": 5},
    }
    config = folder / f"k{clients}.yaml"
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    words = line("run", "--config", config, "--out", folder)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *words], capture_output=True, text=True, check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.slow
def test_ten_thousand_private_models_take_the_memory_of_ten(tmp_path: Path) -> None:
    data = tmp_path / "many.npz"
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(10), 20_000)
    np.savez(data, x=rng.integers(0, 256, (len(y), 8, 8), dtype=np.uint8), y=y)
    few, many = peak(tmp_path, data, 10), peak(tmp_path, data, 10_000)
    print(f"peak {few / 1024:.0f} MiB with 10 clients, {many / 1024:.0f} MiB with 10,000")
    assert many <= 1.1 * few
