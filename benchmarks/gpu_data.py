"""Pack CIFAR-100 small enough to travel to a GPU: one lossless WebP for the images of each class.

    python benchmarks/gpu_data.py DATA_FOLDER TO

`install` reads such a folder back, image by image as they were; `gpu.py` calls it.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, Pixels
from fedshot.data.sources.cifar import Cifar100

_WIDE = 2  # images side by side; a WebP is at most 16,383 pixels high
_PARTS = ("base", "validation", "novel")
_META = "fc100.npz"


def pack(data: Path, to: Path) -> None:
    """Write the images of each class to `to`, and the names of classes and their split."""
    dataset = Cifar100(variant="fc100").load(data)
    to.mkdir(parents=True, exist_ok=True)
    x, split = dataset.x, dataset.standard
    assert isinstance(x, np.ndarray)
    assert split is not None
    for c in range(dataset.n_classes):
        own = x[dataset.y == c]
        tall = own.reshape(_WIDE, -1, 32, 32, 3).transpose(1, 2, 0, 3, 4).reshape(-1, 32 * _WIDE, 3)
        Image.fromarray(np.ascontiguousarray(tall)).save(
            to / f"{c:03d}.webp", lossless=True, quality=100, method=4
        )
    np.savez(to / _META, names=np.array(dataset.class_names), digest=np.array(dataset.digest),
             **{part: np.array(getattr(split, part)) for part in _PARTS})  # fmt: skip


def install(folder: Path) -> None:
    """Let `cifar100` of this process read a packed folder; leave any other folder as it is."""
    if not (folder / _META).exists():
        return
    with np.load(folder / _META) as held:
        names = tuple(held["names"].tolist())
        split = ClassSplit(*(tuple(held[part].tolist()) for part in _PARTS))
        digest = str(held["digest"])
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(_class, (folder / f"{c:03d}.webp" for c in range(len(names)))))
    y = np.repeat(np.arange(len(names)), [len(own) for own in images])
    dataset = Dataset("fc100", np.concatenate(images), y, names, standard=split)
    if dataset.digest != digest:
        raise ValueError(f"{folder} does not hold the images that were packed")

    def load(self: Cifar100, data_dir: Path | None) -> Dataset:
        del data_dir
        return replace(dataset, name=self.variant, known_digest=digest)

    Cifar100.load = load  # type: ignore[method-assign]


def _class(path: Path) -> Pixels:
    tall = np.asarray(Image.open(path))
    return tall.reshape(-1, 32, _WIDE, 32, 3).transpose(2, 0, 1, 3, 4).reshape(-1, 32, 32, 3)


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]))
