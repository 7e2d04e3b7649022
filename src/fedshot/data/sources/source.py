"""The interface of a source of data."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset


class Source(Protocol):
    """A source of data; its fields are its options."""

    def load(self, data_dir: Path | None) -> Dataset:
        """Read the data; `data_dir` is the folder of downloaded datasets."""

    def split(self, dataset: Dataset) -> ClassSplit | None:
        """Return the standard class split of a loaded dataset, or None if it has none."""
        return dataset.standard
