"""What every source of texts does with its words, under the options that all of them have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from fedshot.data.sources.glove import Keep, Unknown, digest, embed, find_vectors
from fedshot.data.tokens import Tokens


@runtime_checkable
class TextOptions(Protocol):
    """The options of a source of texts."""

    @property
    def vectors(self) -> str | None:
        """File of word vectors; without it GloVe 6B from the data folder."""

    @property
    def dim(self) -> int:
        """Length of those vectors."""

    @property
    def cut(self) -> int:
        """Words kept of a text."""

    @property
    def keep(self) -> Keep:
        """Whether words without a vector stay."""

    @property
    def unknown(self) -> Unknown:
        """Vector of words without one."""


def embedded(
    texts: Iterable[Sequence[str]], options: TextOptions, data_dir: Path | None, name: object
) -> Tokens:
    """Return the texts in numbers, once the file of vectors is known to be there."""
    return embed(
        texts,
        find_vectors(options.vectors, options.dim, data_dir),
        name=name,
        cut=options.cut,
        dim=options.dim,
        keep=options.keep,
        unknown=options.unknown,
    )


def reading_digest(options: TextOptions, data_dir: Path | None) -> str:
    """Return a SHA-256 that two hosts share who turn the same words into the same vectors."""
    vectors = digest(find_vectors(options.vectors, options.dim, data_dir), options.dim)
    told = f"{vectors} {options.cut} {options.keep} {options.unknown}"
    return hashlib.sha256(told.encode()).hexdigest()
