"""Images or features, with their labels, from an .npz file."""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from fedshot.core.errors import DataError
from fedshot.data.dataset import Dataset, Ints, first_twice
from fedshot.data.files.bounded import (
    check_member,
    check_memory,
    max_unpacked,
    naming_damage,
    opened_zip,
)
from fedshot.data.files.images import check_layout
from fedshot.data.sources.source import Source

_ARRAYS = ("x", "y", "class_names", "users", "groups")
_CLASSES = 1 << 16  # number of classes up to which labels may have gaps
_GAPS = 10  # beyond _CLASSES, the most class numbers per class with an image
_UNPACKED = 1 << 30  # bytes that any array may have; drawings compress 600 to 1


@dataclass(frozen=True)
class Npz(Source):
    """Arrays from an .npz file: `x`, `y`, and optionally `class_names`, `users` and `groups`.

    `x` holds images, uint8 [n, H, W] or [n, H, W, C], or features that an encoder has computed,
    float [n, d]. `y`, `users` and `groups` are integers [n], and `class_names` are strings. Files
    with Python objects are refused, since reading them could run code. Users are renumbered from 0,
    in ascending order.

    Examples of one group are nearly alike, such as frames of one video: within a class, an episode
    never has examples of one group in both support and query set.

    Args:
        path: the file.
    """

    path: str

    def load(self, data_dir: Path | None) -> Dataset:
        """Read and check the arrays; `path` is relative to the working directory."""
        del data_dir
        arrays = _read(Path(self.path).expanduser())
        x = arrays["x"]
        if x.dtype.kind == "f" and x.ndim == 2:
            with np.errstate(over="ignore"):  # infinity is refused below
                x = x.astype(np.float32, copy=False)
        elif x.dtype != np.uint8:
            raise DataError(
                f"{self.path}: x is {x.dtype}{list(x.shape)}; expected images, uint8 [n, height, "
                "width, channels], or features, float [n, d]. Scale pixels to 0..255 and write "
                "x.round().astype(np.uint8)."
            )
        if x.ndim == 3:
            x = x[..., None]
        check_layout(x.shape, self.path)
        y = self._ints("y", arrays["y"])
        names = arrays.get("class_names")
        if names is None:
            names = np.arange(self._count_classes(y)).astype(str)
        elif names.ndim != 1 or names.dtype.kind != "U":
            raise DataError(
                f"{self.path}: class_names is {names.dtype}{list(names.shape)}; expected a list "
                "of strings. Write np.array(['cat', 'dog'])."
            )
        users = self._ints("users", arrays["users"]) if "users" in arrays else None
        if users is not None:
            if users.min(initial=0) < 0:
                raise DataError(
                    f"{self.path}: users hold {users.min()}; expected numbers from 0 on. Leave out "
                    "the examples whose user is unknown, or give each a number of its own."
                )
            users = np.unique(users, return_inverse=True)[1].reshape(-1).astype(np.int64)
        groups = self._ints("groups", arrays["groups"]) if "groups" in arrays else None
        x = np.ascontiguousarray(x)
        return Dataset(Path(self.path).stem, x, y, tuple(names.tolist()), users, groups=groups)

    def _count_classes(self, y: Ints) -> int:
        """Return the number of classes for labels without class names."""
        n, held = int(y.max(initial=0)) + 1, len(np.unique(y))
        if n > max(_CLASSES, _GAPS * held):
            raise DataError(
                f"{self.path}: y has {held} different labels, and the largest is {n - 1}; expected "
                "labels that number the classes from 0. Write class_names, y = "
                "np.unique(y, return_inverse=True), and class_names as strings beside y."
            )
        return n

    def _ints(self, name: str, array: np.ndarray) -> Ints:
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"{self.path}: {name} is {array.dtype}{list(array.shape)}; expected one integer "
                "for each image"
            )
        if array.max(initial=0) > np.iinfo(np.int64).max:
            raise DataError(f"{self.path}: {name} has {array.max()}; expected int64 numbers.")
        return array.astype(np.int64)


def _read(path: Path) -> dict[str, np.ndarray]:
    """Return name -> array for the names in _ARRAYS that the file contains."""
    if not path.is_file():
        raise DataError(f"{path} is not a file; expected an .npz file. Check `path`.")
    with opened_zip(path) as archive:
        members = archive.infolist()
        names = [member.filename.removesuffix(".npy") for member in members]
        twice = first_twice(names)
        if twice is not None:
            raise DataError(f"{path} holds {twice!r} twice. Write the file again.")
        missing = [name for name in ("x", "y") if name not in names]
        if missing:
            raise DataError(
                f"{path} has no array {' and no array '.join(map(repr, missing))}; it has "
                f"{sorted(names)}. Write it with np.savez(path, x=images, y=labels)."
            )
        wanted = {name: one for name, one in zip(names, members, strict=True) if name in _ARRAYS}
        limit = max(_UNPACKED, max_unpacked(path))
        for member in wanted.values():
            check_member(path, member, limit, "Write it with np.savez, uncompressed.")
            with naming_damage(path, "npz"), archive.open(member) as file:
                _check_header(path, member, file)
        with naming_damage(path, "npz"):
            return {name: _array(archive, member) for name, member in wanted.items()}


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _check_header(path: Path, member: zipfile.ZipInfo, file: IO[bytes]) -> None:
    """Raise DataError if the array holds Python objects, or its declared size is wrong."""
    if file.read(6) != np.lib.format.MAGIC_PREFIX:
        raise DataError(
            f"{path}: {member.filename} is not a numpy array. Write the file with np.savez."
        )
    version = tuple(file.read(2))
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise DataError(f"{path}: {member.filename} has an unsupported version of .npy.")
    shape, _, dtype = readers[version](file)
    if dtype.hasobject:
        raise DataError(
            f"{path} holds Python objects, which could run code when read. Write plain arrays "
            "(uint8 images, integer labels, strings without dtype=object)."
        )
    declared, held = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
    if declared != held:
        raise DataError(
            f"{path}: {member.filename} holds {held} bytes, and declares {declared}. Write it "
            "again."
        )
    check_memory(f"{path}: {member.filename}", declared, "Write fewer, or smaller, images.")
