"""Datasets of the Hugging Face hub, or of a local folder in its format; needs the extra `hf`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedshot.core.errors import DataError, nearest
from fedshot.core.extras import require
from fedshot.core.ranges import Side
from fedshot.core.regular_files import real_path
from fedshot.core.text import spelling
from fedshot.data.dataset import Dataset, Pixels
from fedshot.data.files.images import Aspect, decode
from fedshot.data.sources.embedding import TextSource
from fedshot.data.sources.missing import is_missing
from fedshot.data.sources.texts import labelled
from fedshot.data.tokens import Numbers, RawTexts, Tokens


@dataclass(frozen=True)
class HF(TextSource):
    """One split of a dataset that `datasets.load_dataset` reads; set `text` or `image`.

    Args:
        path: name on the hub, or a folder.
        config: configuration of the dataset, if it has several.
        part: split of the dataset, such as "train", or "train+test" to pool two splits.
        text: column of the texts.
        image: column of the images.
        label: column of the classes.
        user: column of the user, if known; users are stored only as numbers that start at 0.
        size: side in pixels of the square that images are resized to; null to keep their size,
            which must then be the same for all images.
        channels: 1 (grey) or 3 (colour).
        aspect: how images become squares: "squeeze" changes their aspect ratio, "crop" keeps the
            middle, "pad" adds black.
    """

    path: str
    config: str | None = None
    part: str = "train"
    text: str | None = None
    image: str | None = None
    label: str = "label"
    user: str | None = None
    size: Side | None = None
    channels: Literal[1, 3] = 3
    aspect: Aspect = "squeeze"

    def __post_init__(self) -> None:
        if (self.text is None) == (self.image is None):
            raise DataError("set either `text` or `image` to the column that holds the data")

    def _load(self, data_dir: Path | None, *, raw: bool) -> Dataset:
        """Download the split, unless it is cached, and read it into memory."""
        table = self._table()
        labels = self._names(table, self.label, "class")
        feature = table.features[self.label]
        if hasattr(feature, "int2str"):  # named classes are stored as numbers
            labels = [feature.int2str(c) for c in labels]
        users = None
        if self.user is not None:
            names = Numbers()
            users = [names[spelling(str(user))] for user in self._names(table, self.user, "user")]
        x: Pixels | Tokens | RawTexts
        if self.image is not None:
            x = self._images(table, self.image)
        else:
            x, _ = self.read(self._texts(table, str(self.text)), data_dir, self.path, raw=raw)
        stem = self.path.rstrip("/").rpartition("/")[2]
        return labelled(stem, x, [str(c) for c in labels], users)

    def _table(self) -> Any:
        require("hf", "data.name 'hf'")
        datasets = importlib.import_module("datasets")
        try:
            return datasets.load_dataset(self.path, self.config, split=self.part)
        except Exception as error:  # network, hub and readers raise many types
            raise DataError(
                f"{self.path} ({self.config}, {self.part}) cannot be loaded: {error}. Check "
                "`path`, `config` and `part`, and the network."
            ) from error

    def _names(self, table: Any, name: str, what: str) -> list[Any]:
        """Return the column with the class or user of each row.

        Raises DataError if a value is missing (on the hub, -1 means missing), or is neither text
        nor a number. The error quotes only missing values, since others may be users' names.
        """
        values = list(table[self._check(table, name)])
        for i, value in enumerate(values):
            if not isinstance(value, str | int | float | None):
                kind = type(value).__name__
                raise DataError(f"{self.path}, row {i}: {name!r} is a {kind}; expected one {what}")
        empty = [i for i, v in enumerate(values) if is_missing(v) or v in ("", -1)]
        if empty:
            raise DataError(
                f"{self.path}, row {empty[0]}: {name!r} is {values[empty[0]]!r}, which names no "
                f"{what}; so do {len(empty)} of {len(values)} rows. Remove these rows, or choose "
                "another `part`; if -1 is a name, write it as a word."
            )
        return values

    def _check(self, table: Any, name: str) -> str:
        """Return the name of a column. Raises DataError if the table has no such column."""
        if name not in table.column_names:
            raise DataError(
                f"{self.path} has no column {name!r}. {nearest(name, table.column_names)}"
            )
        return name

    def _texts(self, table: Any, name: str) -> Iterator[tuple[int, str]]:
        for i, text in enumerate(table[self._check(table, name)]):
            if not isinstance(text, str):
                raise DataError(f"{self.path}, row {i}: {name!r} is not text")
            yield i, text

    def _images(self, table: Any, name: str) -> Pixels:
        datasets = importlib.import_module("datasets")
        stored = table.cast_column(self._check(table, name), datasets.Image(decode=False))
        pixels = []
        folder = real_path(Path(self.path).expanduser())
        for i, row in enumerate(stored):
            where, held = f"{self.path}, row {i}", row[name] or {}
            source = held.get("bytes")
            if not source and (file := held.get("path")):
                source = real_path(Path(file))
                roots = [
                    folder,
                    *(real_path(Path(root).expanduser()) for root in _caches(datasets)),
                ]
                if not any(source.is_relative_to(root) for root in roots):
                    raise DataError(
                        f"{where}: the image is {file}, outside {folder} and the cache of "
                        "`datasets`. Store it in the table, or in the folder."
                    )
            if not source:
                raise DataError(f"{where}: {name!r} holds no image. Remove the row.")
            pixels.append(decode(source, where, self.channels, self.size, self.aspect))
        if not pixels:
            raise DataError(f"{self.path} has no rows. Check `part`.")
        if len({one.shape for one in pixels}) > 1:
            raise DataError(f"{self.path}: images differ in size. Set `size`, for example size=84.")
        return np.stack(pixels)


def _caches(datasets: Any) -> list[str]:
    """Return the folders in which `datasets` and the hub's library keep what they fetch."""
    names = ("HF_CACHE_HOME", "HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH",
             "EXTRACTED_DATASETS_PATH")  # fmt: skip
    found = [getattr(datasets.config, name, None) for name in names]
    return [str(path) for path in (*found, os.environ.get("HF_HUB_CACHE")) if path]
