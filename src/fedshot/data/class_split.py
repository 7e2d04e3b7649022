"""The split of a dataset's classes, and of its rows, into base, validation and novel ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from fedshot.core.errors import ConfigError, DataError, nearest
from fedshot.core.seeds import Key
from fedshot.core.text import count, joined
from fedshot.data.dataset import Dataset, Ints, first_twice

_FEWEST = 3  # classes of data that are split by themselves
_MANY = 30  # number of classes above which an error lists only the closest ones
_FEW = 5  # maximum number of classes in an error
_INTEGER = re.compile(r"([+-]?[0-9]{1,18})(?:\.0+)?")  # a name that is an integer, such as 7 or 7.0


@dataclass(frozen=True)
class ClassSplit:
    """Class numbers for training (`base`), model selection (`validation`) and testing (`novel`).

    The parts are disjoint. `validation` may be empty, and so may `novel` if clients are tested on
    their own classes.
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
                "validation and novel classes must be disjoint. Remove one of the two."
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
        cls, dataset: Dataset, base: Sequence[str], validation: Sequence[str], novel: Sequence[str]
    ) -> ClassSplit:
        """Return the split given by class names, numbers as text, or ranges such as `0-4`.

        A name takes precedence over a number: "7" is the class named "7", if there is one. If all
        class names are integers, numbers and ranges refer to names, never to positions; otherwise
        they refer to positions. If only some class names are integers, a number or range that
        would select other classes as names than as positions raises DataError.
        """
        names = _Names(dataset)
        given = {"base": base, "validation": validation, "novel": novel}
        parts = [
            tuple(sorted(c for entry in entries for c in names.read(part, str(entry))))
            for part, entries in given.items()
        ]
        twice = first_twice(chain(*parts))
        if twice is not None:
            where = joined(
                [part for part, found in zip(given, parts, strict=True) if twice in found]
            )
            raise DataError(
                f"class {dataset.class_names[twice]!r} occurs twice in the split ({where}); base, "
                "validation and novel classes must be disjoint. Remove one of the two."
            )
        return cls(*parts)

    @classmethod
    def at_random(
        cls, dataset: Dataset, n_base: int, n_validation: int, n_novel: int, key: Key
    ) -> ClassSplit:
        """Return a random split of the classes that have examples; `key` seeds the draw.

        Raises DataError if there are fewer such classes than asked for.
        """
        n, held = n_base + n_validation + n_novel, np.unique(dataset.y)
        if min(n_base, n_validation, n_novel) < 0:
            raise DataError(
                f"split.random is [{n_base}, {n_validation}, {n_novel}]; expected numbers of "
                "classes, 0 or more."
            )
        if n > len(held):
            empty = dataset.n_classes - len(held)
            besides = f" with examples, and {empty} without" if empty else ""
            raise DataError(
                f"cannot split {dataset.name} into {n_base} base, {n_validation} validation and "
                f"{n_novel} novel classes; it has {len(held)} classes{besides}. Ask for fewer."
            )
        order = held[key.at("classes").numpy().permutation(len(held))[:n]]
        parts = np.split(order, (n_base, n_base + n_validation))
        return cls(*(tuple(sorted(part.tolist())) for part in parts))


@dataclass(frozen=True, eq=False)
class RowSplit:
    """Row numbers for training (`base`), model selection (`validation`) and testing (`novel`).

    The parts have different classes, or the same classes and different users.
    """

    base: Ints
    validation: Ints
    novel: Ints

    @classmethod
    def of_classes(cls, dataset: Dataset, split: ClassSplit) -> RowSplit:
        """Return the rows of the classes in each part of a split."""
        return cls(*map(dataset.images_of, (split.base, split.validation, split.novel)))


