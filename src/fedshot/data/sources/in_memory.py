"""Data that a Python program passes in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedshot.core.errors import DataError
from fedshot.data.dataset import Dataset
from fedshot.data.sources.source import Source


@dataclass(frozen=True)
class InMemory(Source):
    """A dataset passed to `Config.with_data`; the run folder records its hash, not the data.

    Args:
        dataset: name of the dataset, or class name of a custom source.
        digest: SHA-256 of the content; null for a custom source, until it is loaded.
    """

    dataset: str
    digest: str | None = None
    held: Any = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, data: Dataset | Source) -> InMemory:
        """Wrap a dataset, or a custom source that loads one."""
        if isinstance(data, Dataset):
            made = cls(data.name, data.digest)
        else:
            made = cls(type(data).__name__)
        object.__setattr__(made, "held", data)
        return made

    def load(self, data_dir: Path | None) -> Dataset:
        """Return the dataset. Raises DataError in a process that it was not passed to."""
        return self._load(data_dir, raw=False)

    def load_raw(self, data_dir: Path | None) -> Dataset:
        """Return the dataset as `load` does, but with raw texts if the source was a custom one."""
        return self._load(data_dir, raw=True)

    def _load(self, data_dir: Path | None, *, raw: bool) -> Dataset:
        if isinstance(self.held, Dataset):
            return self.held
        if self.held is not None:
            read = self.held.load_raw if raw else self.held.load
            loaded: Dataset = read(data_dir)
            return loaded
        known = f", SHA-256 {self.digest}" if self.digest else ""
        raise DataError(
            f"the dataset {self.dataset!r} was passed in Python{known}, and no file "
            "contains it. In Python, create it again and pass it: to fedshot.train(data=dataset, "
            "out=folder, resume=True), or to `evaluate` or `calibrate` of fedshot.open_run(folder)."
        )
