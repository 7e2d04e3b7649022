"""Omniglot: 1623 handwritten characters of 50 alphabets, 20 drawings of each.

Source: Lake, Salakhutdinov and Tenenbaum, Science 2015. Split: Vinyals et al., 2016, without
rotations (1028 training, 172 validation and 423 test characters).
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image

from fedshot.data.dataset import ClassSplit, Dataset, Pixels
from fedshot.data.images import opened_zip, readable, workers
from fedshot.errors import DataError

_ZIPS = ("images_background.zip", "images_evaluation.zip")
_PARTS = ("train", "val", "test")
_MEMBER = re.compile(r"images_(?:background|evaluation)/([^/]+/character\d+)/\d+_\d+\.png")
_LARGEST = 1 << 20  # bytes; a drawing has a few hundred


@dataclass(frozen=True)
class Omniglot:
    """Drawings from `<data_dir>/omniglot`, ink 255 on 0, scaled to `size` by averaging."""

    size: int = 28

    def __post_init__(self) -> None:
        if not 1 <= self.size <= 1024:
            raise DataError(f"size is {self.size}; expected 1 to 1024 (drawings are 105 wide)")

    def load(self, data_dir: Path | None) -> Dataset:
        """Read the two zip files and the split as they were published; nothing is unpacked."""
        folder = _folder(data_dir)
        members = sorted(chain.from_iterable(_drawings(folder / name) for name in _ZIPS))
        names = tuple(dict.fromkeys(name for name, _, _ in members))
        numbers = {name: c for c, name in enumerate(names)}
        x = np.empty((len(members), self.size, self.size, 1), dtype=np.uint8)

        def fill(i: int) -> None:
            _, member, data = members[i]
            x[i, :, :, 0] = _decode(data, member, self.size)

        with workers() as pool:
            for _ in pool.map(fill, range(len(members)), chunksize=512):
                pass
        y = np.array([numbers[name] for name, _, _ in members], dtype=np.int64)
        parts = [_read_split(folder / "splits_vinyals" / f"{part}.txt", numbers) for part in _PARTS]
        return Dataset("omniglot", x, y, names, standard=ClassSplit(*parts))

    def split(self, dataset: Dataset) -> ClassSplit | None:
        """Return the split of Vinyals et al."""
        return dataset.standard


def _folder(data_dir: Path | None) -> Path:
    if data_dir is None:
        raise DataError(
            "omniglot needs a data folder and none is given. Set $FEDSHOT_DATA, or the option "
            f"`data_dir`, to the folder that holds omniglot/{_ZIPS[0]} and omniglot/{_ZIPS[1]}."
        )
    folder = data_dir / "omniglot"
    for name in (*_ZIPS, *(f"splits_vinyals/{part}.txt" for part in _PARTS)):
        if not (folder / name).is_file():
            raise DataError(
                f"omniglot: {folder / name} is missing. Put the file {name} into {folder}."
            )
    return folder


def _drawings(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield (class name, member name, PNG bytes) of one zip file."""
    found = False
    with opened_zip(path) as archive:
        for member in archive.infolist():
            match = _MEMBER.fullmatch(member.filename)
            if match:
                found = True
                yield match[1], member.filename, _bytes(path, archive, member)
    if not found:
        raise DataError(
            f"{path} holds no drawings; expected members such as "
            "images_background/Greek/character01/0394_01.png. Download the file again."
        )


def _bytes(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    if member.file_size > _LARGEST:
        raise DataError(
            f"{path}: {member.filename} has {member.file_size} bytes; a drawing has a few hundred. "
            "Download the file again."
        )
    return archive.read(member)


def _decode(data: bytes, name: str, size: int) -> Pixels:
    with readable(name), Image.open(BytesIO(data), formats=["PNG"]) as image:
        if image.width * image.height > _LARGEST:
            raise DataError(f"image {name} is {image.size}; drawings are 105 x 105 pixels")
        paper = image.convert("L").resize((size, size), Image.Resampling.BOX)
        return 255 - np.asarray(paper)


def _read_split(path: Path, numbers: dict[str, int]) -> tuple[int, ...]:
    names = path.read_text(encoding="utf-8").split()
    for name in names:
        if name not in numbers:
            raise DataError(
                f"{path} names {name!r}, of which the zip files hold no drawing; expected lines "
                "such as Greek/character01. Download the split and the zip files again."
            )
    return tuple(sorted(numbers[name] for name in names))
