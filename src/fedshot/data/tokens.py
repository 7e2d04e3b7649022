"""Texts in memory: word numbers with frozen word vectors, or texts for an encoder's tokenizer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedshot.core.errors import DataError

PADDING = 0  # word number after the end of a text; its vector is zero
UNKNOWN = 1  # word number of every word without a vector
FIRST_WORD = 2  # row of the first word with a vector

Words: TypeAlias = npt.NDArray[np.int32]
Ints: TypeAlias = npt.NDArray[np.int64]
Table: TypeAlias = npt.NDArray[np.float32]


class Numbers(dict[str, int]):
    """A dictionary that gives each new word or name the next number, starting at 0."""

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        return number


@dataclass(frozen=True, eq=False)
class Tokens:
    """Texts as word numbers (token ids), with the vectors of the words.

    Text i is `ids[offsets[i]:offsets[i + 1]]`, and the vector of word number w is `table[w]`. A
    text may be empty. `cut` is the maximum length of a text, and part of a model's input shape.
    `words` are the words that belong to `table[FIRST_WORD:]`, if known. `dropped` is the
    number of words dropped because they have no vector. `words` and `dropped` are not hashed.
    """

    ids: Words  # [m], each PADDING < id < V
    offsets: Ints  # [n + 1]
    table: Table  # [V, d]
    cut: int
    words: tuple[str, ...] = ()
    dropped: int = 0

    def __post_init__(self) -> None:
        ids, o, table = self.ids, self.offsets, self.table
        if table.dtype != np.float32 or table.ndim != 2 or len(table) < FIRST_WORD:
            raise DataError(
                f"word vectors are {table.dtype}{list(table.shape)}; expected float32[V, d], row 0 "
                "for padding and row 1 for unknown words. Use "
                "fedshot.data.sources.glove.load_vectors."
            )
        if table.shape[1] < 1 or table[PADDING].any() or not np.isfinite(table).all():
            raise DataError(
                "word vectors must be finite, with at least one column and row 0 (padding) all "
                "zero. Use fedshot.data.sources.glove.load_vectors."
            )
        if o.dtype != np.int64 or o.ndim != 1 or len(o) < 2 or o[0] != 0 or o[-1] != len(ids):
            raise DataError(
                f"offsets are {o.dtype}{list(o.shape)} and do not divide {len(ids)} words into "
                f"texts; expected int64 from 0 to {len(ids)}, for at least one text"
            )
        if self.words and len(self.words) != len(table) - FIRST_WORD:
            raise DataError(
                f"there are {len(self.words)} words for {len(table) - FIRST_WORD} vectors; "
                "expected one word for each row after the first two. Use "
                "fedshot.data.sources.embedding.TextOptions.embed."
            )
        lengths = np.diff(o)
        if lengths.min() < 0 or not lengths.max() <= self.cut or self.cut < 1:
            raise DataError(
                f"texts have {lengths.min()} to {lengths.max()} words and cut is {self.cut}; "
                "expected ascending offsets, and texts of at most `cut` words. Truncate them."
            )
        if ids.dtype != np.int32 or ids.ndim != 1:
            raise DataError(f"word numbers are {ids.dtype}{list(ids.shape)}; expected int32[m]")
        if len(ids) and (ids.min() <= PADDING or ids.max() >= len(table)):
            raise DataError(
                f"word numbers run from {ids.min()} to {ids.max()}; with {len(table)} vectors they "
                f"must lie in 1..{len(table) - 1} (0 is padding)"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def dim(self) -> int:
        """The length of a word vector."""
        return int(self.table.shape[1])

    @property
    def known(self) -> float:
        """The share of words, including dropped ones, that have a vector."""
        return float((self.ids >= FIRST_WORD).sum()) / max(1, len(self.ids) + self.dropped)

    @property
    def n_unknown(self) -> int:
        """The number of texts in which no word has a vector, including empty texts."""
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.ids >= FIRST_WORD)])
        return int((before[self.offsets[1:]] == before[self.offsets[:-1]]).sum())

    @property
    def lacking(self) -> str:
        """A description of the texts and words without a vector; "" if every word has one."""
        if self.known == 1 and not self.n_unknown:
            return ""
        return (
            f"{self.n_unknown:,} of {len(self):,} texts are empty or have no word with a vector; "
            f"{100 * (1 - self.known):.1f} % of the words have none"
        )

    def check_known(self, name: object) -> None:
        """Raise DataError if more than half of the texts, or of the words, have no vector."""
        if 2 * self.n_unknown > len(self) or self.known < 0.5:
            raise DataError(
                f"{name}: {self.lacking}; expected at most half of the texts and half of the "
                "words. Remove such texts, or set `vectors` to a file of their language."
            )

    def lengths(self, indices: Ints) -> Ints:
        """Return the number of words of each of these k texts, int64 [k]."""
        return self.offsets[indices + 1] - self.offsets[indices]

    def rows(self, indices: Ints) -> Words:
        """Return these k texts as int32 [k, L], padded with 0 to the longest; L is at least 1."""
        lengths = self.lengths(indices)
        column = np.arange(max(1, int(lengths.max(initial=0))))
        real = column < lengths[:, None]
        out = np.zeros(real.shape, dtype=np.int32)
        out[real] = self.ids[(self.offsets[indices][:, None] + column)[real]]
        return out

    def only(self, indices: Ints) -> Tokens:
        """Return these texts, in this order, with the same table."""
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths(indices))])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
        ids = self.ids[np.repeat(self.offsets[indices], np.diff(offsets)) + within]
        return Tokens(ids, offsets, self.table, self.cut, self.words)

    def alone(self) -> Tokens:
        """Return the same texts with a table that has only the vectors of their own words."""
        found = np.unique(self.ids)
        rows = np.concatenate([np.arange(FIRST_WORD), found[found >= FIRST_WORD]])
        ids = np.searchsorted(rows, self.ids).astype(np.int32)
        words = tuple(self.words[i - FIRST_WORD] for i in rows[FIRST_WORD:]) if self.words else ()
        return Tokens(ids, self.offsets, self.table[rows], self.cut, words)

    def hash_into(self, sha: hashlib._Hash) -> None:
        """Update a hash with shapes, cut, word numbers and vectors."""
        sha.update(f"tokens:{self.ids.shape}{self.offsets.shape}{self.table.shape}".encode())
        sha.update(f"cut:{self.cut};".encode())
        for array in (self.ids, self.offsets, self.table):
            sha.update(np.ascontiguousarray(array).data)


@dataclass(frozen=True, eq=False)
class RawTexts:
    """Texts that are not tokenised. Only an encoder takes them (`model.encoder`)."""

    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def hash_into(self, sha: hashlib._Hash) -> None:
        """Update a hash with all texts and their lengths."""
        sha.update(f"raw:{len(self)};".encode())
        for text in self.texts:
            data = text.encode("utf-8", "surrogatepass")
            sha.update(f"{len(data)}:".encode())
            sha.update(data)
