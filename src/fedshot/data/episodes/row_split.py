"""Which rows of a dataset train, choose and test: by class, or by user."""

from __future__ import annotations

from dataclasses import dataclass

from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, Ints


@dataclass(frozen=True, eq=False)
class Rows:
    """Row numbers to train on (`base`), choose the round by (`validation`), test on (`novel`).

    What is new at test is the classes, or the users where all parts share the classes.
    """

    base: Ints
    validation: Ints
    novel: Ints

    @classmethod
    def of_classes(cls, dataset: Dataset, split: ClassSplit) -> Rows:
        """Return the rows of the split's classes."""
        return cls(
            dataset.images_of(split.base),
            dataset.images_of(split.validation),
            dataset.images_of(split.novel),
        )
