"""What all sources of texts share: options, and the conversion of words to numbers."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from fedshot.core.errors import DataError
from fedshot.data.dataset import Dataset
from fedshot.data.sources.glove import Unknown, digest, find_vectors, load_vectors
from fedshot.data.sources.source import Source
from fedshot.data.sources.tokenizer import tokenize
from fedshot.data.tokens import FIRST_WORD, UNKNOWN, Numbers, RawTexts, Tokens

Keep: TypeAlias = Literal["all", "known"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options of all sources of texts.

    Args:
        vectors: file of word vectors; null for GloVe 6B from the data folder.
        dim: dimension of the GloVe 6B vectors, if `vectors` names no other file.
        cut: maximum number of words of a text; later words are dropped.
        keep: "known" drops words that have no vector; "all" keeps them.
        unknown: vector of words that have none: "zeros", or "unk", the vector of the word "unk".
    """

    vectors: str | None = None
    dim: int = 100
    cut: int = 100
    keep: Keep = "all"
    unknown: Unknown = "zeros"

    def embed(
        self, rows: Iterable[tuple[T, Sequence[str]]], data_dir: Path | None, name: object
    ) -> tuple[Tokens, list[T]]:
        """Return the texts as word numbers with word vectors, and the labels of the texts.

        Args:
            rows: (label, words) of each text; not read if the vectors are missing.
            data_dir: the folder of datasets.
            name: name of the data in errors.

        Raises DataError if there are no vectors, no texts, or no word with a vector.
        """
        if self.cut < 1:
            raise DataError(f"cut is {self.cut}; expected 1 or more words")
        vectors = find_vectors(self.vectors, self.dim, data_dir)
        labels: list[T] = []
        vocabulary = Numbers()
        raw, ends = array("i"), array("q", [0])
        for label, words in rows:
            labels.append(label)
            raw.extend(map(vocabulary.__getitem__, words))
            ends.append(len(raw))
        if not labels:
            raise DataError(f"{name} holds no texts; expected at least one")
        found, table = load_vectors(vectors, vocabulary, self.dim, self.unknown)
        row = np.array([found.get(word, UNKNOWN) for word in vocabulary], dtype=np.int32)
        if not (row >= FIRST_WORD).any():
            raise DataError(
                f"none of the {len(row)} different words of {name} is in {vectors}. Is it another "
                "language, or not in lower case? Set `vectors`."
            )
        ids, offsets = row[np.frombuffer(raw, dtype=np.int32)], np.frombuffer(ends, dtype=np.int64)
        candidates = ids >= FIRST_WORD if self.keep == "known" else np.ones(len(ids), dtype=bool)
        before = np.concatenate([[0], np.cumsum(candidates)])
        place = before[:-1] - np.repeat(before[offsets[:-1]], np.diff(offsets))
        kept = candidates & (place < self.cut)
        dropped = int((~candidates & (place < self.cut)).sum())
        offsets = np.concatenate([[0], np.cumsum(kept)])[offsets]
        return Tokens(ids[kept], offsets, table, self.cut, tuple(found), dropped), labels


@dataclass(frozen=True, kw_only=True)
class TextSource(TextOptions, Source):
    """A source that reads texts with word vectors, or untokenised for an encoder."""

    def load(self, data_dir: Path | None) -> Dataset:
        """Read and tokenise the texts.

        Raises DataError if the data or the word vectors are missing or damaged.
        """
        return self._load(data_dir, raw=False)

    def load_raw(self, data_dir: Path | None) -> Dataset:
        """Read the texts without tokenising them, in the same order as `load`.

        Raises DataError if the data are missing or damaged.
        """
        return self._load(data_dir, raw=True)

    @abstractmethod
    def _load(self, data_dir: Path | None, *, raw: bool) -> Dataset:
        """Read the texts, tokenised unless `raw` is true."""

    def read(
        self, rows: Iterable[tuple[T, str]], data_dir: Path | None, name: object, *, raw: bool
    ) -> tuple[Tokens | RawTexts, list[T]]:
        """Return texts, tokenised unless `raw` is true, and their labels.

        Args:
            rows: (label, text) of each text; not read if word vectors are needed and missing.
            data_dir: the folder of datasets.
            name: name of the data in errors.
            raw: whether to return the texts untokenised.

        Raises what `embed` raises, or if `raw` is true, DataError if there are no texts.
        """
        if raw:
            return raw_texts(rows, name)
        return self.embed(((label, tokenize(text)) for label, text in rows), data_dir, name)


def raw_texts(rows: Iterable[tuple[T, str]], name: object) -> tuple[RawTexts, list[T]]:
    """Return texts without tokenising them, and their labels; errors call the data `name`."""
    labels, texts = [], []
    for label, text in rows:
        labels.append(label)
        texts.append(text)
    if not labels:
        raise DataError(f"{name} holds no texts; expected at least one")
    return RawTexts(tuple(texts)), labels


def reading_digest(options: TextOptions, data_dir: Path | None) -> str:
    """Return a SHA-256 of the word vectors and of the options that decide which words are used.

    If it is equal on two machines, both turn a text into the same vectors.
    """
    vectors = digest(find_vectors(options.vectors, options.dim, data_dir), options.dim)
    text = f"{vectors} {options.cut} {options.keep} {options.unknown}"
    return hashlib.sha256(text.encode()).hexdigest()
