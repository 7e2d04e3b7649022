"""A cache of decoded images, and of the features of encoders, on disk: memory-mapped arrays.

An entry is a folder: images have `images.npy` (uint8), `labels.npy` and `about.json`, features have
`features.npy` (float32) and `about.json`. It is built under another name and then renamed, so it is
always complete or absent. A process that is killed leaves a partial folder, which the next build of
any entry removes. A file lock for each entry prevents two processes from building it at once; the
system releases the lock when its process dies. Blocks of an array are written to the file as they
are computed, not into a memory map: a full disk then raises an error instead of a fatal signal, and
only one block is in memory.

The key of images is a hash of the dataset's name, the contents of the source files, the loader's
options, and VERSION, a number that grows when the code reads the same files differently. Contents
are hashed once, and again only if a file's size or time stamps change. Entries whose sources have
changed are kept, since other copies of those sources may be in use; to free the space, remove the
cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from fedshot.core import storage
from fedshot.core.errors import DataError
from fedshot.core.locks import locked
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, Features, Ints, Pixels
from fedshot.data.files.fingerprints import Fingerprints, hash_json

VERSION = 1  # increase when a loader or Dataset.digest gives other results for the same files
T = TypeVar("T")
N = TypeVar("N", bound=np.generic)
_LOCK, _PARTIAL = ".lock", ".partial"  # suffixes of names in the folder
_SPOTS, _SPOT = 64, 4096  # number of samples of the file hashed on every load; bytes of each


class Labels(NamedTuple):
    """What a loader returns, besides the images that it passes to `put`: labels, names, split."""

    y: Ints
    class_names: tuple[str, ...]
    standard: ClassSplit | None = None  # if the images alone determine it


Put: TypeAlias = Callable[[tuple[int, int, int, int], Iterable[Pixels]], None]
Build: TypeAlias = Callable[[Put], Labels]


def cached(name: str, sources: Sequence[Path], options: Mapping[str, Any], build: Build) -> Dataset:
    """Return a dataset from the default cache folder; build its entry if it is missing.

    Args:
        name: the dataset's name.
        sources: the files and folders of the data, in a fixed order.
        options: the options that affect the images, serialisable as JSON.
        build: the loader. It takes a function `put`, which it calls once with the shape of all
            images and the images in blocks, and returns the labels.

    If the folder is not writable, the images are decoded into memory.
    """
    folder = storage.cache_folder()
    prints = Fingerprints(folder / "sources.json")
    hashes = [prints.of(path) for path in sources]
    parts = [VERSION, name, dict(options), hashes]
    key = hash_json(parts)
    if (found := _read(name, key, _entry(folder, name, key))) is not None:
        return found

    def steady(put: Put) -> Labels:
        labels = build(put)
        for path, before in zip(sources, hashes, strict=True):
            if prints.of(path) != before:
                raise DataError(
                    f"{path} changed while {name} was read from it. Wait until no program writes "
                    "to it, and try again."
                )
        return labels

    if writable(folder, "images are decoded into memory"):
        return load_or_build(name, key, steady, folder)
    return _images_in_memory(name, steady)


def load_or_build(name: str, key: str, build: Build, folder: Path) -> Dataset:
    """Return the dataset in the cache entry of this name and key.

    The entry is built if it is absent or damaged.
    """
    return read_or_write(
        _entry(folder, name, key),
        lambda entry: _read(name, key, entry),
        lambda partial: _write(name, key, build, partial),
    )


def read_or_write(
    entry: Path, read: Callable[[Path], T | None], write: Callable[[Path], None]
) -> T:  # fmt: skip
    """Return `read(entry)`; if that is None, build the folder `entry` with `write` and read again.

    `write` fills a partial folder, which then replaces the entry. Raises DataError if the folder
    cannot be written.
    """
    folder = entry.parent
    try:
        with locked(folder / f"{entry.name}{_LOCK}") as alone:
            # Another process may have built the entry while this one waited for the lock.
            if (found := read(entry)) is not None:
                return found
            if alone:
                shutil.rmtree(entry, ignore_errors=True)
                _remove_partial(folder, entry.name)
            _build(entry, write)
    except OSError as error:
        raise DataError(
            f"cache folder {folder}: {error}. Free some space, or set $FEDSHOT_CACHE to "
            "another folder with enough space."
        ) from error
    if (found := read(entry)) is None:
        raise DataError(f"cache entry {entry} was damaged while it was written. Check the disk.")
    return found


def _build(entry: Path, write: Callable[[Path], None]) -> None:
    partial = entry.with_name(f"{entry.name}.{_unique()}{_PARTIAL}")
    try:
        partial.mkdir()
        write(partial)
        if not entry.exists():  # without locks, another process may have built it first
            partial.rename(entry)
        storage.flush(entry.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unique() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def _remove_partial(folder: Path, own: str) -> None:
    """Remove partial folders of dead processes; the caller has locked the entry named `own`."""
    for partial in folder.glob(f"*{_PARTIAL}"):
        name = partial.name.rsplit(".", 2)[0]
        lock = nullcontext(True) if name == own else locked(folder / f"{name}{_LOCK}", wait=False)
        with suppress(OSError), lock as held:  # lock and folder may belong to another user
            if held:  # no living process writes the entry
                shutil.rmtree(partial)


def _entry(folder: Path, name: str, key: str) -> Path:
    return folder / f"{name}-{key[:24]}"


def verify(dataset: Dataset) -> bool:
    """Whether the images of a cached dataset still have the hash stored in its cache entry."""
    fresh = Dataset(dataset.name, dataset.x, dataset.y, dataset.class_names, dataset.users)
    return fresh.digest == dataset.digest


def _write(name: str, key: str, build: Build, folder: Path) -> None:
    images = folder / "images.npy"

    def put(shape: tuple[int, int, int, int], blocks: Iterable[Pixels]) -> None:
        write_blocks(images, np.dtype(np.uint8), shape, blocks)

    labels = build(put)
    np.save(folder / "labels.npy", labels.y, allow_pickle=False)
    x = np.load(images, mmap_mode="r", allow_pickle=False)
    about = {
        "key": key,
        "class_names": labels.class_names,
        "standard": labels.standard and asdict(labels.standard),
        "digest": Dataset(name, np.asarray(x), labels.y, labels.class_names).digest,
        "images": spots(images),
        "labels": hashlib.sha256((folder / "labels.npy").read_bytes()).hexdigest(),
    }
    text = json.dumps({"about": about, "sha256": hash_json(about)})
    storage.write_bytes(folder / "about.json", text.encode(), sync=True)


def write_blocks(
    path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], blocks: Iterable[np.ndarray[Any, Any]]
) -> None:
    """Write an array as .npy, in blocks of its rows."""
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block).data)
        file.flush()
        os.fsync(file.fileno())


def _read(name: str, key: str, entry: Path) -> Dataset | None:
    """Return the dataset in the cache entry `entry`; None if it is absent or damaged."""
    try:
        stored = json.loads((entry / "about.json").read_bytes())
        about, (images, labels) = stored["about"], (entry / "images.npy", entry / "labels.npy")
        label_hash = hashlib.sha256(labels.read_bytes()).hexdigest()
        hashes = (hash_json(about), key, label_hash, spots(images))
        if hashes != (stored["sha256"], about["key"], about["labels"], about["images"]):
            return None
        x = np.load(images, mmap_mode="r", allow_pickle=False)
        y = np.load(labels, allow_pickle=False)
        split = about["standard"] and ClassSplit(
            **{p: tuple(c) for p, c in about["standard"].items()}
        )
        names, digest = tuple(about["class_names"]), about["digest"]
        return Dataset(name, np.asarray(x), y, names, standard=split, known_digest=digest)
    except (OSError, ValueError, KeyError, TypeError, EOFError, DataError):
        return None


def spots(path: Path) -> str:
    """Return a hash of the file's size and of samples from its beginning to its end."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        sha.update(str(size).encode())
        for offset in np.linspace(0, max(0, size - _SPOT), _SPOTS).astype(int).tolist():
            file.seek(offset)
            sha.update(file.read(_SPOT))
    return sha.hexdigest()


