"""The handwritten digits that come with scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset
from fedshot.data.sources.source import Source


@cache
def _digits() -> tuple[Any, Any]:
    """Return pixels [1797, 64], values 0 to 16, and labels, parsed once from scikit-learn's csv."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images, labels


@dataclass(frozen=True)
class Digits(Source):
    """The 1797 handwritten digits of 8 x 8 pixels that come with scikit-learn.

    Classes 0 to 4 are base classes, 5 to 9 novel ones.
    """

    def load(self, data_dir: Path | None) -> Dataset:
        """Read the digits from scikit-learn, which contains them; no file is needed."""
        del data_dir
        images, labels = _digits()
        x = np.round(images.reshape(-1, 8, 8, 1) * 255 / 16).astype(np.uint8)
        split = ClassSplit(base=(0, 1, 2, 3, 4), validation=(), novel=(5, 6, 7, 8, 9))
        return Dataset("digits", x, labels.astype(np.int64), tuple("0123456789"), standard=split)
