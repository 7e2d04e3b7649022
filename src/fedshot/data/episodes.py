"""Episodes: a few classes, a few labelled images of each (support), and images to label (query).

Row numbers are drawn first and images gathered after, so that a list of test tasks is small, can
be hashed, and is the same for every method. Numbers of images are exact. Texts stand in for images
throughout; those of an episode are filled up with 0 to the length of its longest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedshot.data.dataset import Dataset, Ints
from fedshot.data.spec import EpisodeSpec
from fedshot.data.tokens import Tokens
from fedshot.errors import DataError
from fedshot.keys import Key

__all__ = ["ClientData", "Episode", "EpisodeSpec", "Hand", "Tasks"]

# One block where all episodes have the same shape, else one array for each.
Rows: TypeAlias = Ints | tuple[Ints, ...]


class Episode(NamedTuple):
    """One task, images as bytes or texts as words. Labels count the episode's classes from 0."""

    support_x: Tensor  # uint8 [way * shot, H, W, C], or int32 [way * shot, L]
    support_y: Tensor  # int64 [way * shot]
    query_x: Tensor  # uint8 [queries, H, W, C], or int32 [queries, L]
    query_y: Tensor  # int64 [queries]
    classes: Tensor  # int64 [way]: the dataset's number of class 0, 1, ...


class Hand(NamedTuple):
    """One client's share of an episode, as row numbers in random order."""

    support: Ints
    query: Ints


