"""CIFAR-100, split as FC100 or CIFAR-FS, and CIFAR-10: photographs of 32 x 32 pixels.

Source: Krizhevsky 2009. Few-shot splits: FC100, Oreshkin et al. 2018 (60, 20 and 20 classes; each
superclass is in one part only); CIFAR-FS, Bertinetto et al. 2019 (64, 16 and 20 classes).
As in those papers, the publisher's training and test images of a class are pooled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from fedshot.core.errors import DataError, nearest
from fedshot.core.text import typed
from fedshot.data.dataset import Dataset, Ints, Pixels, check_classes
from fedshot.data.files import pickled
from fedshot.data.files.archives import Archive, opened
from fedshot.data.files.cache import Labels, Put, cached
from fedshot.data.files.images import photo
from fedshot.data.sources.publishers import published_split
from fedshot.data.sources.source import Member, Source, dataset_folder, find_images, put_images
from fedshot.data.sources.splits.published import PUBLISHED, packaged, read_split_files, to_split

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
CLASS_COUNTS = {"fc100": published_split("cifar100"), "cifar_fs": (64, 16, 20)}
_ROWS = 4096  # images converted from channels-first to channels-last at a time
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True, kw_only=True)
class CifarFiles(Source):
    """Options of both CIFAR datasets, and the search for their files in the dataset's folder.

    The first of these that exists is read: the publisher's archive, the folder unpacked from it,
    one .zip of PNG files, or folders of PNG files, `train/<class>/` and `test/<class>/`, or
    `<class>/`.

    Args:
        file: file or folder to read in the dataset's folder; null looks for the publisher's
            archive, its unpacked folder, a .zip, or folders of PNG files.
    """

    file: str | None = None

    name: ClassVar[str]
    known: ClassVar[tuple[str, str]]  # the publisher's archive, and the folder unpacked from it

    def read(self, data_dir: Path | None, names: tuple[str, ...]) -> tuple[Path, Dataset]:
        """Return (the folder of the data, the dataset with the class names `names`).

        The images are cached on disk.
        """
        name, known = self.name, self.known
        folder = dataset_folder(data_dir, name, f"{known[0]}, or PNG files")
        place = find_images(folder, name, self.file, known)
        if place is None and any((folder / n).is_dir() for n in ("train", "test", names[0])):
            place = folder
        if place is None:
            raise DataError(
                f"{name}: {folder} holds neither {known[0]} nor a zip or folders of PNG files. Put "
                f"the file {known[0]} into {folder}, or run `fedshot data get {name} --data-dir "
                f"{typed(folder.parent)}`."
            )
        return folder, cached(name, [place], {}, partial(_build, place, name, names))


@dataclass(frozen=True)
class Cifar100(CifarFiles):
    """Photographs of 100 classes from `<data_dir>/cifar100`, split as FC100 or as CIFAR-FS.

    Args:
        variant: the split: "fc100", by superclasses, or "cifar_fs", by classes.
    """

    name: ClassVar[str] = "cifar100"
    known: ClassVar[tuple[str, str]] = ("cifar-100-python.tar.gz", "cifar-100-python")
    variant: Literal["fc100", "cifar_fs"] = "fc100"

    def load(self, data_dir: Path | None) -> Dataset:
        """Return the dataset; the first call decodes all images into the cache on disk."""
        names = tuple(packaged("cifar100")["classes"])
        folder, dataset = self.read(data_dir, names)
        paths = [folder / "splits" / f"{self.variant}_{part}.txt" for part in PUBLISHED]
        lists = read_split_files(paths, CLASS_COUNTS[self.variant])
        places = paths if lists else [f"the published split {self.variant}"] * len(paths)
        split = to_split(places, lists or packaged("cifar100")[self.variant], names)
        return replace(dataset, name=self.variant, standard=split)


@dataclass(frozen=True)
class Cifar10(CifarFiles):
    """Photographs of 10 classes from `<data_dir>/cifar10`; they have no few-shot split."""

    name: ClassVar[str] = "cifar10"
    known: ClassVar[tuple[str, str]] = ("cifar-10-python.tar.gz", "cifar-10-batches-py")

    def load(self, data_dir: Path | None) -> Dataset:
        """Return the dataset; the first call decodes all images into the cache on disk."""
        return self.read(data_dir, CIFAR10)[1]


def _build(place: Path, name: str, names: tuple[str, ...], put: Put) -> Labels:
    with opened(place) as archive:
        if any(member.endswith(".png") for member in archive.names):
            return _from_pngs(archive, name, names, put)
        return _from_pickles(archive, name, names, put)


def _from_pngs(archive: Archive, name: str, names: tuple[str, ...], put: Put) -> Labels:
    """Read PNG files from class folders, which may be in folders `train` and `test`."""
    numbers = {class_name: c for c, class_name in enumerate(names)}
    rows: list[tuple[int, bool, str, Member]] = []  # class, False in the folder `train`, file
    for path in archive.names:
        if not path.endswith(".png"):
            continue
        *above, class_name, file = ("", *path.split("/"))
        if class_name not in numbers:
            raise DataError(
                f"{archive.path}: {path} lies in {class_name!r}, which is not a class of {name}. "
                f"{nearest(class_name, names)}"
            )
        member = Member(class_name, archive, path)
        rows.append((numbers[class_name], above[-1:] != ["train"], file, member))
    rows.sort(key=lambda row: row[:3])
    remedy = "Fetch the file again; CIFAR's images have one size."
    convert = partial(photo, size=_SIDE, resize=False, remedy=remedy)
    members = [row[3] for row in rows]
    return put_images(put, members, names, (_SIDE, _SIDE, 3), convert, where=archive.path)


class _Batch(NamedTuple):
    """The images, labels and file names in one of the publisher's pickle files."""

    images: Pixels  # [rows, 3072], channels first
    labels: Ints
    files: np.ndarray  # names of image files, as Python objects


