"""One training round of FL-Proto on every dataset with its paper's backbone: seconds and memory.

    python benchmarks/first_round.py --data-dir DATA

Ten clients (five for Sent140), one local step each, 5-way 1-shot (2-way for Sent140) with 15
queries a class, two threads; each set in a process of its own. Seconds are of the round alone;
memory is the peak of the process, loading included. `--only NAME` runs one.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WIDE = {"name": "resnet12", "widths": [64, 160, 320, 640]}
WORDS = {"name": "bilstm", "hidden": 50, "pooling": "attention"}
TEN = {"name": "dirichlet", "clients": 10, "alpha": 1.0}
SETS: dict[str, dict[str, Any]] = {
    "omniglot": {
        "data": "omniglot",
        "model": {"backbone": {"name": "conv4", "width": 64}},
        "partition": {"name": "classes", "clients": 10},
    },
    "fc100": {"data": {"name": "cifar100", "variant": "fc100"}, "model": {"backbone": WIDE}},
    "cifar_fs": {"data": {"name": "cifar100", "variant": "cifar_fs"}, "model": {"backbone": WIDE}},
    "mini_imagenet": {"data": "mini_imagenet", "model": {"backbone": WIDE}},
    "mini_imagenet, conv4": {
        "data": "mini_imagenet",
        "model": {"backbone": {"name": "conv4", "width": 32}},
    },
    "mnist": {"data": "mnist", "model": {"backbone": {"name": "conv4", "width": 64}}},
    "news20": {"data": "news20", "model": {"backbone": WORDS}},
    "huffpost": {"data": "huffpost", "model": {"backbone": WORDS}},
    "sent140": {
        "data": "sent140",
        "split": {"users": [0.6, 0.2, 0.2]},
        "partition": {"name": "users", "clients": 5},
        "episode": {"way": 2},
        "test": {"way": 2},
        "model": {"backbone": {"name": "gru", "hidden": 128}},
    },
}


ROUND: dict[str, Any] = {
    "partition": TEN,
    "episode": {},
    "method": {"name": "fl_proto", "local_steps": 1},
    "run": {"rounds": 1, "threads": 2, "infeasible_clients": "leave_out", "validate_every": 100},
    "test": {"episodes": 2, "validation_episodes": 2},
}


def settings(name: str) -> dict[str, Any]:
    """Return what is measured of a set; the tests on real data run the same with two clients."""
    own = SETS[name]
    model, test = own["model"] | {"head": "none"}, ROUND["test"] | own.get("test", {})
    return ROUND | own | {"model": model, "test": test}


def measure(name: str, data_dir: str) -> dict[str, Any]:
    """Train one round in this process."""
    from fedshot.config.load import Config
    from fedshot.runs.experiment import Experiment
    from fedshot.runs.prepare import PreparedRun

    start = time.perf_counter()
    prepared = PreparedRun(Config.of(settings(name)), data_dir)
    loading = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        records = list(Experiment(prepared, Path(folder) / "run").run())
    return {
        "set": name,
        "examples": len(prepared.dataset),
        "clients": len(prepared.clients),
        "setting s": round(loading, 2),
        "round s": round(records[-1].seconds, 2),
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "MB up": round(records[-1].bytes_up / 1e6, 2),
    }


def main() -> int:
    """Measure every set, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--only", choices=SETS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options.data_dir)))
        return 0
    for name in SETS:
        words = [sys.executable, __file__, "--data-dir", options.data_dir, "--only", name]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        print(done.stdout.strip() or f"{name}: {done.stderr.strip().splitlines()[-1]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
