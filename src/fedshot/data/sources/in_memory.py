"""Examples that a program holds: they come from no file that a configuration could name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshot.core.errors import DataError
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset

if TYPE_CHECKING:  # it lists all sources, this one too
    from fedshot.data.sources.registry import Source


@dataclass(frozen=True)
class InMemory:
    """A dataset that a program put in by `Config.with_data`; its hash is recorded, not the data.

    Args:
        dataset: its name.
        digest: SHA-256 of its content; null until a source of the program's own is loaded.
    """

    dataset: str
    digest: str | None = None
    held: Any = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, data: Dataset | Source) -> InMemory:
        """Return the source of a dataset, or of what a source of a program's own will load."""
        if isinstance(data, Dataset):
            made = cls(data.name, data.digest)
        else:
            made = cls(type(data).__name__)
        object.__setattr__(made, "held", data)
        return made

    def load(self, data_dir: Path | None) -> Dataset:
        """Return the dataset. Raises DataError where the program that held it is gone."""
        if isinstance(self.held, Dataset):
            return self.held
        if self.held is not None:
            loaded: Dataset = self.held.load(data_dir)
            return replace(loaded, standard=self.held.split(loaded))
        known = f", SHA-256 {self.digest}" if self.digest else ""
        raise DataError(
            f"the dataset {self.dataset!r} was in a program's memory{known}: no file here holds "
            "it. Make it again in Python and give it to the configuration of the run: "
            "Experiment(PreparedRun(run_folder.configuration(folder).with_data(dataset)), folder) "
            "can "
            "be run and tested."
        )

    def split(self, dataset: Dataset) -> ClassSplit | None:
        """Return the split that the dataset came with, if any."""
        return dataset.standard
