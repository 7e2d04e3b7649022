"""Partitions of a dataset over clients.

All clients share two arrays (compressed sparse rows), so ten thousand clients take no more memory
than the row numbers themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedshot.core.errors import DataError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.sampling import usable
from fedshot.data.episodes.spec import EpisodeSpec


@dataclass(frozen=True, eq=False)
class Partition:
    """An assignment of rows: client k has the rows `indices[offsets[k]:offsets[k + 1]]`."""

    indices: Ints  # [m]
    offsets: Ints  # [K + 1]

    def __post_init__(self) -> None:
        o = self.offsets
        if len(o) == 0 or o[0] != 0 or o[-1] != len(self.indices) or (np.diff(o) < 0).any():
            raise DataError(
                f"offsets do not divide {len(self.indices)} rows among clients; expected ascending "
                f"numbers from 0 to {len(self.indices)}"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, k: int) -> Ints:
        if not 0 <= k < len(self):
            raise IndexError(f"client {k} does not exist; there are {len(self)}, counted from 0")
        return self.indices[self.offsets[k] : self.offsets[k + 1]]

    def __iter__(self) -> Iterator[Ints]:
        return (self[k] for k in range(len(self)))

    def data(self, dataset: Dataset, k: int) -> ClientData:
        """Return the data of client k."""
        return ClientData(dataset, self[k])

    @property
    def sizes(self) -> Ints:
        """The number of images of each client, int64 [K]."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> Ints:
        """The client that each entry of `indices` belongs to, int64 [m]."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.sizes)

    @property
    def digest(self) -> str:
        """SHA-256 of the row numbers of all clients, as hex."""
        sha = hashlib.sha256()
        for part in (self.offsets, self.indices):
            sha.update(np.ascontiguousarray(part).data)
        return sha.hexdigest()

    def able_classes(self, dataset: Dataset, needed: int) -> Ints:
        """Return each client's number of classes with at least `needed` usable images, int64 [K].

        `sampling.usable` describes how images of one group are counted.
        """
        owners = self._able(dataset, needed) // dataset.n_classes
        return np.bincount(owners, minlength=len(self)).astype(np.int64, copy=False)

    def classes_of_any(self, dataset: Dataset, needed: int, clients: Sequence[int]) -> Ints:
        """Return the classes of which one of `clients` has at least `needed` usable images."""
        owners, classes = np.divmod(self._able(dataset, needed), dataset.n_classes)
        return np.unique(classes[np.isin(owners, clients)])

    def _able(self, dataset: Dataset, needed: int) -> Ints:
        """Return client * classes + class of each pair with at least `needed` usable images."""
        # Sorting (client, class) pairs keeps memory at O(images), unlike a table clients x classes.
        pairs = self.owners * dataset.n_classes + dataset.y[self.indices]
        groups = None if dataset.groups is None else dataset.groups[self.indices]
        found, counts = usable(pairs, groups)
        return found[counts >= needed]

    @classmethod
    def of(cls, parts: Sequence[Ints]) -> Partition:
        """Return the partition in which client k has the rows `parts[k]`."""
        sizes = np.array([len(part) for part in parts], dtype=np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        rows = [np.asarray(part, dtype=np.int64) for part in parts]
        return cls(np.concatenate(rows) if rows else np.zeros(0, np.int64), offsets)

    @classmethod
    def by_owner(cls, indices: Ints, owners: Ints, clients: int) -> Partition:
        """Return the partition in which row `indices[j]` belongs to client `owners[j]`."""
        order = np.argsort(owners, kind="stable")
        counts = np.bincount(owners, minlength=clients)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return cls(indices[order], offsets)


@dataclass(frozen=True)
class ClientSplit:
    """Each client's training rows and, if clients are tested on their own rows, held-out rows.

    The clients are tested on the rows in `test`, and those in `validation` select the round.
    """

    train: Partition
    test: Partition | None = None
    validation: Partition | None = None


class Partitioner(Protocol):
    """A rule that assigns images to clients; its fields are its options."""

    def assign(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Return the rows of each client, taken from `indices`; `key` seeds all random choices.

        Each client should be able to form an episode of `spec`, but need not be. Raises DataError
        if the rows cannot be divided.
        """


def infeasible_clients(
    dataset: Dataset, partition: Partition, spec: EpisodeSpec | None, *, divides: bool = False
) -> dict[int, str]:
    """Return the clients that cannot form every episode of `spec`, each with the reason.

    If `spec` is None, only a client without examples is infeasible. With `divides`, each client
    divides all its images into a support set and a query set; it is also infeasible if its support
    set is empty.
    """
    if spec is None:
        return {int(k): "has no examples" for k in np.flatnonzero(partition.sizes == 0)}
    able = partition.able_classes(dataset, spec.min_images)
    found = {int(k): spec.shortage(int(able[k])) for k in np.flatnonzero(able < spec.min_classes)}
    if divides:
        bare = np.flatnonzero(partition.able_classes(dataset, spec.min_to_divide) == 0)
        reason = f"has no support set if each class is divided {spec.shot} to {spec.query}"
        found |= {int(k): reason for k in bare}
    return found


def check_client_split(dataset: Dataset, indices: Ints, clients: int) -> None:
    """Raise DataError unless every row exists and there are at least as many rows as clients."""
    if len(indices) < clients:
        raise DataError(
            f"cannot divide {len(indices)} images among {clients} clients; each needs at least "
            "one. Lower `clients`."
        )
    if indices.min() < 0 or indices.max() >= len(dataset):
        raise DataError(
            f"row numbers run from {indices.min()} to {indices.max()}; {dataset.name} has "
            f"{len(dataset)} images, 0..{len(dataset) - 1}"
        )


def check_assigned(kind: str, split: object, indices: Ints) -> None:
    """Raise DataError unless partition `kind` assigned only rows of `indices`, to some clients.

    `split` is what its `assign` returned, which may be anything if the partition is the user's.
    """
    if not isinstance(split, ClientSplit):
        raise DataError(
            f"assign of partition {kind!r} returned a {type(split).__name__}; expected a "
            "ClientSplit. Return ClientSplit(Partition.of(rows)), where rows[k] are the row "
            "numbers of client k."
        )
    if not len(split.train):
        raise DataError(f"partition {kind!r} has no clients; expected at least one.")
    for part in filter(None, (split.train, split.test, split.validation)):
        others = part.indices[~np.isin(part.indices, indices)]
        if len(others):
            raise DataError(
                f"partition {kind!r} assigned row {others[0]}, which is none of the {len(indices)} "
                "rows to divide, and may belong to the test. Assign only the rows `indices`."
            )
