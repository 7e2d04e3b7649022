"""MNIST and Fashion-MNIST: grey images of 28 x 28 pixels in the idx format.

Sources: LeCun, Cortes and Burges 1998; Xiao, Rasul and Vollgraf 2017.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedshot.core.errors import DataError
from fedshot.core.text import typed
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, Pixels, check_classes
from fedshot.data.files.bounded import naming_damage, unzipped
from fedshot.data.files.cache import Labels, Put, cached
from fedshot.data.sources.source import Source, dataset_folder

HALVES = ("train", "t10k")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
           "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")  # fmt: skip
_LIMIT = 1 << 28  # decompressed bytes of a file; the largest has 47,040,016


@dataclass(frozen=True)
class Mnist(Source):
    """Handwritten digits from `<data_dir>/mnist`; 0 to 4 are base classes, 5 to 9 novel ones.

    Files: `{train,t10k}-images-idx3-ubyte` and `-labels-idx1-ubyte`, with or without `.gz`, in that
    folder or its subfolder `raw/`. One half, `train` or `t10k`, is enough.
    """

    name: ClassVar[str] = "mnist"
    names: ClassVar[tuple[str, ...]] = tuple("0123456789")

    def load(self, data_dir: Path | None) -> Dataset:
        """Return the images of the halves that exist, the training half first."""
        folder = self._folder(data_dir)
        files = _files(folder)
        if not files:
            raise DataError(
                f"{self.name}: {folder} holds no half of the set. Put "
                f"train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz there, or the two of "
                f"t10k; `fedshot data get {self.name} --data-dir {typed(folder.parent)}` "
                "fetches them."
            )
        build = partial(_build, files, self.names)
        dataset = cached(self.name, [path for pair in files.values() for path in pair], {}, build)
        split = ClassSplit(base=(0, 1, 2, 3, 4), validation=(), novel=(5, 6, 7, 8, 9))
        return replace(dataset, standard=split)

    def halves(self, data_dir: Path | None) -> tuple[str, ...]:
        """Return which of the halves `train` and `t10k` exist."""
        return tuple(_files(self._folder(data_dir)))

    def _folder(self, data_dir: Path | None) -> Path:
        return dataset_folder(data_dir, self.name, "train-images-idx3-ubyte.gz and so on")


@dataclass(frozen=True)
class FashionMnist(Mnist):
    """Clothes from `<data_dir>/fashionmnist`; the first five classes are base, the others novel.

    The files have the same names as those of MNIST.
    """

    name: ClassVar[str] = "fashion_mnist"
    names: ClassVar[tuple[str, ...]] = FASHION


def _files(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Return half -> (file of images, file of labels) for each half that exists."""
    found: dict[str, tuple[Path, Path]] = {}
    for half in HALVES:
        kinds = (("images", 3), ("labels", 1))
        paths = [_find(folder, f"{half}-{kind}", dims) for kind, dims in kinds]
        there = [path for path in paths if path is not None]
        if len(there) == 1:
            kind, dims = kinds[paths.index(None)]
            raise DataError(
                f"{folder}: {half}-{kind}-idx{dims}-ubyte.gz is missing, though the other file of "
                "this half exists. Put it there, too."
            )
        if there:
            found[half] = (there[0], there[1])
    return found


def _find(folder: Path, stem: str, dims: int) -> Path | None:
    # Some programs rename `-idx` to `.idx`.
    names = [f"{stem}{dot}idx{dims}-ubyte{suffix}" for dot in "-." for suffix in (".gz", "")]
    paths = (place / name for place in (folder, folder / "raw") for name in names)
    return next((path for path in paths if path.is_file()), None)


def _build(files: dict[str, tuple[Path, Path]], names: tuple[str, ...], put: Put) -> Labels:
    images, labels = [], []
    for pictures, classes in files.values():
        x, own = read_idx(pictures, 3), read_idx(classes, 1)
        if x.shape[1:] != (28, 28):
            h, w = x.shape[1:]
            raise DataError(f"{pictures} has images of {w}x{h}; expected 28x28. Fetch it again.")
        if len(x) != len(own):
            raise DataError(
                f"{classes} has {len(own)} labels for the {len(x)} images of {pictures.name}. "
                "Fetch both again."
            )
        if len(own) and own.max() >= len(names):
            raise DataError(
                f"{classes}: label {own.max()} is out of range; expected 0..{len(names) - 1}. "
                "Fetch it again."
            )
        images.append(x[..., None])
        labels.append(own)
    y = np.concatenate(labels).astype(np.int64)
    _, first = next(iter(files.values()))
    check_classes(first, "labels", y, names, "Fetch it again.")
    put((len(y), 28, 28, 1), images)
    return Labels(y, names)


def read_idx(path: Path, dims: int) -> Pixels:
    """Read an idx file, gzipped or not; return its uint8 array with `dims` dimensions.

    Raises DataError if the file is damaged or has another type or number of dimensions.
    """
    with naming_damage(path, "idx"), unzipped(path) as file:
        head = file.read(4 + 4 * dims)
        if len(head) < 4 + 4 * dims or head[:4] != bytes((0, 0, 8, dims)):
            raise DataError(
                f"{path} is not an idx file of bytes in {dims} dimensions. Fetch it again."
            )
        shape = struct.unpack(f">{dims}I", head[4:])
        size = math.prod(shape)
        if size > _LIMIT:
            raise DataError(f"{path} declares {size} bytes; expected at most {_LIMIT}.")
        data = file.read(size + 1)
    if len(data) != size:
        many = "more than" if len(data) > size else f"{len(data)} instead of"
        raise DataError(f"{path} holds {many} the {size} bytes it declares. Fetch it again.")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)
