"""Partitions for personalised methods: each client is tested on images of its own classes.

Source: pFedFSL, the "pathological" and the "realistic" setting. A client has twice as many test
images as training images of each class. The paper draws each client's images without replacement
and does not say whether clients share images; here they do not, unless `overlap` is set. The paper
has no validation images; here there are `validation` of them for each training image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fedshot.core.errors import DataError
from fedshot.core.ranges import Above0, AtLeast0, AtLeast1
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.episodes.episode import shuffled_classes
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.dirichlet import counts, shares
from fedshot.data.partitions.partition import ClientSplit, Partition, check_client_split

_Drawn: TypeAlias = list[tuple[int, Ints, int]]  # client, rows of one class, number to train on


@dataclass(frozen=True)
class Pathological:
    """Each client draws a few classes, and a small number of images of each of them.

    Client i has N_i ~ U{way-1..way+1} classes with K_i ~ U{shot-2..shot+2} training images each
    (both at least 1) and 2 K_i test images each.

    Args:
        clients: number of clients.
        way: number of classes of a client, plus or minus 1, at least 1.
        shot: number of training images of each class, plus or minus up to 2, at least 1.
        validation: number of validation images for each training image.
        overlap: whether clients may share images. If so, each client draws from all images, so that
            even small classes are large enough. A client may then train on images that another
            client is tested on.
    """

    clients: AtLeast1 = 30
    way: AtLeast1 = 5
    shot: AtLeast1 = 5
    validation: AtLeast0 = 0
    overlap: bool = False

    def assign(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Draw every client's images. Raises DataError if there are too few classes or images."""
        del spec
        check_client_split(dataset, indices, self.clients)
        pool = _ClassPool(dataset, indices, key.at("pathological", "shuffle"))
        if self.way + 1 > len(pool.classes):
            raise DataError(
                f"way is {self.way}, so a client may draw {self.way + 1} classes; there are "
                f"{len(pool.classes)}. Lower `way` to {len(pool.classes) - 1} or fewer."
            )
        rng = key.at("pathological").numpy()
        drawn: _Drawn = []
        each = 3 + self.validation
        for i in range(self.clients):
            n_i = int(rng.integers(max(1, self.way - 1), self.way + 2))
            k_i = int(rng.integers(max(1, self.shot - 2), self.shot + 3))
            for c in rng.choice(pool.classes, n_i, replace=False).tolist():
                if self.overlap:
                    rows = pool.draw(c, k_i, each, key.at("pathological", "own", i, c))
                else:
                    rows = pool.take(c, k_i, each, "`clients`, `way` or `shot`")
                drawn.append((i, rows, k_i))
        return _split(drawn, self.clients, bool(self.validation))


@dataclass(frozen=True)
class Clusters:
    """Each cluster has `way` classes, divided among its clients by a Dirichlet distribution.

    A cluster of s clients has shot * s training images of each of its classes. Clusters have
    different classes if there are enough; otherwise classes are reused in turn.

    Args:
        clients: number of clients.
        clusters: number of clusters.
        way: number of classes of a cluster.
        shot: training images of each class for each client of the cluster, on average.
        alpha: concentration of the Dirichlet distribution within a cluster.
        validation: number of validation images for each training image.
    """

    clients: AtLeast1 = 30
    clusters: AtLeast1 = 5
    way: AtLeast1 = 5
    shot: AtLeast1 = 5
    alpha: Above0 = 1.0
    validation: AtLeast0 = 0

    def __post_init__(self) -> None:
        if self.clusters > self.clients:
            raise DataError(
                f"clusters is {self.clusters}, but there are only {self.clients} clients. Lower "
                "`clusters`."
            )

    def assign(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Draw the images cluster by cluster; clients of a cluster have consecutive numbers.

        Raises DataError if there are too few classes or images.
        """
        del spec
        check_client_split(dataset, indices, self.clients)
        pool = _ClassPool(dataset, indices, key.at("clusters", "shuffle"))
        if self.way > len(pool.classes):
            raise DataError(
                f"way is {self.way}, but there are only {len(pool.classes)} classes. Lower `way`."
            )
        rng = key.at("clusters").numpy()
        order = rng.permutation(pool.classes)
        drawn: _Drawn = []
        each = 3 + self.validation
        for g, members in enumerate(np.array_split(np.arange(self.clients), self.clusters)):
            for place in range(g * self.way, (g + 1) * self.way):
                c, n = int(order[place % len(order)]), self.shot * len(members)
                rows = pool.take(c, n, each, "`clients`, `clusters`, `way` or `shot`")
                got = counts(shares(len(members), self.alpha, rng), n)
                ends = np.cumsum(each * got)
                for i, k, end in zip(members.tolist(), got.tolist(), ends.tolist(), strict=True):
                    drawn.append((i, rows[end - each * k : end], k))
        return _split(drawn, self.clients, bool(self.validation))


class _ClassPool:
    """The images of each class in random order, and how many of them have been taken."""

    def __init__(self, dataset: Dataset, indices: Ints, key: Key) -> None:
        self._names = dataset.class_names
        self._rows = dict(shuffled_classes(dataset, indices, key.numpy()))
        self._used = dict.fromkeys(self._rows, 0)
        self.classes = list(self._rows)

    def take(self, c: int, n_train: int, each: int, fix: str) -> Ints:
        """Take the next `each * n_train` images of class `c`, none of which was taken before.

        `n_train` of them are for training. `each` counts the images taken per training image: the
        training image, two test images, and the validation images. Raises DataError if too few
        are left.
        """
        start, n = self._used[c], each * n_train
        there = len(self._rows[c]) - start
        if n > there:
            raise DataError(
                f"class {self._names[c]!r} has run out: a client needs {n} more images ({n_train} "
                f"of them to train) and {there} of {len(self._rows[c])} are left. Lower {fix}."
            )
        self._used[c] = start + n
        return self._rows[c][start : start + n]

    def draw(self, c: int, n_train: int, each: int, key: Key) -> Ints:
        """Draw `each * n_train` distinct images of class `c`; later draws may return them again.

        Raises DataError if the class has too few.
        """
        n, rows = each * n_train, self._rows[c]
        if n > len(rows):
            raise DataError(
                f"class {self._names[c]!r} has {len(rows)} images; a client needs {n} "
                f"({n_train} of them to train). Lower `shot`."
            )
        return key.numpy().choice(rows, n, replace=False)


def _split(drawn: _Drawn, clients: int, validated: bool) -> ClientSplit:
    """Divide each client's images of a class among training, test and validation.

    An entry (client, rows, n) of `drawn` gives the first n rows for training, the next 2 n for the
    test, and the rest for validation, which is None unless `validated`.
    """
    clients_of = np.array([client for client, _, _ in drawn])

    def partition(parts: Sequence[Ints]) -> Partition:
        owners = np.repeat(clients_of, [len(part) for part in parts])
        return Partition.by_owner(np.concatenate(parts), owners, clients)

    train, test, held = zip(*(np.split(rows, [n, 3 * n]) for _, rows, n in drawn), strict=True)
    return ClientSplit(partition(train), partition(test), partition(held) if validated else None)