class ClientData:
    """One client's rows of a dataset. Nothing is copied or sorted until it is used."""

    def __init__(self, dataset: Dataset, indices: Ints) -> None:
        self.dataset = dataset
        self.indices = indices

    @property
    def n(self) -> int:
        """The number of images."""
        return len(self.indices)

    @property
    def classes(self) -> Ints:
        """The class numbers of which there is at least one image, rising."""
        return self._by_class[0]

    def episode(self, spec: EpisodeSpec, rng: np.random.Generator) -> Episode:
        """Draw an episode, its classes uniform among those with enough images.

        Raises DataError when there are fewer such classes than `spec` may ask for.
        """
        classes, support, query = self._draw(spec, rng)
        episode = _gather(self.dataset, classes, support, query)
        if not spec.augment.active:
            return episode
        if self.dataset.is_text:
            raise DataError("episode.augment changes images; this dataset has texts. Leave it out.")
        key = Key(int(rng.integers(2**62)))
        return episode._replace(
            support_x=spec.augment.apply(episode.support_x, key.at("support")),
            query_x=spec.augment.apply(episode.query_x, key.at("query")),
        )

    def hand(self, spec: EpisodeSpec, key: Key) -> tuple[Ints, Hand]:
        """Return all rows divided in support and queries, and the classes: none, for no episode.

        Where clients hold what they hold, an episode's classes are those of whoever takes part.
        """
        rng = key.at("halves").numpy()
        return np.zeros(0, dtype=np.int64), halves(self.dataset, self.indices, spec, rng)

    def rows_of_episode(
        self, spec: EpisodeSpec, rng: np.random.Generator
    ) -> tuple[Ints, list[Ints]]:
        """Return classes for an episode, and shot + query rows of each in random order."""
        chosen = self._choose(spec, rng)
        classes, rows, counts = self._by_class
        n = spec.shot + spec.query
        drawn = [rows[c][rng.choice(int(counts[c]), n, replace=False)] for c in chosen.tolist()]
        return classes[chosen], drawn

    def batch(self, n: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Draw n images (uint8 [n, H, W, C]) or texts (int32 [n, L]) and their labels (int64 [n]).

        Labels are the dataset's. The rows are distinct, unless n is more than there are.
        """
        if self.n == 0 or n < 1:
            raise DataError(
                f"cannot draw a batch of {n} from {self.n} images; expected at least one of each"
            )
        rows = self.indices[rng.choice(self.n, n, replace=n > self.n)]
        return examples(self.dataset, rows), torch.from_numpy(self.dataset.y[rows])

    def all(self) -> tuple[Tensor, Tensor]:
        """Return all images or texts and their labels, the dataset's, in the order of the rows."""
        return examples(self.dataset, self.indices), torch.from_numpy(self.dataset.y[self.indices])

    @cached_property
    def _by_class(self) -> tuple[Ints, list[Ints], Ints]:
        """The class numbers, each one's rows, and how many these are."""
        labels = self.dataset.y[self.indices]
        order = np.argsort(labels, kind="stable")
        classes, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
        rows = np.split(self.indices[order], starts[1:]) if len(classes) else []
        return classes, rows, counts.astype(np.int64, copy=False)

    def _draw(self, spec: EpisodeSpec, rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
        """Return (classes, support rows by class, query rows in random order).

        The order of the queries must not tell their labels.
        """
        classes, rows, counts = self._by_class
        chosen = self._choose(spec, rng)
        support, query = [], []
        for c in chosen.tolist():
            n = min(int(counts[c]), spec.shot + spec.query)
            drawn = rows[c][rng.choice(int(counts[c]), n, replace=False)]
            support.append(drawn[: spec.shot])
            query.append(drawn[spec.shot :])
        return classes[chosen], np.concatenate(support), rng.permutation(np.concatenate(query))

    def _choose(self, spec: EpisodeSpec, rng: np.random.Generator) -> Ints:
        """Return the places of an episode's classes among those held, in the order of labels."""
        able = (self._by_class[2] >= spec.needed).nonzero()[0]
        if len(able) < spec.max_way:
            raise DataError(
                f"client data {spec.shortage(len(able))}. Lower `way`, `shot` or `query`, or give "
                "each client more images."
            )
        way = int(rng.integers(spec.min_way, spec.max_way, endpoint=True))
        chosen: Ints = rng.choice(able, way, replace=False)
        if spec.labels == "fixed":
            chosen.sort()
        return chosen


def halves(dataset: Dataset, rows: Ints, spec: EpisodeSpec, rng: np.random.Generator) -> Hand:
    """Divide every class of `rows` in the proportion shot to query, the rest to the queries."""
    order = rng.permutation(rows)
    order = order[np.argsort(dataset.y[order], kind="stable")]
    found, starts = np.unique(dataset.y[order], return_index=True)
    support, query = [], []
    for held in np.split(order, starts[1:]) if len(found) else []:
        n = len(held) * spec.shot // (spec.shot + spec.query)
        support.append(held[:n])
        query.append(held[n:])
    if sum(map(len, support)) == 0:
        raise DataError(
            f"a client has {len(rows)} images, none of them a support: too few of each class to "
            f"divide {spec.shot} to {spec.query}. Give each client more images."
        )
    return Hand(*(rng.permutation(np.concatenate(part)) for part in (support, query)))


@dataclass(frozen=True, eq=False)
class Tasks:
    """A fixed list of episodes, as row numbers: the same test for every method."""

    support: Rows  # [n, way * shot]
    query: Rows  # [n, way * query]
    classes: Rows  # [n, way]

    @classmethod
    def draw(
        cls,
        dataset: Dataset,
        classes: Sequence[int],
        spec: EpisodeSpec,
        n: int,
        key: Key,
        rows: Ints | None = None,
    ) -> Tasks:
        """Draw n episodes from these classes; fewer episodes are the first of more.

        Every class must have enough images, so that none is left out of a test silently.
        """
        if n < 1:
            raise DataError(f"cannot draw {n} tasks; expected at least 1")
        if len(classes) < spec.max_way:
            raise DataError(
                f"a {spec.way_text} episode needs {spec.max_way} classes; there are "
                f"{len(classes)}. Lower `way`, or give more classes."
            )
        rows = dataset.images_of(classes) if rows is None else rows
        check_counts(dataset, rows, classes, spec)
        return cls.draw_in_turns(dataset, [rows], spec, n, key)

    @classmethod
    def draw_in_turns(
        cls, dataset: Dataset, pools: Sequence[Ints], spec: EpisodeSpec, n: int, key: Key
    ) -> Tasks:
        """Draw n episodes, number u from the rows of pool u mod K.

        Raises DataError when a pool has too few classes that can fill an episode.
        """
        every = [ClientData(dataset, rows) for rows in pools]
        rng = key.numpy()
        drawn = [every[u % len(every)]._draw(spec, rng) for u in range(n)]
        return cls(
            block([support for _, support, _ in drawn]),
            block([query for _, _, query in drawn]),
            block([chosen for chosen, _, _ in drawn]),
        )

    def __len__(self) -> int:
        return len(self.classes)

    def episode(self, dataset: Dataset, i: int) -> Episode:
        """Return episode i with its images."""
        return _gather(dataset, self.classes[i], self.support[i], self.query[i])

    def digest(self, dataset: Dataset) -> str:
        """SHA-256 of the dataset and of the rows of every episode, as hex."""
        sha = hashlib.sha256(dataset.digest.encode())
        for i in range(len(self)):
            for rows in self._hashed(i):
                sha.update(len(rows).to_bytes(8, "little"))
                sha.update(np.ascontiguousarray(rows, dtype="<i8").data)
        return sha.hexdigest()

    def _hashed(self, i: int) -> tuple[Ints, ...]:
        return self.classes[i], self.support[i], self.query[i]


def check_counts(dataset: Dataset, rows: Ints, classes: Iterable[int], spec: EpisodeSpec) -> None:
    """Refuse a class that has too few images for an episode."""
    there = np.bincount(dataset.y[rows], minlength=dataset.n_classes)
    for c in classes:
        if 0 <= c < dataset.n_classes and there[c] < spec.needed:
            raise DataError(
                f"class {dataset.class_names[c]!r} has {there[c]} images; a {spec} episode needs "
                f"{spec.needed} of each class. Lower `shot` or `query`, or leave the class out."
            )


def block(arrays: Sequence[Ints]) -> Rows:
    """Return one array where all are as long, else a tuple."""
    if all(len(array) == len(arrays[0]) for array in arrays):
        return np.stack(list(arrays))
    return tuple(arrays)


def examples(dataset: Dataset, rows: Ints, length: int | None = None) -> Tensor:
    """Return uint8 images [n, H, W, C], or words int32 [n, L] padded to the longest or `length`."""
    if isinstance(dataset.x, Tokens):
        return torch.from_numpy(dataset.x.rows(rows, length))
    # `take` reads only these rows, from a memory map too; the copy is ours, so torch may hold it.
    return torch.from_numpy(np.asarray(np.take(dataset.x, rows, axis=0)))


def _gather(dataset: Dataset, classes: Ints, support: Ints, query: Ints) -> Episode:
    def labels(rows: Ints) -> Tensor:
        return torch.from_numpy((dataset.y[rows][:, None] == classes).argmax(axis=1))

    length = None
    if isinstance(dataset.x, Tokens):  # one for both, so that they can be stacked
        words = (dataset.x.lengths(rows).max(initial=1) for rows in (support, query))
        length = int(max(words))
    return Episode(
        examples(dataset, support, length),
        labels(support),
        examples(dataset, query, length),
        labels(query),
        torch.from_numpy(classes.astype(np.int64)),
    )