def _from_pickles(archive: Archive, name: str, names: tuple[str, ...], put: Put) -> Labels:
    """Read the publisher's files; sort the images in the same order as the PNG files."""
    by_name = {member.rsplit("/", 1)[-1]: member for member in archive.names}
    if name == "cifar100":
        wanted, label, meta, key = ["train", "test"], "fine_labels", "meta", "fine_label_names"
    else:
        wanted = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
        label, meta, key = "labels", "batches.meta", "label_names"
    for file in (*wanted, meta):
        if file not in by_name:
            raise DataError(f"{archive.path} has no file {file}. Fetch the complete archive again.")
    if _read(archive, by_name[meta]).get(key) != list(names):
        raise DataError(
            f"{archive.path}: {meta} lists other classes than the {len(names)} of {name}. Fetch "
            "the file again from its publisher."
        )
    batches = [_batch(archive, by_name[file], label, len(names)) for file in wanted]
    sizes = [len(batch.labels) for batch in batches]
    test = np.repeat([file.startswith("test") for file in wanted], sizes)
    images, labels, files = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    order = np.lexsort((files, test, labels))

    def blocks() -> Iterator[Pixels]:
        for start in range(0, len(order), _ROWS):
            block = images[order[start : start + _ROWS]].reshape(-1, 3, _SIDE, _SIDE)
            yield block.transpose(0, 2, 3, 1)

    y = labels[order]
    check_classes(archive.path, "images", y, names, "Fetch the file again.")
    put((len(order), _SIDE, _SIDE, 3), blocks())
    return Labels(y, names)


def _read(archive: Archive, member: str) -> dict[str, Any]:
    return pickled.read(archive.read(member, pickled.LIMIT), f"{archive.path}: {member}")


def _batch(archive: Archive, member: str, label: str, n: int) -> _Batch:
    where = f"{archive.path}: {member}"
    content = _read(archive, member)
    images, labels, files = content.get("data"), content.get(label), content.get("filenames")
    if not isinstance(images, np.ndarray) or images.shape[1:] != (_PIXELS,):
        raise DataError(f"{where} has no images of {_PIXELS} bytes under 'data'. Fetch it again.")
    for key, values, kind in ((label, labels, int), ("filenames", files, str)):
        if (
            not isinstance(values, list)
            or len(values) != len(images)
            or not all(type(value) is kind for value in values)
        ):
            raise DataError(
                f"{where} has no list of {len(images)} under {key!r}, one for each image. Fetch it "
                "again."
            )
    y = np.array(labels, dtype=np.int64)
    if len(y) and not 0 <= y.min() <= y.max() < n:
        raise DataError(
            f"{where}: {label} run from {y.min()} to {y.max()}; expected 0..{n - 1}. Fetch it "
            "again."
        )
    # An array of numpy strings would give every name the length of the longest.
    return _Batch(images, y, np.array(files, dtype=object))
