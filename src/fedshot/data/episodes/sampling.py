"""Samples the rows of episodes: random classes, and random rows of each."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from fedshot.core.errors import DataError
from fedshot.data.dataset import Ints
from fedshot.data.episodes.spec import EpisodeSpec


class SampledRows(NamedTuple):
    """An episode as row numbers."""

    classes: Ints  # class numbers of the dataset, in the order of the episode's labels
    support: Ints  # rows, class by class
    query: Ints  # rows in random order, so that positions do not reveal labels


class ClassIndex:
    """Rows of a dataset, indexed by class.

    Args:
        labels: class numbers of all rows of the dataset.
        rows: the rows to index.
        groups: group numbers of all rows of the dataset. Rows of one group are nearly alike; within
            a class, an episode never has rows of one group in both support and query set.
    """

    def __init__(self, labels: Ints, rows: Ints, groups: Ints | None = None) -> None:
        own = labels[rows]
        order = np.argsort(own, kind="stable")
        self._rows = np.ascontiguousarray(rows[order], dtype=np.int64)
        self.classes, starts, counts = np.unique(own[order], return_index=True, return_counts=True)
        self._starts, self._counts = starts.astype(np.int64), counts.astype(np.int64)
        self._groups = None if groups is None else groups[self._rows]
        self._usable = self._counts if groups is None else usable(own[order], self._groups)[1]
        self._by_count: dict[int, Ints] = {}

    @cached_property
    def _by_class(self) -> list[Ints]:
        return np.split(self._rows, self._starts[1:]) if len(self.classes) else []

    def draw(self, spec: EpisodeSpec, rng: np.random.Generator, n: int = 1) -> list[SampledRows]:
        """Draw the rows of n episodes; classes are drawn uniformly from those with enough rows.

        Raises DataError if fewer classes have enough rows than an episode of `spec` may need.
        """
        return [self._draw_one(spec, rng) for _ in range(n)]

    def _draw_one(self, spec: EpisodeSpec, rng: np.random.Generator) -> SampledRows:
        chosen = self._choose(spec, rng)
        rows = [self._support_and_query(c, spec, rng) for c in chosen.tolist()]
        support, query = map(np.concatenate, zip(*rows, strict=True))
        return SampledRows(self.classes[chosen], support, rng.permutation(query))

    def rows_of_episode(
        self, spec: EpisodeSpec, rng: np.random.Generator
    ) -> tuple[Ints, list[Ints]]:
        """Return the classes of an episode, and shot + query rows of each in random order."""
        chosen = self._choose(spec, rng)
        return self.classes[chosen], [self._some(c, spec, rng) for c in chosen.tolist()]

    def _some(self, c: int, spec: EpisodeSpec, rng: np.random.Generator) -> Ints:
        """Return up to shot + query random rows of a class."""
        count = int(self._counts[c])
        n = min(count, spec.shot + spec.query)
        return self._by_class[c][rng.choice(count, n, replace=False)]

    def _support_and_query(
        self, c: int, spec: EpisodeSpec, rng: np.random.Generator
    ) -> tuple[Ints, Ints]:
        """Return `spec.shot` rows of class c for the support, and up to `spec.query` for queries.

        With groups of rows that are nearly alike, no group has rows in both.
        """
        if self._groups is None:
            drawn = self._some(c, spec, rng)
            return drawn[: spec.shot], drawn[spec.shot :]
        rows, start = self._by_class[c], self._starts[c]
        _, group, sizes = np.unique(
            self._groups[start : start + len(rows)], return_inverse=True, return_counts=True
        )
        order = rng.permutation(len(sizes))
        ends = np.cumsum(sizes[order])  # cumulative numbers of rows
        least = int(np.searchsorted(ends, spec.shot)) + 1
        most = int(np.searchsorted(ends, len(rows) - (spec.min_images - spec.shot), side="right"))
        share = round(len(sizes) * spec.shot / (spec.shot + spec.query))
        in_support = np.isin(group, order[: min(max(share, least), most)])
        query = min(spec.query, int((~in_support).sum()))
        return (
            rng.choice(rows[in_support], spec.shot, replace=False),
            rng.choice(rows[~in_support], query, replace=False),
        )

    def _choose(self, spec: EpisodeSpec, rng: np.random.Generator) -> Ints:
        """Draw an episode's classes; return their positions in `self.classes`, in label order."""
        usable = self._usable_for(spec)
        way = min(int(rng.integers(spec.min_way, spec.max_way, endpoint=True)), len(usable))
        chosen: Ints = rng.choice(usable, way, replace=False)
        if spec.ordered:
            chosen.sort()
        return chosen

    def _usable_for(self, spec: EpisodeSpec) -> Ints:
        """Return the positions in `self.classes` of the classes with enough rows for `spec`."""
        if spec.min_images not in self._by_count:
            found = (self._usable >= spec.min_images).nonzero()[0].astype(np.int64, copy=False)
            self._by_count[spec.min_images] = found
        usable = self._by_count[spec.min_images]
        if len(usable) < spec.min_classes:
            raise DataError(
                f"client data {spec.shortage(len(usable))}. Lower `way`, `shot` or "
                "`query`, or give each client more images."
            )
        return usable


def usable(labels: Ints, groups: Ints | None) -> tuple[Ints, Ints]:
    """Return the distinct labels, and the number of usable rows of each: two arrays int64 [k].

    A group is a set of rows that are nearly alike; within a label, an episode has rows of a group
    in its support set or in its query set, never in both. The number of usable rows of a label is
    then one more than the number of its rows outside its largest group. An episode with that many
    rows can always be completed, whichever groups the support set takes rows from.
    """
    found, counts = np.unique(labels, return_counts=True)
    counts = counts.astype(np.int64, copy=False)
    if groups is None or not len(found):
        return found, counts
    pairs, sizes = np.unique(np.stack([labels, groups]), axis=1, return_counts=True)
    largest = np.zeros(len(found), np.int64)
    np.maximum.at(largest, np.searchsorted(found, pairs[0]), sizes)
    return found, counts - largest + 1
