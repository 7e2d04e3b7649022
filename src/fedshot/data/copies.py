"""Counts duplicate examples, since copies of an image may be in both training and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from fedshot.data.dataset import Dataset, Ints
from fedshot.data.tokens import Numbers, RawTexts, Tokens

_MANY = 0.01  # share of identical examples above which the report gives advice
_SOME = 512  # bytes from the middle of an image, which suffice to distinguish most


@dataclass(frozen=True)
class Copies:
    """Counts of examples that are exact copies of another example, as seen by the model.

    Args:
        examples: number of examples, without empty texts.
        identical: number identical to any other example.
        within: number identical to another example of the same class.
        across: number identical to an example of another class.
        parts: number identical to an example of another part (training, validation, test).
    """

    examples: int
    identical: int = 0
    within: int = 0
    across: int = 0
    parts: int = 0

    @classmethod
    def of(cls, dataset: Dataset, parts: Sequence[Ints]) -> Copies:
        """Count identical rows within and across `parts`.

        A row that is in several parts counts only in the first of them.
        """
        if dataset.encoding is not None:  # features of copies may differ in the last bits
            dataset = dataset.encoding.original or dataset
        every = np.concatenate(parts)
        rows, first = np.unique(every, return_index=True)
        part = np.repeat(np.arange(len(parts)), [len(one) for one in parts])[first]
        if isinstance(dataset.x, Tokens):
            full = dataset.x.lengths(rows) > 0
            rows, part = rows[full], part[full]
        n = len(rows)
        if isinstance(dataset.x, RawTexts):
            full = np.array([bool(dataset.x.texts[row]) for row in rows], dtype=bool)
            rows, part = rows[full], part[full]
        # Only images whose middle bytes equal those of another image are hashed in full.
        twins = _sizes(_contents(dataset, rows, _SOME)) > 1
        rows, part = rows[twins], part[twins]
        group = _contents(dataset, rows)
        same, alike, beside = (_sizes(group, other) for other in (None, dataset.y[rows], part))
        counts = (same > 1, alike > 1, same > alike, same > beside)
        return cls(n, *(int(count.sum()) for count in counts))

    def __str__(self) -> str:
        counts = (
            f"{self.identical:,} of {self.examples:,} examples are identical to another one: "
            f"{self.within:,} to one of the same class, {self.across:,} to one of another class, "
            f"{self.parts:,} to one of another part (training, validation, test)"
        )
        if self.identical < _MANY * self.examples:
            return counts
        return (
            f"{counts}. Identical examples in support and query sets, or in training and test, "
            "raise the accuracy; remove the copies from the data."
        )


def _contents(dataset: Dataset, rows: Ints, most: int | None = None) -> Ints:
    """Return a number for each row, equal for rows with the same text or the same image.

    If `most` is given, only the middle `most` bytes of each image are compared.
    """
    x, numbers = dataset.x, Numbers()
    if isinstance(x, Tokens):
        ends = zip(x.offsets[rows].tolist(), x.offsets[rows + 1].tolist(), strict=True)
        held = (x.ids[start:end].tobytes() for start, end in ends)
    elif isinstance(x, RawTexts):
        held = (x.texts[row].encode("utf-8", "surrogatepass") for row in rows.tolist())
    else:
        flat = x.reshape(len(x), -1)
        size = flat.shape[1] if most is None else min(most, flat.shape[1])
        start = (flat.shape[1] - size) // 2
        held = (flat[row, start : start + size].tobytes() for row in rows.tolist())
    hashes = (blake2b(one, digest_size=16).hexdigest() for one in held)
    return np.array([numbers[content] for content in hashes], dtype=np.int64)


def _sizes(group: Ints, other: Ints | None = None) -> Ints:
    """Return, for each row, the number of rows with its value in `group`, int64 [rows].

    Values are integers from 0. If `other` is given, only rows that also have the same value in
    `other` are counted.
    """
    if other is not None:
        pairs = np.stack([group, other])
        group = np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1)
    return np.bincount(group)[group]
