"""tieredImageNet: 608 classes of ImageNet in 34 superclasses, 779,165 photographs.

Source and split: Ren et al. 2018 (351, 97 and 160 classes; no superclass in two parts).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from fedshot.core.errors import DataError
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, check_classes
from fedshot.data.files.archives import opened
from fedshot.data.files.cache import Labels, Put, cached
from fedshot.data.files.images import decoded, photo
from fedshot.data.files.places import home
from fedshot.data.sources.mini_imagenet import RESIZE, find_images
from fedshot.data.sources.splits.published import (
    PARTS,
    PUBLISHED,
    beside,
    packaged,
    read_text,
    to_split,
)

_COUNTS = (351, 97, 160)
_PICTURES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True)
class TieredImageNet:
    """Photographs from `<data_dir>/tieredimagenet`: one .zip, or folders, with a folder per class.

    A class folder bears the class's ImageNet number (n01530575) and may lie at any depth, such as
    in `train/`, `val/` and `test/`. `train.csv`, `val.csv` and `test.csv` (`class,superclass`)
    replace the published lists if there.

    Args:
        size: pixels a side.
        resize: scale images of another size; else they are refused.
        file: another zip or folder to read.
    """

    size: int = 84
    resize: bool = False
    file: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.size <= 1024:
            raise DataError(f"size is {self.size}; expected 1 to 1024 pixels")

    def load(self, data_dir: Path | None) -> Dataset:
        """Read all images, the first time into the cache (16.5 GB at 84 pixels)."""
        folder = home(
            data_dir, "tiered_imagenet", "tieredimagenet", "a zip or folder of its images"
        )
        place = find_images(folder, "tiered_imagenet", self.file)
        lists = class_lists(folder)
        names = tuple(sorted(name for part in lists.values() for name in part))
        build = partial(_build, place, names, self.size, self.resize)
        options = {"size": self.size, "resize": self.resize, "classes": names}
        dataset = cached("tiered_imagenet", [place], options, build)
        return replace(dataset, standard=to_split(folder, lists, names))

    def split(self, dataset: Dataset) -> ClassSplit | None:
        """Return the 351, 97 and 160 classes."""
        return dataset.standard


def class_lists(folder: Path) -> dict[str, list[str]]:
    """Return the classes of base, validation and novel: from the folder's csv files if there."""
    paths = [folder / f"{part}.csv" for part in PUBLISHED]
    if not beside(paths):
        return {part: list(names) for part, names in packaged("tiered_imagenet").items()}
    lists: dict[str, list[str]] = {}
    for part, path, count in zip(PARTS, paths, _COUNTS, strict=True):
        try:
            rows = [row for row in csv.reader(read_text(path).splitlines()) if row]
        except csv.Error as error:
            raise DataError(f"{path} is no csv file ({error}). Fetch it again.") from error
        lists[part] = [row[0] for row in rows]
        if len(set(lists[part])) != count or len(lists[part]) != count:
            raise DataError(
                f"{path} lists {len(set(lists[part]))} classes; expected {count}, each once. Fetch "
                "it again, or remove the three to use the published lists."
            )
    return lists


def _build(place: Path, names: tuple[str, ...], size: int, resize: bool, put: Put) -> Labels:
    numbers = {name: c for c, name in enumerate(names)}
    with opened(place) as archive:
        members = sorted(
            (numbers[above[-2]], member)
            for member in archive.names
            if member.lower().endswith(_PICTURES)
            and len(above := member.split("/")) > 1
            and above[-2] in numbers
        )
        y = np.array([c for c, _ in members], dtype=np.int64)
        check_classes(place, "images", y, names, "Add their folders, with their images.")
        convert = partial(photo, size=size, resize=resize, remedy=RESIZE)
        blocks = decoded(archive, [m for _, m in members], (size, size, 3), convert)
        put((len(members), size, size, 3), blocks)
        return Labels(y, names)
