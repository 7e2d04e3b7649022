"""Episodes: a few classes with labelled images (support) and images to label (query).

Row numbers are sampled first and images read later, so that a list of test tasks is small, can be
hashed, and is the same for every method. Examples may be texts instead of images; all texts of an
episode are padded with 0 to the length of the longest.
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

# One array if all episodes have the same shape, otherwise one array per episode.
Rows: TypeAlias = Ints | tuple[Ints, ...]


class Episode(NamedTuple):
    """One few-shot task. Labels are positions in `classes`, from 0."""

    support_x: Tensor  # uint8 [way * shot, H, W, C], or int32 [way * shot, L]
    support_y: Tensor  # int64 [way * shot]
    query_x: Tensor  # uint8 [queries, H, W, C], or int32 [queries, L]
    query_y: Tensor  # int64 [queries]
    classes: Tensor  # int64 [way]: class numbers of the dataset


class ClientShare(NamedTuple):
    """One client's share of an episode, as row numbers in random order."""

    support: Ints
    query: Ints


class ClientData:
    """One client's rows of a dataset; images are copied and rows sorted only when needed."""

    def __init__(self, dataset: Dataset, indices: Ints) -> None:
        self.dataset = dataset
        self.indices = indices

    @property
    def n(self) -> int:
        """The number of images."""
        return len(self.indices)

    @property
    def classes(self) -> Ints:
        """The classes with at least one image, in ascending order."""
        return self.class_index.classes

    def episode(self, spec: EpisodeSpec, rng: np.random.Generator) -> Episode:
        """Sample an episode; its classes are drawn uniformly from those with enough images.

        Raises DataError if too few classes have enough images.
        """
        return self.episodes(spec, rng, 1)[0]

    def episodes(self, spec: EpisodeSpec, rng: np.random.Generator, n: int) -> list[Episode]:
        """Sample n episodes: the same ones as n calls of `episode`, but faster."""
        if not spec.augment.active:
            return _gather_all(self.dataset, self.class_index.draw(spec, rng, n))
        spec.augment.check(self.dataset)
        return [self._augmented(spec, rng) for _ in range(n)]

    def _augmented(self, spec: EpisodeSpec, rng: np.random.Generator) -> Episode:
        (episode,) = _gather_all(self.dataset, self.class_index.draw(spec, rng))
        key = Key(int(rng.integers(2**62)))
        return episode._replace(
            support_x=spec.augment.apply(episode.support_x, key.at("support")),
            query_x=spec.augment.apply(episode.query_x, key.at("query")),
        )

    def share(
        self, spec: EpisodeSpec, key: Key, whose: Sequence[str | int] = ()
    ) -> tuple[Ints, ClientShare]:
        """Return the classes of an episode of several clients, and this client's share of it.

        Here the client has the same rows in every episode, and divides all of them into support and
        queries. The array of classes is empty, because the classes of the episode depend on the
        other clients, too. Raises DataError if the support would be empty.

        Args:
            spec: shape of the episode.
            key: key of the episode, the same for all its clients.
            whose: parts that identify the client. They are appended to the key for the client's own
                draws, so that clients draw independently.
        """
        rng = key.at("halves", *whose).numpy()
        return np.zeros(0, dtype=np.int64), divide(self.dataset, self.indices, spec, rng)

    def batch(self, n: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Sample n images (uint8 [n, H, W, C]) or texts (int32 [n, L]) and labels (int64 [n]).

        Labels are class numbers of the dataset. Rows are distinct if the client has at least n.
        Raises DataError if it has none.
        """
        if self.n == 0 or n < 1:
            raise DataError(
                f"cannot sample a batch of {n} from {self.n} images; both must be at least 1"
            )
        rows = self.indices[rng.choice(self.n, n, replace=n > self.n)]
        return examples(self.dataset, rows), torch.from_numpy(self.dataset.y[rows])

    def all(self) -> tuple[Tensor, Tensor]:
        """Return all images or texts and their class numbers, in the order of the rows."""
        return examples(self.dataset, self.indices), torch.from_numpy(self.dataset.y[self.indices])

    @cached_property
    def class_index(self) -> ClassIndex:
        """The client's rows indexed by class, to sample episodes from."""
        return ClassIndex(self.dataset.y, self.indices, self.dataset.groups)


def shuffled_classes(
    dataset: Dataset, indices: Ints, rng: np.random.Generator
) -> list[tuple[int, Ints]]:
    """Return (class number, rows of the class in random order), sorted by class number."""
    rows = rng.permutation(indices)
    rows = rows[np.argsort(dataset.y[rows], kind="stable")]
    classes, starts = np.unique(dataset.y[rows], return_index=True)
    held = np.split(rows, starts[1:]) if len(classes) else []
    return list(zip(classes.tolist(), held, strict=True))


def divide(
    dataset: Dataset, rows: Ints, spec: EpisodeSpec, rng: np.random.Generator
) -> ClientShare:
    """Divide the rows of every class into support and queries, in the ratio shot to query.

    Raises DataError if no class has enough rows for a support example.
    """
    support, query = [], []
    for _, held in shuffled_classes(dataset, rows, rng):
        n = len(held) * spec.shot // (spec.shot + spec.query)
        support.append(held[:n])
        query.append(held[n:])
    if sum(map(len, support)) == 0:
        raise DataError(
            f"a client has {len(rows)} images and no support set: too few of each class to "
            f"divide {spec.shot} to {spec.query}. Give each client more images."
        )
    return ClientShare(*(rng.permutation(np.concatenate(part)) for part in (support, query)))


@dataclass(frozen=True, eq=False)
class Tasks:
    """A fixed list of test episodes, as row numbers."""

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
        """Sample n episodes from these classes; a smaller n gives the first n of the same list.

        Raises DataError if a class has too few images, so that no class is missing from a test
        unnoticed.
        """
        if n < 1:
            raise DataError(f"cannot sample {n} tasks; expected at least 1")
        if len(classes) < spec.min_classes:
            raise DataError(
                f"{spec.episode_text} needs {spec.min_classes} classes; there are "
                f"{len(classes)}. Lower `way`, or use more classes."
            )
        rows = dataset.images_of(classes) if rows is None else rows
        check_counts(dataset, rows, classes, spec)
        return cls.draw_round_robin(dataset, [rows], spec, n, key)

    @classmethod
    def draw_round_robin(
        cls, dataset: Dataset, pools: Sequence[Ints], spec: EpisodeSpec, n: int, key: Key
    ) -> Tasks:
        """Sample n episodes, episode u from the rows of pool u mod K, for K pools.

        Raises DataError if a pool has too few classes with enough images.
        """
        every = [ClientData(dataset, rows).class_index for rows in pools[:n]]
        rng = key.numpy()
        drawn = [every[u % len(every)].draw(spec, rng)[0] for u in range(n)]
        classes, support, query = map(block, zip(*drawn, strict=True))
        return cls(support, query, classes)

    def __len__(self) -> int:
        return len(self.classes)

    def episode(self, dataset: Dataset, i: int) -> Episode:
        """Return episode i with its images."""
        rows = SampledRows(self.classes[i], self.support[i], self.query[i])
        return _gather_all(dataset, [rows])[0]

    def digest(self, dataset: Dataset) -> str:
        """Return the SHA-256 of the dataset and of the rows of every episode, as hex."""
        sha = hashlib.sha256(dataset.digest.encode())
        for i in range(len(self)):
            for rows in self._hashed(i):
                sha.update(len(rows).to_bytes(8, "little"))
                sha.update(np.ascontiguousarray(rows, dtype="<i8").data)
        return sha.hexdigest()

    def _hashed(self, i: int) -> tuple[Ints, ...]:
        return self.classes[i], self.support[i], self.query[i]


def check_counts(dataset: Dataset, rows: Ints, classes: Iterable[int], spec: EpisodeSpec) -> None:
    """Raise DataError if a class has too few images for an episode."""
    held, counts = usable(dataset.y[rows], None if dataset.groups is None else dataset.groups[rows])
    available = np.zeros(dataset.n_classes, np.int64)
    available[held] = counts
    usable_text = "" if dataset.groups is None else " usable with its groups"
    for c in classes:
        if 0 <= c < dataset.n_classes and available[c] < spec.min_images:
            raise DataError(
                f"class {dataset.class_names[c]!r} has {available[c]} images{usable_text}; a "
                f"{spec} episode needs {spec.min_images} of each class. Lower `shot` or `query`, "
                "or leave the class out."
            )


def block(arrays: Sequence[Ints]) -> Rows:
    """Return the arrays stacked into one if all have the same length, otherwise as a tuple."""
    if all(len(array) == len(arrays[0]) for array in arrays):
        return np.stack(list(arrays))
    return tuple(arrays)


def examples(dataset: Dataset, rows: Ints) -> Tensor:
    """Return images, uint8 [n, H, W, C], features, float32 [n, d], or texts, int32 [n, L].

    Texts are word numbers, padded with 0. The tensor is on the CPU, or on the GPU that the dataset
    has been copied to.
    """
    if isinstance(dataset.x, Tokens):
        return torch.from_numpy(dataset.x.rows(rows))
    if dataset.resident is not None:
        return dataset.resident[torch.from_numpy(rows).to(dataset.resident.device)]
    # `take` reads only these rows of a memory map, and makes a copy that torch may own.
    return torch.from_numpy(np.asarray(np.take(dataset.array, rows, axis=0)))


def _gather_all(dataset: Dataset, drawn: Sequence[SampledRows]) -> list[Episode]:
    """Return episodes with their images, read in one operation; texts are padded per episode."""
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
    classes = (torch.from_numpy(one.classes.astype(np.int64)) for one in drawn)
    pairs = zip(x[::2], labels[::2], x[1::2], labels[1::2], classes, strict=True)
    return [Episode(*pair) for pair in pairs]
