"""Which rows make an episode: classes by chance, of each some rows by chance.

The C kernel draws many episodes in the time that numpy needs for one, and keeps Python's lock, so
that workers do not wait for one another at every number. It reads numpy's own generator: the
numbers are the same, and where a numpy should ever draw others, numpy draws.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from fedshot.core import kernel_build
from fedshot.core.errors import DataError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Ints
from fedshot.data.episodes.spec import EpisodeSpec

MOST = 10_000  # things that the kernel draws from; numpy has another way with more
_BITS = ctypes.pythonapi.PyCapsule_GetPointer
_BITS.restype, _BITS.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class SampledRows(NamedTuple):
    """An episode as numbers."""

    classes: Ints  # the dataset's, class 0 first
    support: Ints  # rows, class by class
    query: Ints  # rows in random order, which must not tell their labels


class _Able(NamedTuple):
    """The classes with so many rows, for the kernel."""

    places: Ints  # among those held
    starts: Ints
    counts: Ints


class ClassIndex:
    """Rows of a dataset, class by class.

    Args:
        labels: of all rows of the dataset.
        rows: those held.
        groups: of all rows of the dataset; those of one group are nearly alike, and an episode has
            them in a class's support or in its queries, never in both.
    """

    def __init__(self, labels: Ints, rows: Ints, groups: Ints | None = None) -> None:
        own = labels[rows]
        order = np.argsort(own, kind="stable")
        self._rows = np.ascontiguousarray(rows[order], dtype=np.int64)
        self.classes, starts, counts = np.unique(own[order], return_index=True, return_counts=True)
        self._starts, self._counts = starts.astype(np.int64), counts.astype(np.int64)
        self._few = max(len(self.classes), int(self._counts.max(initial=0))) < MOST
        self._groups = None if groups is None else groups[self._rows]
        self._usable = self._counts if groups is None else usable(own[order], self._groups)[1]
        self._able: dict[int, _Able] = {}

    @cached_property
    def _by_class(self) -> list[Ints]:
        return np.split(self._rows, self._starts[1:]) if len(self.classes) else []

    def draw(self, spec: EpisodeSpec, rng: np.random.Generator, n: int = 1) -> list[SampledRows]:
        """Draw n episodes, classes uniform among those with enough rows.

        Raises DataError when there are fewer such classes than `spec` may ask for.
        """
        few = self._few and not spec.is_random_way and self._groups is None
        kernel = _checked_kernel() if few else None
        if kernel is None:
            return [self.draw_by_numpy(spec, rng) for _ in range(n)]
        return self.draw_by(kernel, spec, rng, n)

    def draw_by_numpy(self, spec: EpisodeSpec, rng: np.random.Generator) -> SampledRows:
        """Draw one: what the kernel has to come to."""
        chosen = self._choose(spec, rng)
        support, query = [], []
        for c in chosen.tolist():
            ours, others = self._apart(c, spec, rng)
            support.append(ours)
            query.append(others)
        classes = self.classes[chosen]
        return SampledRows(classes, np.concatenate(support), rng.permutation(np.concatenate(query)))

    def draw_by(
        self, kernel: Callable[..., None], spec: EpisodeSpec, rng: np.random.Generator, n: int
    ) -> list[SampledRows]:
        """Draw n episodes of one way by the kernel."""
        able = self._able_for(spec)
        way = min(spec.min_way, len(able.places))
        most = min(spec.shot + spec.query, int(able.counts.max()))
        width = way * (most + 1) + 1
        out = np.empty((n, width), dtype=np.int64)
        sizes = (n, len(able.places), way, spec.shot, most, spec.ordered)
        bits = rng.bit_generator
        with bits.lock:
            at = _BITS(bits.capsule, b"BitGenerator")
            held = (array.ctypes.data for array in (self._rows, able.starts, able.counts, out))
            kernel(at, *sizes, *held)
        classes = self.classes[able.places[out[:, :way]]]
        first = way * (spec.shot + 1) + 1  # of the queries
        support, ends = out[:, way : first - 1], first + out[:, first - 1]
        return [
            SampledRows(classes[e], support[e], out[e, first:end])
            for e, end in enumerate(ends.tolist())
        ]

    def rows_of_episode(
        self, spec: EpisodeSpec, rng: np.random.Generator
    ) -> tuple[Ints, list[Ints]]:
        """Return classes for an episode, and shot + query rows of each in random order."""
        chosen = self._choose(spec, rng)
        return self.classes[chosen], [self._some(c, spec, rng) for c in chosen.tolist()]

    def _some(self, c: int, spec: EpisodeSpec, rng: np.random.Generator) -> Ints:
        """Return up to shot + query rows of a class."""
        count = int(self._counts[c])
        n = min(count, spec.shot + spec.query)
        return self._by_class[c][rng.choice(count, n, replace=False)]

    def _apart(self, c: int, spec: EpisodeSpec, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Return `shot` rows of a class and up to `query` others, of no group of the first."""
        if self._groups is None:
            drawn = self._some(c, spec, rng)
            return drawn[: spec.shot], drawn[spec.shot :]
        rows, start = self._by_class[c], self._starts[c]
        _, group, sizes = np.unique(
            self._groups[start : start + len(rows)], return_inverse=True, return_counts=True
        )
        order = rng.permutation(len(sizes))
        ends = np.cumsum(sizes[order])  # rows of the first group, the first two, ...
        least = int(np.searchsorted(ends, spec.shot)) + 1
        most = int(np.searchsorted(ends, len(rows) - (spec.needed - spec.shot), side="right"))
        share = round(len(sizes) * spec.shot / (spec.shot + spec.query))
        ours = np.isin(group, order[: min(max(share, least), most)])
        query = min(spec.query, int((~ours).sum()))
        return (
            rng.choice(rows[ours], spec.shot, replace=False),
            rng.choice(rows[~ours], query, replace=False),
        )

    def _choose(self, spec: EpisodeSpec, rng: np.random.Generator) -> Ints:
        """Return the places of an episode's classes among those held, in the order of labels."""
        able = self._able_for(spec).places
        way = min(int(rng.integers(spec.min_way, spec.max_way, endpoint=True)), len(able))
        chosen: Ints = rng.choice(able, way, replace=False)
        if spec.ordered:
            chosen.sort()
        return chosen

    def _able_for(self, spec: EpisodeSpec) -> _Able:
        if spec.needed not in self._able:
            places = (self._usable >= spec.needed).nonzero()[0].astype(np.int64, copy=False)
            self._able[spec.needed] = _Able(places, self._starts[places], self._counts[places])
        able = self._able[spec.needed]
        if len(able.places) < spec.fewest:
            raise DataError(
                f"client data {spec.shortage(len(able.places))}. Lower `way`, `shot` or `query`, "
                "or give each client more images."
            )
        return able


