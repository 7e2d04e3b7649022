"""Tests of own classes where images are shared: those that another client trains on, and the rest.

    python benchmarks/seen.py DATA_DIR RUN...

With `partition.overlap` a client is tested on images that others may train on. Each run sits two
tests: of its test images those that another client trains on, and those that nobody does.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np

from fedshot.core.seeds import Key
from fedshot.data.partitions.partition import Partition
from fedshot.evaluation.episodic_test import EpisodicTest
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun
from fedshot.runs.run_folder import configuration


def halves(prepared: PreparedRun) -> dict[str, EpisodicTest]:
    """Return the tests of images that another client trains on, and of those that nobody does."""
    client_split = prepared.client_split
    assert client_split.test is not None, "clients are tested on their own classes"
    trained = Counter(row for rows in client_split.train for row in rows.tolist())
    server_tests = {}
    for name, seen in (("trained on by others", True), ("by nobody", False)):
        # What a client trains on itself is in no test of its own.
        kept = [
            np.array([r for r in rows if (trained[int(r)] > 0) == seen])
            for rows in client_split.test
        ]
        server_tests[name] = EpisodicTest.own(
            prepared.dataset, client_split.train, Partition.of(kept), prepared.clients, Key(0)
        )
    return server_tests


def main(data_dir: str, *folders: str) -> None:
    """Print both accuracies of each run, with their intervals over clients."""
    for folder in map(Path, folders):
        run = Experiment(PreparedRun(configuration(folder), data_dir), folder)
        found = {
            name: run.evaluate(episodic_test)
            for name, episodic_test in halves(run.prepared).items()
        }
        told = ", ".join(
            f"{name} {100 * s.accuracy:.2f} ± {100 * s.interval:.2f}" for name, s in found.items()
        )
        print(f"{folder.name.split('.s')[0]}: {told}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
