"""Labelled images or texts in memory, and which of their classes are for what.

A dataset is a few blocks of bytes, never a list of objects: they may be memory maps, and clients
hold row numbers rather than copies.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from fedshot.data.tokens import Tokens
from fedshot.errors import DataError, nearest
from fedshot.keys import Key

Ints: TypeAlias = npt.NDArray[np.int64]
Pixels: TypeAlias = npt.NDArray[np.uint8]
T = TypeVar("T")

_CHUNK = 1 << 24  # bytes of images hashed at a time
_MANY = 30  # classes above which an error names only the closest ones


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images `x` (uint8 [n, H, W, C]), or texts (`Tokens`), and class numbers `y` (int64 [n]).

    `users` are numbers from 0 on, never names. `standard` is the split the data came with, if any.
    """

    name: str
    x: Pixels | Tokens
    y: Ints
    class_names: tuple[str, ...]
    users: Ints | None = None
    standard: ClassSplit | None = None
    known_digest: str | None = None  # set by the cache alone, which keeps it beside the images

    def __post_init__(self) -> None:
        if not isinstance(self.x, Tokens):
            _check_pixels(self.name, self.x)
        y, users, n = self.y, self.users, len(self.x)
        noun = "text" if self.is_text else "image"
        if y.dtype != np.int64 or y.shape != (n,):
            raise DataError(
                f"{self.name}: labels are {y.dtype}{list(y.shape)}; expected int64[{n}], one "
                f"for each {noun}"
            )
        if y.min() < 0 or y.max() >= self.n_classes:
            raise DataError(
                f"{self.name}: labels run from {y.min()} to {y.max()}; with {self.n_classes} class "
                f"names they must lie in 0..{self.n_classes - 1}"
            )
        twice = _first_twice(self.class_names)
        if twice is not None:
            raise DataError(f"{self.name}: class name {twice!r} occurs twice; names must differ")
        if users is not None and (users.dtype != np.int64 or users.shape != y.shape):
            raise DataError(
                f"{self.name}: users are {users.dtype}{list(users.shape)}; expected "
                f"int64[{n}], one for each {noun}"
            )
        if users is not None and users.min() < 0:
            raise DataError(
                f"{self.name}: user number {users.min()} is negative; count users from 0"
            )
        if self.standard is not None:
            self.standard.check(self)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def n_classes(self) -> int:
        """The number of classes, with or without images."""
        return len(self.class_names)

    @property
    def is_text(self) -> bool:
        """Whether these are texts; else they are images."""
        return isinstance(self.x, Tokens)

    @property
    def pixels(self) -> Pixels:
        """The images; raises DataError for texts."""
        if isinstance(self.x, Tokens):
            raise DataError(f"{self.name} holds texts; this needs images")
        return self.x

    @property
    def shape(self) -> tuple[int, ...]:
        """The (height, width, channels) of an image, or (longest length, vector size) of a text."""
        if isinstance(self.x, Tokens):
            return self.x.cut, self.x.dim
        return self.x.shape[1:]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of shapes, types, values and class names, as hex."""
        if self.known_digest is not None:
            return self.known_digest
        sha = hashlib.sha256()
        if isinstance(self.x, Tokens):
            self.x.hash_into(sha)
        else:
            sha.update(f"x:{self.x.dtype}{self.x.shape};y:{self.y.dtype}{self.y.shape};".encode())
            rows = max(1, _CHUNK // max(1, self.x[0].nbytes))
            for start in range(0, len(self.x), rows):
                sha.update(self.x[start : start + rows].data)
        sha.update(np.ascontiguousarray(self.y).data)
        if self.users is not None:
            sha.update(b"users")
            sha.update(np.ascontiguousarray(self.users).data)
        for name in self.class_names:
            sha.update(f"{len(name)}:{name}".encode("utf-8", "surrogateescape"))
        return sha.hexdigest()

    def images_of(self, classes: Iterable[int]) -> Ints:
        """Return the sorted row numbers of the images (or texts) of these classes."""
        wanted = np.zeros(self.n_classes, dtype=bool)
        for c in classes:
            if not 0 <= c < self.n_classes:
                raise DataError(
                    f"{self.name}: class number {c} does not exist; expected "
                    f"0..{self.n_classes - 1}"
                )
            wanted[c] = True
        return np.flatnonzero(wanted[self.y]).astype(np.int64, copy=False)


@dataclass(frozen=True)
class ClassSplit:
    """Which class numbers train (`base`), choose (`validation`) and test (`novel`).

    The three never share a class; `validation` may be empty.
    """

    base: tuple[int, ...]
    validation: tuple[int, ...]
    novel: tuple[int, ...]

    def __post_init__(self) -> None:
        for part, classes in (("base", self.base), ("novel", self.novel)):
            if not classes:
                raise DataError(f"the split has no {part} classes; name at least one")
        twice = _first_twice(chain(self.base, self.validation, self.novel))
        if twice is not None:
            raise DataError(
                f"class number {twice} occurs twice in the split ({self._parts_of(twice)}); base, "
                "validation and novel classes must be disjoint. Remove it from one place."
            )

    def _parts_of(self, c: int) -> str:
        parts = ("base", "validation", "novel")
        return ", ".join(part for part in parts if c in getattr(self, part))

    def check(self, dataset: Dataset) -> None:
        """Raise DataError unless every class number exists in the dataset."""
        for c in chain(self.base, self.validation, self.novel):
            if not 0 <= c < dataset.n_classes:
                raise DataError(
                    f"the split's {self._parts_of(c)} names class number {c}; {dataset.name} has "
                    f"{dataset.n_classes} classes, 0..{dataset.n_classes - 1}"
                )

    @classmethod
    def from_names(
        cls,
        dataset: Dataset,
        base: Sequence[str],
        validation: Sequence[str],
        novel: Sequence[str],
    ) -> ClassSplit:
        """Return the split told by class names, numbers as text, or ranges such as `0-4`.

        A name wins over a number: where a class is called "7", that class is meant.
        """
        numbers = {name: c for c, name in enumerate(dataset.class_names)}

        def read(part: str, entries: Sequence[str]) -> tuple[int, ...]:
            return tuple(
                sorted(c for entry in entries for c in _read(dataset, numbers, part, entry))
            )

        return cls(read("base", base), read("validation", validation), read("novel", novel))

    @classmethod
    def at_random(
        cls, dataset: Dataset, n_base: int, n_validation: int, n_novel: int, key: Key
    ) -> ClassSplit:
        """Return a split of that many classes each, drawn under `key`."""
        asked = n_base + n_validation + n_novel
        if min(n_base, n_validation, n_novel) < 0 or asked > dataset.n_classes:
            raise DataError(
                f"cannot split {dataset.name} into {n_base} base, {n_validation} validation and "
                f"{n_novel} novel classes; it has {dataset.n_classes} classes. Ask for fewer."
            )
        order = key.at("classes").numpy().permutation(dataset.n_classes)[:asked].tolist()
        ends = (n_base, n_base + n_validation)
        return cls(
            tuple(sorted(order[: ends[0]])),
            tuple(sorted(order[ends[0] : ends[1]])),
            tuple(sorted(order[ends[1] :])),
        )


def _check_pixels(name: str, x: Pixels) -> None:
    if x.dtype != np.uint8 or x.ndim != 4:
        raise DataError(
            f"{name}: images are {x.dtype}{list(x.shape)}; expected uint8[n, H, W, C], "
            "values 0 to 255. Scale and cast them first."
        )
    if not x.flags.c_contiguous:
        raise DataError(
            f"{name}: images are not contiguous in memory; expected C order. "
            "Pass np.ascontiguousarray(x)."
        )
    if x.size == 0:
        raise DataError(f"{name}: images are {list(x.shape)}; expected at least one image")


def _read(dataset: Dataset, numbers: dict[str, int], part: str, entry: str) -> Iterable[int]:
    """Return the class numbers meant by one entry of a split."""
    entry = str(entry)
    if entry in numbers:
        return (numbers[entry],)
    ends = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", entry)
    if ends is None:
        raise DataError(
            f"{part}: {dataset.name} has no class {entry!r}. {_closest(entry, dataset.class_names)}"
        )
    first, last = int(ends[1]), int(ends[2] or ends[1])
    if first > last or last >= dataset.n_classes:
        raise DataError(
            f"{part}: {entry!r} is not a class or range of classes of {dataset.name}; class "
            f"numbers are 0..{dataset.n_classes - 1}, the smaller end first"
        )
    return range(first, last + 1)


def _closest(name: str, names: Sequence[str]) -> str:
    if len(names) <= _MANY:
        return nearest(name, names)
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.3)
    hint = f"Closest: {', '.join(close)}. " if close else ""
    return f"{hint}It has {len(names)} classes; numbers and ranges such as 0-4 work too."


def _first_twice(values: Iterable[T]) -> T | None:
    seen: set[T] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None
