"""Compare a dataset on this machine with the publisher's dataset: hashes, counts, splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedshot.core import storage
from fedshot.core.errors import DataError, nearest
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset
from fedshot.data.files import cache
from fedshot.data.files.bounded import DAMAGE, unzipped
from fedshot.data.files.fingerprints import hash_file, hash_stream
from fedshot.data.sources.cifar import Cifar100
from fedshot.data.sources.mnist import Mnist
from fedshot.data.sources.publishers import PUBLISHERS, Remote
from fedshot.data.sources.registry import SOURCES
from fedshot.data.sources.source import Source
from fedshot.data.sources.tiered_imagenet import class_lists


@dataclass(frozen=True)
class Finding:
    """The result of one check; `note` is a remark, not a fault."""

    level: Literal["ok", "note", "problem"]
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.text}"


@dataclass(frozen=True)
class _Whole:
    """Counts of the publisher's complete dataset."""

    images: int
    classes: int
    split: tuple[int, int, int] | None


_WHOLE = {
    "cifar10": _Whole(60_000, 10, None),
    "cifar100": _Whole(60_000, 100, (60, 20, 20)),
    "huffpost": _Whole(36_900, 41, (20, 5, 16)),
    "news20": _Whole(18_846, 20, (8, 5, 7)),
    "fashion_mnist": _Whole(70_000, 10, (5, 0, 5)),
    "mini_imagenet": _Whole(60_000, 100, (64, 16, 20)),
    "mnist": _Whole(70_000, 10, (5, 0, 5)),
    "omniglot": _Whole(32_460, 1623, (1028, 172, 423)),
    "tiered_imagenet": _Whole(779_165, 608, (351, 97, 160)),
}

_OURS = {"digits": 1797, "glyphs": 4000}  # examples of the datasets that need no files


def published_size(name: str) -> int | None:
    """Return the number of examples of the publisher's complete dataset, or None if unknown."""
    if name in _OURS:
        return _OURS[name]
    return _WHOLE[name].images if name in _WHOLE else None


def check(name: str, data_dir: Path) -> list[Finding]:
    """Check a dataset's files, images, classes and splits, and return the findings.

    Every image is read again, so a check takes longer than loading. Raises DataError for a dataset
    that fedshot cannot check.
    """
    if name not in SOURCES or name not in PUBLISHERS:
        both = SOURCES.keys() & PUBLISHERS.keys()
        raise DataError(f"{name!r} is not a dataset that fedshot can check. {nearest(name, both)}")
    return list(_findings(name, data_dir))


def _findings(name: str, data_dir: Path) -> Iterator[Finding]:
    folder = data_dir / PUBLISHERS[name].folder
    for remote in PUBLISHERS[name].files:
        if (folder / remote.name).is_file():
            yield _hash(folder / remote.name, remote)
    source = SOURCES[name]()
    try:
        if name == "tiered_imagenet":
            lists = [len(part) for part in class_lists(folder).values()]
            yield Finding("ok", f"class lists: {_three(lists)} classes")
        dataset = source.load(data_dir)
    except DataError as error:
        yield Finding("problem", str(error))
        return
    if not dataset.is_text:
        yield from _images(dataset)
    if name in _WHOLE:
        yield from _counts(dataset, _WHOLE[name])
    else:
        yield Finding("ok", f"{len(dataset)} examples of {dataset.n_classes} classes")
    if isinstance(source, Mnist):
        halves = source.halves(data_dir)
        level: Literal["ok", "note"] = "ok" if len(halves) == 2 else "note"
        yield Finding(level, f"halves: {' and '.join(halves)}")
    yield from _splits(name, source, dataset, data_dir)


def _hash(path: Path, remote: Remote) -> Finding:
    if remote.checksum is None:
        return Finding("note", f"{path.name}: not verified, as no checksum is known")
    kind, wanted = remote.checksum.split(":")
    if hash_file(path, kind) == wanted:
        return Finding("ok", f"{path.name}: {kind} is the publisher's")
    if remote.unpacked is not None:
        return _hash_inside(path, remote.unpacked)
    remedy = "Move it away and run `fedshot data get` for the publisher's own."
    if remote.repacked:
        return Finding(
            "note",
            f"{path.name}: {kind} differs from the publisher's: repacked, or damaged; compare the "
            f"counts below. {remedy}",
        )
    return Finding("problem", f"{path}: {kind} differs from the publisher's. {remedy}")


def _hash_inside(path: Path, checksum: str) -> Finding:
    kind, wanted = checksum.split(":")
    try:
        with unzipped(path) as file:
            found = hash_stream(file, kind)
    except DAMAGE as error:
        return Finding("problem", f"{path} is damaged ({error}). Fetch it again.")
    if found == wanted:
        return Finding("ok", f"{path.name}: {kind} of its content is the publisher's")
    return Finding("problem", f"{path}: {kind} of its content differs. Fetch it again.")


def _images(dataset: Dataset) -> Iterator[Finding]:
    h, w, c = dataset.shape
    what = f"{len(dataset)} images of {w}x{h}x{c}"
    if cache.verify(dataset):
        yield Finding("ok", f"{what}, all readable; hash {dataset.digest[:12]}")
    else:
        yield Finding(
            "problem",
            f"{what}: the cache differs from what was written. Remove {storage.cache_folder()}.",
        )


def _counts(dataset: Dataset, whole: _Whole) -> Iterator[Finding]:
    there = len(np.unique(dataset.y))
    level: Literal["ok", "problem"] = "ok" if there == whole.classes else "problem"
    yield Finding(level, f"{there} of {whole.classes} classes")
    what = "texts" if dataset.is_text else "images"
    if len(dataset) == whole.images:
        yield Finding("ok", f"complete: all {whole.images} {what}")
        return
    counts = np.bincount(dataset.y, minlength=dataset.n_classes)
    least, most = int(counts.min()), int(counts.max())
    told = f"{least}" if least == most else f"{least} to {most}"
    if whole.images % whole.classes == 0 and "mnist" not in dataset.name:
        told += f" of {whole.images // whole.classes}"
    yield Finding(
        "note" if len(dataset) < whole.images else "problem",
        f"{'a subset' if len(dataset) < whole.images else 'too many'}: {len(dataset)} of "
        f"{whole.images} {what}, {told} {what} per class",
    )


def _splits(name: str, source: Source, dataset: Dataset, data_dir: Path) -> Iterator[Finding]:
    expected = _WHOLE[name].split if name in _WHOLE else None
    yield _split(dataset.name, source.split(dataset), expected)
    if name == "cifar100":
        try:
            other = Cifar100("cifar_fs").load(data_dir)
        except DataError as error:
            yield Finding("problem", str(error))
        else:
            yield _split("cifar_fs", other.standard, (64, 16, 20))


def _split(name: str, split: ClassSplit | None, expected: tuple[int, int, int] | None) -> Finding:
    if split is None:
        return Finding("note", f"{name} has no published split")
    found = (len(split.base), len(split.validation), len(split.novel))
    if expected is not None and found != expected:
        return Finding("problem", f"split {name}: {_three(found)}, expected {_three(expected)}")
    return Finding("ok", f"split {name}: {_three(found)} classes")


def _three(counts: list[int] | tuple[int, ...]) -> str:
    return "/".join(str(n) for n in counts)
