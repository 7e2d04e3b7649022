"""Where datasets come from. A source is a few options, a way to load, and perhaps a split."""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedshot.core.errors import DataError
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, Ints, first_twice
from fedshot.data.files.bounded import DAMAGE, check_member, check_memory, most_unpacked, opened_zip
from fedshot.data.sources.cifar import Cifar10, Cifar100
from fedshot.data.sources.folder import ImageFolder
from fedshot.data.sources.glyphs import Glyphs
from fedshot.data.sources.hf import HF
from fedshot.data.sources.huffpost import HuffPost
from fedshot.data.sources.in_memory import InMemory
from fedshot.data.sources.mini_imagenet import MiniImageNet
from fedshot.data.sources.mnist import FashionMnist, Mnist
from fedshot.data.sources.news import News20
from fedshot.data.sources.omniglot import Omniglot
from fedshot.data.sources.sent140 import Sent140
from fedshot.data.sources.texts import Texts
from fedshot.data.sources.tiered_imagenet import TieredImageNet

_ARRAYS = ("x", "y", "class_names", "users", "groups")
_NUMBERS = 1 << 16  # classes that labels may always count to
_UNPACKED = 1 << 30  # bytes that an array may always unpack to: drawings are packed 600 to one
_GAPS = 10  # numbers for each class that has an image, beyond that


class Source(Protocol):
    """A kind of data; its fields are its options."""

    def load(self, data_dir: Path | None) -> Dataset:
        """Read the data. `data_dir` is where downloaded datasets lie, for those that need it."""

    def split(self, dataset: Dataset) -> ClassSplit | None:
        """Return the classes' standard split, or None if the data has none."""


