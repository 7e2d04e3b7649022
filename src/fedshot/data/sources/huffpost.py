"""HuffPost headlines: 41 categories of news, 900 headlines of each.

Source: Bao et al., Few-shot Text Classification with Distributional Signatures, 2020, from the News
Category Dataset of R. Misra. The headlines are tokenised, in lower case. Split of Bao et al. and
F2L: the first 20 classes are base, the next 5 validation, the last 16 novel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedshot.core.errors import DataError
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, check_classes
from fedshot.data.sources.embedding import TextSource, raw_texts
from fedshot.data.sources.source import dataset_folder
from fedshot.data.sources.texts import json_rows
from fedshot.data.tokens import RawTexts, Tokens

_CLASSES = 41
_FILE = "huffpost.json"


@dataclass(frozen=True, kw_only=True)
class HuffPost(TextSource):
    """Headlines from `<data_dir>/huffpost/huffpost.json`; classes are numbers without names."""

    cut: int = 44

    def _load(self, data_dir: Path | None, *, raw: bool) -> Dataset:
        """Read the headlines, in the order of the file; raw ones have spaces between words."""
        path = dataset_folder(data_dir, "huffpost", _FILE) / _FILE
        x: Tokens | RawTexts
        if raw:
            x, labels = raw_texts(((c, " ".join(words)) for c, words in headlines(path)), path)
        else:
            x, labels = self.embed(headlines(path), data_dir, path)
        y = np.array(labels, dtype=np.int64)
        names = tuple(str(c) for c in range(_CLASSES))
        check_classes(path, "headlines", y, names, "Fetch the file again.")
        split = ClassSplit(tuple(range(20)), tuple(range(20, 25)), tuple(range(25, _CLASSES)))
        return Dataset("huffpost", x, y, names, standard=split)


def headlines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (label, tokens) of JSON rows with `"raw": "a b c"` or `"text": ["a", "b", "c"]`."""
    for where, row in json_rows(path):
        label, words = row.get("label"), _words(row)
        if type(label) is not int or not 0 <= label < _CLASSES:  # isinstance would accept a bool
            raise DataError(
                f"{where}: label is not an integer in 0..{_CLASSES - 1}. Fetch the file again."
            )
        if words is None:
            raise DataError(
                f'{where}: expected "raw", words joined by spaces, or "text", a list of '
                "words. Fetch the file again."
            )
        yield label, words


def _words(row: dict[str, Any]) -> list[str] | None:
    raw, text = row.get("raw"), row.get("text")
    if isinstance(raw, str):
        return raw.split()
    if isinstance(text, list) and all(isinstance(word, str) for word in text):
        return text
    return None
