"""Decoded images on disk: one uint8 array that is mapped, not read.

An entry is a folder with `images.npy`, `labels.npy` and `about.json`. It is built under another
name and renamed, so it is whole or absent; a builder that is killed leaves only its own partial
folder, which the next builder of any entry removes. A file lock for each entry makes others wait
rather than build twice, and tells the dead from the living: the system frees it when its holder
dies. Blocks are written as they are decoded, not into the map: a full disk is then an error rather
than a signal that kills, and memory stays at one block.

The key is a hash of the source files' contents, the loader's version and its options. Contents are
hashed once; later the size and the time of change of a file stand for its hash. Entries of files
that have changed since stay, as other copies of those files may be in use: whoever wants the room
removes the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedshot.core import storage
from fedshot.core.errors import DataError
from fedshot.core.locks import locked
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, Ints, Pixels
from fedshot.data.files.fingerprints import Fingerprints

VERSION = 1  # raise it when a loader or Dataset.digest changes what it makes of the same files
_LOCK, _PARTIAL = ".lock", ".partial"  # ends of names in the folder
_SPOTS, _SPOT = 64, 4096  # places of the images that are hashed on every load, and their bytes


class Labels(NamedTuple):
    """What a loader knows besides the images."""

    y: Ints
    class_names: tuple[str, ...]
    standard: ClassSplit | None = None  # where it depends on no more than the images do


Put: TypeAlias = Callable[[tuple[int, int, int, int], Iterable[Pixels]], None]
Build: TypeAlias = Callable[[Put], Labels]


def cached(name: str, sources: Sequence[Path], options: Mapping[str, Any], build: Build) -> Dataset:
    """Return the dataset from the default cache folder, building it there the first time.

    Args:
        name: the dataset's name.
        sources: the files and folders it is made from, in a fixed order.
        options: what else decides the images; anything JSON can hold.
        build: calls its argument once with the images' shape and blocks, and returns the labels.
    """
    folder = storage.cache_folder()
    prints = Fingerprints(folder / "sources.json")
    hashes = [prints.of(path) for path in sources]
    parts = [VERSION, name, dict(options), hashes]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    found = _read(name, key, _entry(folder, name, key))  # a cache that only others write will do
    if found is not None:
        return found

    def steady(put: Put) -> Labels:
        labels = build(put)
        for path, before in zip(sources, hashes, strict=True):
            if prints.of(path) != before:
                raise DataError(
                    f"{path} changed while {name} was read from it. Wait until nothing writes to "
                    "it any more, and try again."
                )
        return labels

    if _writable(folder):
        return load_or_build(name, key, steady, folder)
    return _in_memory(name, steady)


def load_or_build(name: str, key: str, build: Build, folder: Path) -> Dataset:
    """Return the entry of that name and key, building it if it is absent or damaged."""
    entry = _entry(folder, name, key)
    found = _read(name, key, entry)
    if found is not None:
        return found
    try:
        with locked(folder / f"{entry.name}{_LOCK}") as alone:
            found = _read(name, key, entry)  # another process may have built it while we waited
            if found is not None:
                return found
            if alone:
                shutil.rmtree(entry, ignore_errors=True)
                _remove_partial(folder, entry.name)
            _build(name, key, build, entry)
    except OSError as error:
        raise DataError(
            f"cache folder {folder}: {error}. Free some space, or set $FEDSHOT_CACHE to a folder "
            "of yours with room."
        ) from error
    found = _read(name, key, entry)
    if found is None:
        raise DataError(f"cache entry {entry} was damaged while it was written. Check the disk.")
    return found


def _build(name: str, key: str, build: Build, entry: Path) -> None:
    partial = entry.with_name(f"{entry.name}.{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL}")
    try:
        partial.mkdir()
        _write(name, key, build, partial)
        if not entry.exists():  # without locks somebody may have been faster
            partial.rename(entry)
        storage.flush(entry.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_partial(folder: Path, mine: str) -> None:
    """Remove what dead builders left; who builds `mine` holds its lock already."""
    for partial in folder.glob(f"*{_PARTIAL}"):
        entry = partial.name.rsplit(".", 2)[0]
        with suppress(OSError):  # it belongs to another person, then
            if entry == mine:
                shutil.rmtree(partial)
                continue
            with locked(folder / f"{entry}{_LOCK}", wait=False) as dead:
                if dead:
                    shutil.rmtree(partial)


def _entry(folder: Path, name: str, key: str) -> Path:
    return folder / f"{name}-{key[:24]}"


def verify(dataset: Dataset) -> bool:
    """Return whether all images of a cached dataset still hash to what was written."""
    fresh = Dataset(dataset.name, dataset.x, dataset.y, dataset.class_names, dataset.users)
    return fresh.digest == dataset.digest


def _write(name: str, key: str, build: Build, folder: Path) -> None:
    images = folder / "images.npy"

    def put(shape: tuple[int, int, int, int], blocks: Iterable[Pixels]) -> None:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        with images.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for block in blocks:
                file.write(np.ascontiguousarray(block).data)
            file.flush()
            os.fsync(file.fileno())

    labels = build(put)
    np.save(folder / "labels.npy", labels.y, allow_pickle=False)
    x = np.load(images, mmap_mode="r", allow_pickle=False)
    about = {
        "key": key,
        "class_names": labels.class_names,
        "standard": labels.standard and asdict(labels.standard),
        "digest": Dataset(name, np.asarray(x), labels.y, labels.class_names).digest,
        "images": _spots(images),
        "labels": hashlib.sha256((folder / "labels.npy").read_bytes()).hexdigest(),
    }
    text = json.dumps({"about": about, "sha256": _sha(about)})
    storage.write_bytes(folder / "about.json", text.encode(), sync=True)


def _read(name: str, key: str, entry: Path) -> Dataset | None:
    """Return the entry, or None if it is absent or not what was written."""
    try:
        stored = json.loads((entry / "about.json").read_bytes())
        about = stored["about"]
        if _sha(about) != stored["sha256"] or about["key"] != key:
            return None
        if hashlib.sha256((entry / "labels.npy").read_bytes()).hexdigest() != about["labels"]:
            return None
        if _spots(entry / "images.npy") != about["images"]:
            return None
        x = np.load(entry / "images.npy", mmap_mode="r", allow_pickle=False)
        y = np.load(entry / "labels.npy", allow_pickle=False)
        parts = about["standard"]
        return Dataset(
            name,
            np.asarray(x),
            y,
            tuple(about["class_names"]),
            standard=parts and ClassSplit(**{part: tuple(parts[part]) for part in parts}),
            known_digest=about["digest"],
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError, DataError):
        return None


def _spots(path: Path) -> str:
    """Return a hash of the file's size, its beginning and end, and places between them."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        sha.update(str(size).encode())
        for place in np.linspace(0, max(0, size - _SPOT), _SPOTS).astype(int).tolist():
            file.seek(place)
            sha.update(file.read(_SPOT))
    return sha.hexdigest()


def _sha(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"probe-{os.getpid()}-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        print(
            f"fedshot: cache folder {folder} cannot be written ({error.strerror}); images are "
            "decoded into memory in every run. Set $FEDSHOT_CACHE to a folder of yours.",
            file=sys.stderr,
        )
        return False
    return True


def _in_memory(name: str, build: Build) -> Dataset:
    held: list[Pixels] = []

    def put(shape: tuple[int, int, int, int], blocks: Iterable[Pixels]) -> None:
        x, start = np.empty(shape, dtype=np.uint8), 0
        for block in blocks:
            x[start : start + len(block)] = block
            start += len(block)
        held.append(x)

    labels = build(put)
    return Dataset(name, held[0], labels.y, labels.class_names, standard=labels.standard)