def writable(folder: Path, otherwise: str) -> bool:
    """Whether the cache folder is writable; if not, print that, and what happens: `otherwise`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"probe-{_unique()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        print(
            f"fedshot: cache folder {folder} cannot be written ({error.strerror}); "
            f"{otherwise} in every run. Set $FEDSHOT_CACHE to a writable folder.",
            file=sys.stderr,
        )
        return False
    return True


def _images_in_memory(name: str, build: Build) -> Dataset:
    held: list[Pixels] = []

    def put(shape: tuple[int, int, int, int], blocks: Iterable[Pixels]) -> None:
        held.append(_filled(shape, np.uint8, blocks))

    labels = build(put)
    return Dataset(name, held[0], labels.y, labels.class_names, standard=labels.standard)


def _filled(
    shape: tuple[int, ...], dtype: type[N], blocks: Iterable[npt.NDArray[N]]
) -> npt.NDArray[N]:
    """Return an array of this shape with the rows of the blocks."""
    x, start = np.empty(shape, dtype=dtype), 0
    for block in blocks:
        x[start : start + len(block)] = block
        start += len(block)
    return x


def cached_features(
    name: str, key: str, n: int, blocks: Callable[[], Iterator[Features]]
) -> Features:  # fmt: skip
    """Return features, float32 [n, d], from the cache folder; compute them if they are not there.

    Args:
        name: name of the dataset.
        key: SHA-256 of everything that the features depend on.
        n: number of examples.
        blocks: computes the features and yields them in blocks of rows, float32 [k, d].

    If the folder is not writable, the features are computed into memory.
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:40]
    entry = storage.cache_folder() / f"{plain}-features-{key[:24]}"
    if (found := _read_features(key, n, entry)) is not None:
        return found
    if not writable(entry.parent, "features are computed"):
        return in_memory(n, blocks())
    return read_or_write(
        entry,
        lambda place: _read_features(key, n, place),
        lambda folder: _write_features(key, n, blocks(), folder),
    )


def in_memory(n: int, blocks: Iterator[Features]) -> Features:
    """Return blocks of features as one array [n, d]."""
    first = next(blocks)
    return _filled((n, first.shape[1]), np.float32, chain([first], blocks))


def _write_features(key: str, n: int, blocks: Iterator[Features], folder: Path) -> None:
    path, first = folder / "features.npy", next(blocks)
    write_blocks(path, first.dtype, (n, first.shape[1]), chain([first], blocks))
    about = {"key": key, "features": spots(path)}
    storage.write_bytes(folder / "about.json", json.dumps(about).encode(), sync=True)


def _read_features(key: str, n: int, entry: Path) -> Features | None:
    """Return the features in the cache entry `entry`; None if it is absent or damaged."""
    path = entry / "features.npy"
    try:
        about = json.loads((entry / "about.json").read_bytes())
        if about != {"key": key, "features": spots(path)}:
            return None
        x = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return np.asarray(x) if x.shape[:1] == (n,) and x.ndim == 2 else None