def usable(labels: Ints, groups: Ints | None) -> tuple[Ints, Ints]:
    """Return the different labels and, of each, the rows that an episode can rely on.

    Where rows come in groups, that is all but the largest group, and one row of it: a support and
    queries of so many rows are found, whichever groups the support takes first.
    """
    found, counts = np.unique(labels, return_counts=True)
    counts = counts.astype(np.int64, copy=False)
    if groups is None or not len(found):
        return found, counts
    pairs, sizes = np.unique(np.stack([labels, groups]), axis=1, return_counts=True)
    largest = np.zeros(len(found), np.int64)
    np.maximum.at(largest, np.searchsorted(found, pairs[0]), sizes)
    return found, counts - largest + 1


@cache
def _checked_kernel() -> Callable[..., None] | None:
    """Return the C kernel where there is one and it draws what this numpy draws."""
    found = kernel()
    if found is None:
        return None
    rng = np.random.default_rng(0)
    class_index = ClassIndex(rng.integers(0, 9, 400), np.arange(400))
    for spec in (EpisodeSpec(5, 1, 15), EpisodeSpec(9, 5, 60, "up_to", "fixed")):
        one, other = Key(0).numpy(), Key(0).numpy()
        drawn = class_index.draw_by(found, spec, one, 4)
        wanted = [class_index.draw_by_numpy(spec, other) for _ in range(4)]
        if not all(map(np.array_equal, sum(drawn, ()), sum(wanted, ()))):
            return None
    return found


def kernel() -> Callable[..., None] | None:
    """Return the C function, which keeps Python's lock; None where there are no kernels."""
    library = kernel_build.library()
    if library is None:
        return None
    size, pointer = ctypes.c_ssize_t, ctypes.c_void_p
    takes = ctypes.PYFUNCTYPE(None, pointer, *[size] * 6, *[pointer] * 4)
    return takes(("fedshot_draw", library))