def random_shares(dataset: Dataset) -> tuple[int, int, int]:
    """Return the default numbers of base, validation and novel classes for data without a split.

    Of the classes that have examples, a fifth (at least one) are for validation, as many for the
    test, and the others for training.
    """
    classes = len(np.unique(dataset.y))
    if classes < _FEWEST:
        raise DataError(
            f"{dataset.name} has {count(classes, 'class', 'classes')}, and training, validation "
            f"and test need classes of their own, at least {_FEWEST} in all. Add examples of "
            "more classes."
        )
    held_out = max(1, classes // 5)
    return classes - 2 * held_out, held_out, held_out


class _Names:
    """Resolves the entries of a split to the class numbers of a dataset."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._numbers = {name: c for c, name in enumerate(dataset.class_names)}
        self._values = {
            c: int(value[1])
            for name, c in self._numbers.items()
            if (value := _INTEGER.fullmatch(name))
        }

    def read(self, part: str, entry: str) -> Iterable[int]:
        """Return the class numbers of an entry, such as "0-4"; errors name the split's `part`."""
        if entry in self._numbers:
            return (self._numbers[entry],)
        data, names = self._dataset, self._dataset.class_names
        ends = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", entry)
        if ends is None:
            raise DataError(f"{part}: {data.name} has no class {entry!r}. {_closest(entry, names)}")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        by_name = [c for c, value in self._values.items() if first <= value <= last]
        by_position = range(first, last + 1)
        chosen: Sequence[int] = by_position
        known: Collection[int] = range(data.n_classes)
        what = "class numbers are"
        if len(self._values) == data.n_classes:
            chosen, known = by_name, set(self._values.values())
            what = "class names are the integers"
        elif by_name and (len(by_name) != len(by_position) or by_name != list(by_position)):
            raise DataError(
                f"{part}: {entry!r} is ambiguous in {data.name}, where some class names are "
                f"integers: by name {some_names(names, by_name)}, by position "
                f"{some_names(names, by_position)}. List the names of the classes."
            )
        if first > last or first not in known or last not in known:
            raise DataError(
                f"{part}: {entry!r} is not a class or range of classes of {data.name}; its {what} "
                f"{min(known)} to {max(known)}, and a range begins and ends with one of them, the "
                "smaller one first"
            )
        return chosen


def some_names(names: Sequence[str], classes: Sequence[int]) -> str:
    """Return, as text, the names of the first few of `classes` that exist, or "none"."""
    held = [repr(names[c]) for c in classes[: len(names)] if c < len(names)]
    return ", ".join(held[:_FEW]) + (", ..." if len(held) > _FEW else "") or "none"


def _closest(name: str, names: Sequence[str]) -> str:
    if len(names) <= _MANY:
        return nearest(name, names)
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.3)
    hint = f"Closest: {', '.join(close)}. " if close else ""
    return f"{hint}It has {len(names)} classes; numbers and ranges such as 0-4 work too."


@dataclass(frozen=True)
class SplitOptions:
    """The classes for training, validation and testing; by default, the data's own split.

    Args:
        base: classes to train on: names, numbers, or ranges such as "0-4".
        validation: classes whose accuracy selects the round to test; may be empty.
        novel: classes to test on.
        random: numbers of base, validation and novel classes to draw at random.
        users: shares of the users for training, validation and testing, such as [0.6, 0.2, 0.2], to
            split the data by user instead of by class.
        seed: seed of the random split by `random` or `users`; null for the test's seed, test.seed.
    """

    base: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    novel: tuple[str, ...] = ()
    random: tuple[int, int, int] | None = None
    users: tuple[float, float, float] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        ways = {
            "named classes": bool(self.base or self.validation or self.novel),
            "split.random": self.random is not None,
            "split.users": self.users is not None,
        }
        chosen = [way for way, used in ways.items() if used]
        if len(chosen) > 1:
            raise ConfigError(f"{' and '.join(chosen)} exclude each other; use one.")
        if self.seed is not None and self.random is None and self.users is None:
            raise ConfigError(
                f"split.seed is {self.seed}, but nothing is drawn at random. Set split.random or "
                "split.users, or leave the seed out."
            )

    def of(self, dataset: Dataset, standard: ClassSplit | None, key: Key) -> ClassSplit:
        """Return the split that these options define, or else `standard`, the data's own split.

        Raises ConfigError if neither is given.
        """
        if self.random is not None:
            return ClassSplit.at_random(dataset, *self.random, key.at("split"))
        if self.base or self.validation or self.novel:
            return ClassSplit.from_names(dataset, self.base, self.validation, self.novel)
        if standard is None:
            by_users = (
                "; or split.users to three shares of the users, such as [0.6, 0.2, 0.2], to train, "
                "to choose the round and to test, all on the same classes"
            )
            raise ConfigError(
                f"{dataset.name} has no split of its own; set split.base and split.novel to class "
                f"names, or split.random to three numbers of classes"
                f"{by_users if dataset.users is not None else ''}."
            )
        return standard
