"""Compares a dataset on this machine with the publisher's dataset: hashes, counts, splits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from fedshot.data.sources.cifar import CLASS_COUNTS, Cifar100
from fedshot.data.sources.mnist import Mnist
from fedshot.data.sources.publishers import PUBLISHERS, Complete, Remote
from fedshot.data.sources.registry import SOURCES
from fedshot.data.sources.tiered_imagenet import class_lists


@dataclass(frozen=True)
class Finding:
    """The result of one check; the level "note" is a remark, not a fault."""

    level: Literal["ok", "note", "problem"]
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.text}"


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
    published = PUBLISHERS[name]
    folder = data_dir / published.folder
    for remote in published.files:
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
        yield _images(dataset)
    if published.complete is not None:
        yield from _counts(dataset, published.complete)
    else:
        yield Finding("ok", f"{len(dataset)} examples of {dataset.n_classes} classes")
    if isinstance(source, Mnist):
        halves = source.halves(data_dir)
        yield Finding("ok" if len(halves) == 2 else "note", f"halves: {' and '.join(halves)}")
    expected = published.complete.split if published.complete else None
    yield _split(dataset.name, dataset.standard, expected)
    if name == "cifar100":
        try:
            other = Cifar100("cifar_fs").load(data_dir).standard
            yield _split("cifar_fs", other, CLASS_COUNTS["cifar_fs"])
        except DataError as error:
            yield Finding("problem", str(error))


def _hash(path: Path, remote: Remote) -> Finding:
    if remote.checksum is None:
        return Finding("note", f"{path.name}: not verified, as no checksum is known")
    kind, wanted = remote.checksum.split(":")
    if hash_file(path, kind) == wanted:
        return Finding("ok", f"{path.name}: {kind} is the publisher's")
    if remote.unpacked is not None:
        return _hash_inside(path, *remote.unpacked.split(":"))
    remedy = "Move it away and run `fedshot data get` for the publisher's own."
    if remote.repacked:
        return Finding(
            "note",
            f"{path.name}: {kind} differs from the publisher's: repacked, or damaged; compare the "
            f"counts below. {remedy}",
        )
    return Finding("problem", f"{path}: {kind} differs from the publisher's. {remedy}")


def _hash_inside(path: Path, kind: str, wanted: str) -> Finding:
    try:
        with unzipped(path) as file:
            found = hash_stream(file, kind)
    except DAMAGE as error:
        return Finding("problem", f"{path} is damaged ({error}). Fetch it again.")
    if found == wanted:
        return Finding("ok", f"{path.name}: {kind} of its content is the publisher's")
    return Finding("problem", f"{path}: {kind} of its content differs. Fetch it again.")


def _images(dataset: Dataset) -> Finding:
    h, w, c = dataset.shape
    what = f"{len(dataset)} images of {w}x{h}x{c}"
    if cache.verify(dataset):
        return Finding("ok", f"{what}, all readable; hash {dataset.digest[:12]}")
    remedy = f"Remove {storage.cache_folder()}."
    return Finding("problem", f"{what}: the cache differs from what was written. {remedy}")


def _counts(dataset: Dataset, complete: Complete) -> Iterator[Finding]:
    counts = np.bincount(dataset.y, minlength=dataset.n_classes)
    there = np.count_nonzero(counts)
    yield Finding(
        "ok" if there == complete.classes else "problem", f"{there} of {complete.classes} classes"
    )
    n, wanted = len(dataset), complete.examples
    noun = "texts" if dataset.is_text else "images"
    if n == wanted:
        yield Finding("ok", f"complete: all {wanted} {noun}")
        return
    least, most = int(counts.min()), int(counts.max())
    each = f"{least}" if least == most else f"{least} to {most}"
    if wanted % complete.classes == 0 and "mnist" not in dataset.name:
        each += f" of {wanted // complete.classes}"
    what = f"{n} of {wanted} {noun}, {each} {noun} per class"
    if n < wanted:
        yield Finding("note", f"a subset: {what}")
    else:
        yield Finding("problem", f"too many: {what}")


def _split(name: str, split: ClassSplit | None, expected: tuple[int, int, int] | None) -> Finding:
    if split is None:
        return Finding("note", f"{name} has no published split")
    found = (len(split.base), len(split.validation), len(split.novel))
    if expected is not None and found != expected:
        return Finding("problem", f"split {name}: {_three(found)}, expected {_three(expected)}")
    return Finding("ok", f"split {name}: {_three(found)} classes")


def _three(counts: Iterable[int]) -> str:
    return "/".join(map(str, counts))
