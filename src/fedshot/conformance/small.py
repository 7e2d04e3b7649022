"""A small federation for the checks: learnable data, split over six clients of unequal size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import Tasks
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.evaluation.episodic_test import EpisodicTest
from fedshot.fleets.host import Host
from fedshot.fleets.private import PrivateStore
from fedshot.protocol.method import Method

SHAPE = (8, 8, 1)
CLASSES, CLIENTS = 6, 6
_PER_CLASS = (3, 4, 5, 5, 6, 7)  # images of each class that client 0, 1, ... holds


def _dataset() -> Dataset:
    """Return a dataset with one random pattern per class, and noise added to each image."""
    rng = Key(0).at("patterns").numpy()
    patterns = rng.integers(40, 216, (CLASSES, 1, *SHAPE))
    noise = rng.integers(-40, 40, (CLASSES, sum(_PER_CLASS), *SHAPE))
    x = (patterns + noise).astype(np.uint8).reshape(-1, *SHAPE)
    y = np.repeat(np.arange(CLASSES), sum(_PER_CLASS))
    return Dataset("patterns", x, y, tuple("abcdef"))


DATASET = _dataset()
_ENDS = np.cumsum((0, *_PER_CLASS))
PARTITION = Partition.of(
    [
        np.concatenate([c * sum(_PER_CLASS) + np.arange(*_ENDS[k : k + 2]) for c in range(CLASSES)])
        for k in range(CLIENTS)
    ]
)


def episodic_test(n: int = 5) -> EpisodicTest:
    """Return a test of n episodes."""
    spec = EpisodeSpec(way=3, shot=1, query=3)
    return EpisodicTest(DATASET, Tasks.draw(DATASET, range(CLASSES), spec, n, Key(0).at("exam")))


def host_of(method: Method[Any], folder: Path, key: Key) -> Host:
    """Return the host of the clients, whose private states are in `folder`; `key` is the run's."""
    return Host(method, DATASET, PARTITION, PrivateStore(folder / "clients"), key.at("clients"))
