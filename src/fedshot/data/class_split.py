"""Which of a dataset's classes are for what."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from fedshot.data.dataset import Dataset, first_twice
from fedshot.errors import DataError, nearest
from fedshot.keys import Key

_MANY = 30  # classes above which an error names only the closest ones


@dataclass(frozen=True)
class ClassSplit:
    """Which class numbers train (`base`), choose (`validation`) and test (`novel`).

    The three never share a class. `validation` may be empty; so may `novel`, where clients are
    tested on images of their own classes.
    """

    base: tuple[int, ...]
    validation: tuple[int, ...]
    novel: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.base:
            raise DataError("the split has no base classes; name at least one")
        twice = first_twice(chain(self.base, self.validation, self.novel))
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
        """Return a split of that many classes each, of those with examples, drawn under `key`."""
        asked, held = n_base + n_validation + n_novel, np.unique(dataset.y)
        if min(n_base, n_validation, n_novel) < 0 or asked > len(held):
            empty = dataset.n_classes - len(held)
            besides = f", and {empty} numbers or names without an example" if empty else ""
            raise DataError(
                f"cannot split {dataset.name} into {n_base} base, {n_validation} validation and "
                f"{n_novel} novel classes; it has {len(held)} classes{besides}. Ask for fewer."
            )
        order = held[key.at("classes").numpy().permutation(len(held))[:asked]].tolist()
        ends = (n_base, n_base + n_validation)
        return cls(
            tuple(sorted(order[: ends[0]])),
            tuple(sorted(order[ends[0] : ends[1]])),
            tuple(sorted(order[ends[1] :])),
        )


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
