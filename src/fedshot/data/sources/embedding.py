"""Options that all sources of texts share, and the conversion of words to numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fedshot.data.sources.glove import Keep, Unknown, digest, embed, find_vectors
from fedshot.data.tokens import Tokens

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options of all sources of texts.

    Args:
        vectors: file of word vectors; null for GloVe 6B from the data folder.
        dim: dimension of the GloVe 6B vectors, if `vectors` names no other file.
        cut: maximum number of words of a text; later words are dropped.
        keep: "known" drops words that have no vector; "all" keeps them.
        unknown: vector used for words that have none: "zeros", or "unk", that of the word "unk".
    """

    vectors: str | None = None
    dim: int = 100
    cut: int = 100
    keep: Keep = "all"
    unknown: Unknown = "zeros"

    def embed(
        self, rows: Iterable[tuple[T, Sequence[str]]], data_dir: Path | None, name: object
    ) -> tuple[Tokens, list[T]]:
        """Return the texts as word numbers, and the labels of the texts.

        Args:
            rows: (label, words) of each text; not read if the vectors are missing.
            data_dir: the folder of datasets.
            name: name of the data in errors.
        """
        labels: list[T] = []

        def texts() -> Iterator[Sequence[str]]:
            for label, words in rows:
                labels.append(label)
                yield words

        vectors = find_vectors(self.vectors, self.dim, data_dir)
        tokens = embed(
            texts(), vectors, name=name, cut=self.cut, dim=self.dim, keep=self.keep,
            unknown=self.unknown,
        )  # fmt: skip
        return tokens, labels


def reading_digest(options: TextOptions, data_dir: Path | None) -> str:
    """Return a SHA-256 that is equal on two machines if they map words to the same vectors."""
    vectors = digest(find_vectors(options.vectors, options.dim, data_dir), options.dim)
    text = f"{vectors} {options.cut} {options.keep} {options.unknown}"
    return hashlib.sha256(text.encode()).hexdigest()
