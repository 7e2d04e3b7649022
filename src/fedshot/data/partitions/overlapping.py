"""A partition in which each client draws a few images, for very large numbers of clients.

Clients share images, so there may be more clients than images. A client's rows are a function of
the key and the client alone. They are drawn whenever they are read, so the partition takes 8 bytes
per client.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedshot.core.errors import DataError
from fedshot.core.ranges import AtLeast1
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import ClientSplit, Partition, check_client_split

_HASHED = 100  # clients whose rows the hash covers; it changes if numpy draws other numbers


@dataclass(frozen=True)
class Overlapping:
    """Each client draws a few classes, and a few images of each of them; clients share images.

    A client's classes and images are drawn uniformly without replacement, independently of the
    other clients.

    Args:
        clients: number of clients; there may be more of them than images.
        way: number of classes of a client.
        per_class: number of images of each of these classes.
    """

    clients: AtLeast1 = 1000
    way: AtLeast1 = 5
    per_class: AtLeast1 = 20

    def assign(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Return a partition that draws each client's images when they are read.

        Raises DataError if there are too few classes or images.
        """
        del spec
        check_client_split(dataset, indices, 1)
        if dataset.groups is not None:
            raise DataError(
                f"{dataset.name} has groups, which partition 'overlapping' does not keep together. "
                "Remove the groups from the data, or choose another partition."
            )
        pool = {c: indices[dataset.y[indices] == c] for c in np.unique(dataset.y[indices]).tolist()}
        if self.way > len(pool):
            raise DataError(
                f"way is {self.way}, but there are only {len(pool)} classes. Lower `way`."
            )
        for c, rows in pool.items():
            if len(rows) < self.per_class:
                raise DataError(
                    f"class {dataset.class_names[c]!r} has {len(rows)} images; a client draws "
                    f"{self.per_class} of each of its classes. Lower `per_class`."
                )
        offsets = np.arange(self.clients + 1, dtype=np.int64) * (self.way * self.per_class)
        drawn = DrawnPartition(indices, offsets, self.way, self.per_class, list(pool.values()), key)
        return ClientSplit(drawn)


@dataclass(frozen=True, eq=False)
class DrawnPartition(Partition):
    """A partition that draws a client's rows when they are read.

    Args:
        indices: the rows that clients draw from, int64 [m]; they are not ordered by client.
        offsets: as in `Partition`, only for the clients' numbers of rows.
        way: number of classes of a client.
        per_class: number of rows of each of these classes.
        pool: the rows of each class.
        key: seeds the draws.
    """

    way: int
    per_class: int
    pool: Sequence[Ints]
    key: Key

    def __post_init__(self) -> None:
        pass  # clients share rows, so the offsets do not divide them

    def __getitem__(self, k: int) -> Ints:
        if not 0 <= k < len(self):
            raise IndexError(f"client {k} does not exist; there are {len(self)}, counted from 0")
        rng = self.key.at("overlapping", k).numpy()
        classes = rng.choice(len(self.pool), self.way, replace=False).tolist()
        rows = [rng.choice(self.pool[c], self.per_class, replace=False) for c in classes]
        return np.concatenate(rows)

    def able_classes(self, dataset: Dataset, needed: int) -> Ints:
        """Return each client's number of classes with at least `needed` images, int64 [K]."""
        del dataset
        return np.full(len(self), self.way if needed <= self.per_class else 0, dtype=np.int64)

    @property
    def digest(self) -> str:
        """SHA-256 of what determines the row numbers of all clients, as hex."""
        sha = hashlib.sha256(f"{len(self)} {self.key.at('overlapping').seed}".encode())
        for rows in (*self.pool, *(self[k] for k in range(min(len(self), _HASHED)))):
            sha.update(rows.data)
        return sha.hexdigest()
