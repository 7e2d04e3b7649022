"""CIFAR-100, as FC100 or as CIFAR-FS, and CIFAR-10: photographs of 32 x 32 pixels.

Source: Krizhevsky 2009. Few-shot splits: FC100, Oreshkin et al. 2018 (60, 20 and 20 classes, no
superclass in two parts); CIFAR-FS, Bertinetto et al. 2019 (64, 16 and 20 classes).
The publisher's training and test images of a class are pooled, as those papers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedshot.core.errors import DataError, check_word, nearest
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, Ints, Pixels, check_classes
from fedshot.data.files import pickled
from fedshot.data.files.archives import Archive, opened
from fedshot.data.files.cache import Build, Labels, Put, cached
from fedshot.data.files.images import decoded, photo
from fedshot.data.files.places import home
from fedshot.data.sources.splits.published import (
    PARTS,
    PUBLISHED,
    beside,
    packaged,
    read_text,
    to_split,
)

_SIDE = 32
_COUNTS = {"fc100": (60, 20, 20), "cifar_fs": (64, 16, 20)}
_ROWS = 4096  # images turned from channel-first to channel-last at a time
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class Cifar100:
    """Photographs of 100 classes from `<data_dir>/cifar100`, split as FC100 or as CIFAR-FS.

    Looked for in this order: `cifar-100-python.tar.gz` as published, the folder
    `cifar-100-python` unpacked from it, one .zip of PNG files, or PNG files in folders
    `train/<class>/` and `test/<class>/`, or `<class>/`.

    Args:
        variant: the split: "fc100", by superclasses, or "cifar_fs", by classes.
        file: another file or folder there to read; null looks for the publisher's archive, its
            folder, a .zip, or folders of PNG files.
    """

    variant: Literal["fc100", "cifar_fs"] = "fc100"
    file: str | None = None

    def __post_init__(self) -> None:
        check_word("variant", self.variant, _COUNTS)

    def load(self, data_dir: Path | None) -> Dataset:
        """Read all images, the first time into the cache."""
        folder = home(data_dir, "cifar100", "cifar100", "cifar-100-python.tar.gz, or PNG files")
        names = tuple(packaged("cifar100")["classes"])
        dataset = _load(folder, "cifar100", "cifar-100-python", self.file, names)
        split = self._split(folder, names)
        return replace(dataset, name=self.variant, standard=split)

    def split(self, dataset: Dataset) -> ClassSplit | None:
        """Return the split of the chosen variant."""
        return dataset.standard

    def _split(self, folder: Path, names: Sequence[str]) -> ClassSplit:
        paths = [folder / "splits" / f"{self.variant}_{part}.txt" for part in PUBLISHED]
        if beside(paths):
            lists = {part: read_text(path).split() for part, path in zip(PARTS, paths, strict=True)}
            return to_split(paths, lists, names, _COUNTS[self.variant])
        return to_split(self.variant, packaged("cifar100")[self.variant], names)


@dataclass(frozen=True)
class Cifar10:
    """Photographs of 10 classes from `<data_dir>/cifar10`; they have no few-shot split.

    Looked for in this order: `cifar-10-python.tar.gz` as published, the folder
    `cifar-10-batches-py` unpacked from it, one .zip of PNG files, or PNG files in folders
    `train/<class>/` and `test/<class>/`, or `<class>/`.

    Args:
        file: another file or folder there to read; null looks for the publisher's archive, its
            folder, a .zip, or folders of PNG files.
    """

    file: str | None = None

    def load(self, data_dir: Path | None) -> Dataset:
        """Read all images, the first time into the cache."""
        folder = home(data_dir, "cifar10", "cifar10", "cifar-10-python.tar.gz, or PNG files")
        return _load(folder, "cifar10", "cifar-10-python", self.file, CIFAR10)

    def split(self, dataset: Dataset) -> ClassSplit | None:
        """Return None: CIFAR-10 has ten classes and no published few-shot split."""
        return dataset.standard


def _load(
    folder: Path, name: str, archive: str, file: str | None, names: tuple[str, ...]
) -> Dataset:
    place = _place(folder, name, archive, file)
    build: Build = partial(_build, place, name, names)
    return cached(name, [place], {}, build)


def _place(folder: Path, name: str, archive: str, file: str | None) -> Path:
    """Return the file or folder to read."""
    wanted = f"{archive}.tar.gz"
    if file is not None:
        if not (folder / file).exists():
            raise DataError(f"{name}: {folder / file} does not exist. Correct `file`.")
        return folder / file
    unpacked = "cifar-10-batches-py" if name == "cifar10" else archive
    for known in (wanted, unpacked):
        if (folder / known).exists():
            return folder / known
    zips = sorted(folder.glob("*.zip"))
    if len(zips) > 1:
        raise DataError(
            f"{name}: {folder} holds {', '.join(z.name for z in zips)}. Say which with `file`."
        )
    if zips:
        return zips[0]
    if any((folder / known).is_dir() for known in ("train", "test", _first_class(name))):
        return folder
    raise DataError(
        f"{name}: {folder} holds neither {wanted} nor a zip or folders of PNG files. Put the file "
        f"{wanted} into {folder}, or run `fedshot data get {name} --data-dir {folder.parent}`."
    )


def _first_class(name: str) -> str:
    return CIFAR10[0] if name == "cifar10" else "apple"


def _build(place: Path, name: str, names: tuple[str, ...], put: Put) -> Labels:
    with opened(place) as archive:
        if any(member.endswith(".png") for member in archive.names):
            return _from_pngs(archive, name, names, put)
        return _from_pickles(archive, name, names, put)


def _from_pngs(archive: Archive, name: str, names: tuple[str, ...], put: Put) -> Labels:
    """Read PNG files: the folder above a file is its class, the one above that may be its half."""
    numbers = {class_name: c for c, class_name in enumerate(names)}
    rows: list[tuple[int, str, str]] = []
    for member in archive.names:
        if not member.endswith(".png"):
            continue
        *above, class_name, _ = ("", *member.split("/"))
        if class_name not in numbers:
            raise DataError(
                f"{archive.path}: {member} lies in {class_name!r}, which is no class of {name}. "
                f"{nearest(class_name, numbers)}"
            )
        rows.append((numbers[class_name], _half(above[-1] if above else ""), member))
    rows.sort(key=lambda row: (row[0], row[1] != "train", row[2].rsplit("/", 1)[-1]))
    y = _labels(archive.path, [row[0] for row in rows], names)
    remedy = "Fetch the file again; CIFAR's images have one size."
    blocks = decoded(
        archive,
        [row[2] for row in rows],
        (_SIDE, _SIDE, 3),
        lambda data, member: photo(data, member, _SIDE, resize=False, remedy=remedy),
    )
    put((len(rows), _SIDE, _SIDE, 3), blocks)
    return Labels(y, names)


def _half(word: str) -> str:
    return word if word in ("train", "test") else ""


def _from_pickles(archive: Archive, name: str, names: tuple[str, ...], put: Put) -> Labels:
    """Read the publisher's batches; rows come out in the order that PNG files have."""
    by_name = {member.rsplit("/", 1)[-1]: member for member in archive.names}
    if name == "cifar100":
        wanted, label, meta, words = ["train", "test"], "fine_labels", "meta", "fine_label_names"
    else:
        wanted = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
        label, meta, words = "labels", "batches.meta", "label_names"
    for file in (*wanted, meta):
        if file not in by_name:
            raise DataError(f"{archive.path} has no file {file}. Fetch it again, whole.")
    told = _read(archive, by_name[meta]).get(words)
    if told != list(names):
        raise DataError(
            f"{archive.path}: {meta} lists other classes than the {len(names)} of {name}. Fetch "
            "the file again from its publisher."
        )
    batches = [_batch(archive, by_name[file], label, len(names)) for file in wanted]
    y = np.concatenate([batch[1] for batch in batches])
    halves = [file.startswith("test") for file in wanted]
    test = np.repeat(halves, [len(batch[1]) for batch in batches])
    files = np.concatenate([batch[2] for batch in batches])
    order = np.lexsort((files, test, y))
    starts = np.cumsum([0, *(len(batch[1]) for batch in batches)])
    which = np.searchsorted(starts, order, side="right") - 1

    def blocks() -> Any:
        for start in range(0, len(order), _ROWS):
            rows = order[start : start + _ROWS]
            block = np.empty((len(rows), 3, _SIDE, _SIDE), dtype=np.uint8)
            for b, (images, _, _) in enumerate(batches):
                mine = which[start : start + _ROWS] == b
                block[mine] = images[rows[mine] - starts[b]].reshape(-1, 3, _SIDE, _SIDE)
            yield block.transpose(0, 2, 3, 1)

    put((len(order), _SIDE, _SIDE, 3), blocks())
    return Labels(_labels(archive.path, y[order].tolist(), names), names)


def _read(archive: Archive, member: str) -> dict[str, Any]:
    return pickled.read(archive.read(member, pickled.LIMIT), f"{archive.path}: {member}")


def _batch(archive: Archive, member: str, label: str, n: int) -> tuple[Pixels, Ints, np.ndarray]:
    """Return (images [rows, 3072], labels, file names) of one file."""
    where = f"{archive.path}: {member}"
    content = _read(archive, member)
    images, labels, files = content.get("data"), content.get(label), content.get("filenames")
    if not isinstance(images, np.ndarray) or images.shape[1:] != (3 * _SIDE * _SIDE,):
        raise DataError(f"{where} has no images of 3072 bytes under 'data'. Fetch it again.")
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
    return images, y, np.array(files, dtype=object)  # as text, each would be as long as the longest


def _labels(path: Path, y: list[int], names: tuple[str, ...]) -> Ints:
    labels = np.array(y, dtype=np.int64)
    check_classes(path, "images", labels, names, "Fetch the file again.")
    return labels
