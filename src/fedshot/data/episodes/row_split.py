"""The rows of a dataset for training, validation and test, split by class or by user."""

from __future__ import annotations

from dataclasses import dataclass

from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, Ints


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
