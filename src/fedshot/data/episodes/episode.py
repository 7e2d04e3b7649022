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

from fedshot.core.errors import DataError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.episodes.sampling import ClassIndex, SampledRows, usable
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.tokens import Tokens

__all__ = ["ClientData", "ClientShare", "Episode", "EpisodeSpec", "Tasks"]

# One block where all episodes have the same shape, else one array for each.
Rows: TypeAlias = Ints | tuple[Ints, ...]


class Episode(NamedTuple):
    """One task, images as bytes or texts as words. Labels count the episode's classes from 0."""

    support_x: Tensor  # uint8 [way * shot, H, W, C], or int32 [way * shot, L]
    support_y: Tensor  # int64 [way * shot]
    query_x: Tensor  # uint8 [queries, H, W, C], or int32 [queries, L]
    query_y: Tensor  # int64 [queries]
    classes: Tensor  # int64 [way]: the dataset's number of class 0, 1, ...


class ClientShare(NamedTuple):
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
        return self._class_index.classes

    def episode(self, spec: EpisodeSpec, rng: np.random.Generator) -> Episode:
        """Draw an episode, its classes uniform among those with enough images.

        Raises DataError when there are fewer such classes than `spec` may ask for.
        """
        return self.episodes(spec, rng, 1)[0]

    def episodes(self, spec: EpisodeSpec, rng: np.random.Generator, n: int) -> list[Episode]:
        """Draw n episodes: those that n calls of `episode` would draw, and quicker."""
        if not spec.augment.active:
            return _gather_all(self.dataset, self._class_index.draw(spec, rng, n))
        spec.augment.check(self.dataset)
        return [self._augmented(spec, rng) for _ in range(n)]

    def _augmented(self, spec: EpisodeSpec, rng: np.random.Generator) -> Episode:
        (episode,) = _gather_all(self.dataset, self._class_index.draw(spec, rng))
        key = Key(int(rng.integers(2**62)))
        return episode._replace(
            support_x=spec.augment.apply(episode.support_x, key.at("support")),
            query_x=spec.augment.apply(episode.query_x, key.at("query")),
        )

    def hand(
        self, spec: EpisodeSpec, key: Key, whose: Sequence[str | int] = ()
    ) -> tuple[Ints, ClientShare]:
        """Return all rows divided in support and queries, and the classes: none, for no episode.

        Where clients hold what they hold, an episode's classes are those of whoever takes part.

        Args:
            spec: of an episode.
            key: of the episode, the same for all its clients.
            whose: what names the client below it, so that clients divide independently.
        """
        rng = key.at("halves", *whose).numpy()
        return np.zeros(0, dtype=np.int64), halves(self.dataset, self.indices, spec, rng)

    def rows_of_episode(
        self, spec: EpisodeSpec, rng: np.random.Generator
    ) -> tuple[Ints, list[Ints]]:
        """Return classes for an episode, and shot + query rows of each in random order."""
        return self._class_index.rows_of_episode(spec, rng)

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
    def _class_index(self) -> ClassIndex:
        return ClassIndex(self.dataset.y, self.indices, self.dataset.groups)


def halves(
    dataset: Dataset, rows: Ints, spec: EpisodeSpec, rng: np.random.Generator
) -> ClientShare:
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
    return ClientShare(*(rng.permutation(np.concatenate(part)) for part in (support, query)))


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
        if len(classes) < spec.fewest:
            raise DataError(
                f"{spec.episode_text} needs {spec.fewest} classes; there are "
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
        drawn = [every[u % len(every)]._class_index.draw(spec, rng)[0] for u in range(n)]
        return cls(
            block([support for _, support, _ in drawn]),
            block([query for _, _, query in drawn]),
            block([chosen for chosen, _, _ in drawn]),
        )

    def __len__(self) -> int:
        return len(self.classes)

    def episode(self, dataset: Dataset, i: int) -> Episode:
        """Return episode i with its images."""
        (found,) = _gather_all(
            dataset, [SampledRows(self.classes[i], self.support[i], self.query[i])]
        )
        return found

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
    held, counts = usable(dataset.y[rows], None if dataset.groups is None else dataset.groups[rows])
    there = np.zeros(dataset.n_classes, np.int64)
    there[held] = counts
    apart = "" if dataset.groups is None else " that its groups let apart"
    for c in classes:
        if 0 <= c < dataset.n_classes and there[c] < spec.needed:
            raise DataError(
                f"class {dataset.class_names[c]!r} has {there[c]} images{apart}; a {spec} episode "
                f"needs {spec.needed} of each class. Lower `shot` or `query`, or leave the class "
                "out."
            )


def block(arrays: Sequence[Ints]) -> Rows:
    """Return one array where all are as long, else a tuple."""
    if all(len(array) == len(arrays[0]) for array in arrays):
        return np.stack(list(arrays))
    return tuple(arrays)


def examples(dataset: Dataset, rows: Ints) -> Tensor:
    """Return uint8 images [n, H, W, C], or words int32 [n, L] padded to the longest."""
    if isinstance(dataset.x, Tokens):
        return torch.from_numpy(dataset.x.rows(rows))
    # `take` reads only these rows, from a memory map too; the copy is ours, so torch may hold it.
    return torch.from_numpy(np.asarray(np.take(dataset.x, rows, axis=0)))


def _gather_all(dataset: Dataset, drawn: Sequence[SampledRows]) -> list[Episode]:
    """Return episodes with their images, read all at once; texts have a length for each episode."""
    if not drawn:
        return []
    if dataset.is_text and len(drawn) > 1:
        return [_gather_all(dataset, [one])[0] for one in drawn]
    parts = [part for one in drawn for part in (one.support, one.query)]
    sizes, rows = [len(part) for part in parts], np.concatenate(parts)
    x = torch.split(examples(dataset, rows), sizes)
    named, y = dataset.y[rows], np.empty(len(rows), dtype=np.int64)
    first = 0
    for one in drawn:
        last = first + len(one.support) + len(one.query)
        y[first:last] = (named[first:last, None] == one.classes).argmax(axis=1)
        first = last
    labels = torch.split(torch.from_numpy(y), sizes)
    return [
        Episode(
            x[i], labels[i], x[i + 1], labels[i + 1], torch.from_numpy(one.classes.astype(np.int64))
        )
        for i, one in zip(range(0, len(parts), 2), drawn, strict=True)
    ]
