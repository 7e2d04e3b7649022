"""Untokenised texts, for an encoder that has its own tokenizer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


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