@cache
def _digits() -> tuple[Any, Any]:
    """Return scikit-learn's pixels [1797, 64], values 0 to 16, and labels; they lie in a csv."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images, labels


@dataclass(frozen=True)
class Digits:
    """The 1797 handwritten digits of 8 x 8 pixels that come with scikit-learn."""

    def load(self, data_dir: Path | None) -> Dataset:
        """Read them from the installed package; no file is needed."""
        del data_dir
        images, labels = _digits()
        x = np.round(images.reshape(-1, 8, 8, 1) * 255 / 16).astype(np.uint8)
        names = tuple(str(digit) for digit in range(10))
        split = ClassSplit(base=(0, 1, 2, 3, 4), validation=(), novel=(5, 6, 7, 8, 9))
        return Dataset("digits", x, labels.astype(np.int64), names, standard=split)

    def split(self, dataset: Dataset) -> ClassSplit | None:
        """Return 0 to 4 against 5 to 9."""
        return dataset.standard


@dataclass(frozen=True)
class Npz:
    """Arrays from an .npz file: `x`, `y`, and if wanted `class_names`, `users` and `groups`.

    `x` is uint8 [n, H, W] or [n, H, W, C]. Files that hold Python objects are refused, since
    reading them could run code. Users are renumbered from 0, in rising order. Examples of one group
    are nearly alike, as frames of a track are: no episode has a class's group on both sides.

    Args:
        path: the file.
    """

    path: str

    def load(self, data_dir: Path | None) -> Dataset:
        """Read and check the arrays; `path` is relative to the working folder."""
        del data_dir
        arrays = _read_npz(Path(self.path).expanduser())
        x = arrays["x"]
        if x.dtype != np.uint8:
            raise DataError(
                f"{self.path}: images are {x.dtype}, expected uint8. Scale to 0..255 and write "
                "x.round().astype(np.uint8)."
            )
        if x.ndim == 3:
            x = x[..., None]
        if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[2] == x.shape[3] > 4:
            raise DataError(
                f"{self.path}: images are {list(x.shape)}, channels first; expected [n, height, "
                "width, channels]. Write x.transpose(0, 2, 3, 1)."
            )
        y = self._ints("y", arrays["y"])
        names = arrays.get("class_names")
        if names is None:
            names = np.arange(self._counted(y)).astype(str)
        elif names.ndim != 1 or names.dtype.kind != "U":
            raise DataError(
                f"{self.path}: class_names is {names.dtype}{list(names.shape)}; expected a list "
                "of texts. Write np.array(['cat', 'dog'])."
            )
        users = None
        if "users" in arrays:
            told = self._ints("users", arrays["users"])
            if told.min(initial=0) < 0:
                raise DataError(
                    f"{self.path}: users hold {told.min()}; expected numbers from 0 on. Leave out "
                    "the examples whose user is not known, or give each a number of its own."
                )
            users = np.unique(told, return_inverse=True)[1].reshape(-1).astype(np.int64, copy=False)
        groups = self._ints("groups", arrays["groups"]) if "groups" in arrays else None
        x = np.ascontiguousarray(x)
        return Dataset(Path(self.path).stem, x, y, tuple(names.tolist()), users, groups=groups)

    def split(self, dataset: Dataset) -> ClassSplit | None:
        """Return None: an .npz file tells no split."""
        return dataset.standard

    def _counted(self, y: Ints) -> int:
        """Return how many classes labels without names count to."""
        n, held = int(y.max(initial=0)) + 1, len(np.unique(y))
        if n > max(_NUMBERS, _GAPS * held):
            raise DataError(
                f"{self.path}: y has {held} different labels, and the largest is {n - 1}; expected "
                "labels that number the classes from 0. Write class_names, y = "
                "np.unique(y, return_inverse=True), and class_names as texts beside y."
            )
        return n

    def _ints(self, name: str, array: np.ndarray) -> Ints:
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"{self.path}: {name} is {array.dtype}{list(array.shape)}; expected one whole "
                "number for each image"
            )
        if array.max(initial=0) > np.iinfo(np.int64).max:
            raise DataError(
                f"{self.path}: {name} has {array.max()}; expected numbers that int64 can hold."
            )
        return array.astype(np.int64)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays we know by name; others in the file are not read."""
    if not path.is_file():
        raise DataError(f"{path} is not a file; expected an .npz file. Check `path`.")
    with opened_zip(path) as archive:  # anything else numpy would take for a pickle
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
        for name, member in zip(names, members, strict=True):
            if name in _ARRAYS:
                most = max(_UNPACKED, most_unpacked(path))
                check_member(path, member, most, "Write it with np.savez, which packs nothing.")
                _check_header(path, archive, member)
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in _ARRAYS if name in stored.files}
    except ValueError as error:
        if "pickle" in str(error).lower():
            raise DataError(
                f"{path} holds Python objects, which could run code when read. Write plain arrays "
                "(uint8 images, whole-number labels, texts without dtype=object)."
            ) from error
        raise DataError(f"{path} cannot be read as .npz ({error}). Write it again.") from error
    except DAMAGE as error:
        raise DataError(f"{path} cannot be read as .npz ({error}). Write it again.") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # a zip file may hold anything under any name
            raise DataError(f"{path}: {name} is no numpy array. Write the file with np.savez.")
    return arrays


def _check_header(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Raise DataError where the memory that an array asks for is not what the file holds."""
    with archive.open(member) as file:
        if file.read(6) != np.lib.format.MAGIC_PREFIX:
            return  # no array: refused by name once it is read
        version = tuple(file.read(2))
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        if version not in readers:
            raise DataError(f"{path}: {member.filename} is of a version of .npy that is not taken.")
        shape, _, dtype = readers[version](file)
        held = member.file_size - file.tell()
    if dtype.hasobject:
        return  # refused by numpy
    asked = math.prod(shape) * dtype.itemsize
    if asked != held:
        raise DataError(
            f"{path}: {member.filename} holds {held} bytes, and announces {asked}. Write it again."
        )
    check_memory(f"{path}: {member.filename}", asked, "Write fewer, or smaller, images.")


SOURCES: dict[str, type[Source]] = {
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "digits": Digits,
    "fashion_mnist": FashionMnist,
    "folder": ImageFolder,
    "glyphs": Glyphs,
    "hf": HF,
    "huffpost": HuffPost,
    "memory": InMemory,
    "mini_imagenet": MiniImageNet,
    "mnist": Mnist,
    "news20": News20,
    "npz": Npz,
    "omniglot": Omniglot,
    "sent140": Sent140,
    "texts": Texts,
    "tiered_imagenet": TieredImageNet,
}
