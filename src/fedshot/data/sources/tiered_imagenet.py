"""tieredImageNet: 608 classes of ImageNet in 34 superclasses, 779,165 photographs.

Source and split: Ren et al. 2018 (351, 97 and 160 classes; each superclass is in one part only).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fedshot.data.dataset import Dataset
from fedshot.data.files.archives import opened
from fedshot.data.files.cache import Labels, Put, cached
from fedshot.data.sources.mini_imagenet import IMAGES, ImageNetSubset
from fedshot.data.sources.publishers import published_split
from fedshot.data.sources.source import Member, dataset_folder
from fedshot.data.sources.splits.published import PUBLISHED, packaged, read_split_files, to_split

_COUNTS = published_split("tiered_imagenet")


@dataclass(frozen=True)
class TieredImageNet(ImageNetSubset):
    """Photographs from `<data_dir>/tieredimagenet`: one .zip, or folders, with a folder per class.

    A class folder has the class's ImageNet number as its name (n01530575) and may be at any depth,
    such as in `train/`, `val/` and `test/`. The files `train.csv`, `val.csv` and `test.csv`
    (`class,superclass`), if they exist, replace the published lists of 351, 97 and 160 classes.
    """

    def load(self, data_dir: Path | None) -> Dataset:
        """Return the dataset; the first call decodes all images to the cache (16.5 GB at 84 px)."""
        folder = dataset_folder(data_dir, "tiered_imagenet", "a zip or folder of its images")
        place = self.find(folder, "tiered_imagenet")
        lists = class_lists(folder)
        names = tuple(sorted(name for part in lists.values() for name in part))
        options = {"size": self.size, "resize": self.resize, "classes": names}
        build = partial(self._build, place, names)
        dataset = cached("tiered_imagenet", [place], options, build)
        return replace(dataset, standard=to_split([folder] * len(lists), lists, names))

    def _build(self, place: Path, names: tuple[str, ...], put: Put) -> Labels:
        known = set(names)
        with opened(place) as archive:
            members = [
                Member(above[-2], archive, member)
                for member in archive.names
                if member.lower().endswith(IMAGES)
                and len(above := member.split("/")) > 1
                and above[-2] in known
            ]
            members.sort(key=lambda member: (member.class_name, member.name))
            return self.put_images(put, members, names, place)


def class_lists(folder: Path) -> dict[str, list[str]]:
    """Return part -> class names, from csv files in the folder, or else the published lists."""
    paths = [folder / f"{part}.csv" for part in PUBLISHED]
    return read_split_files(paths, _COUNTS) or packaged("tiered_imagenet")
