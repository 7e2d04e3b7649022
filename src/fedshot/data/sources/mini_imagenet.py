"""miniImageNet: 100 classes of ImageNet, 600 photographs of each, at 84 x 84 pixels.

Source: Vinyals et al. 2016; split: Ravi and Larochelle 2017 (64, 16 and 20 classes). The split's
authors publish lists of files, not the images, so copies differ in folders and in scaling.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fedshot.core.errors import DataError
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset
from fedshot.data.files.archives import Archive, opened
from fedshot.data.files.cache import Labels, Put, cached
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

_COUNTS = (64, 16, 20)
_PICTURES = (".jpg", ".jpeg", ".png")
_WNID = 9  # letters of a class such as n01532829
RESIZE = "Replace it, or set resize=true to scale every image."
_Rows = dict[str, list[tuple[str, str]]]  # part -> (file name, class)


@dataclass(frozen=True)
class MiniImageNet:
    """Photographs from `<data_dir>/miniimagenet`: one .zip, or a folder `images` (or the folder).

    Images lie flat or in a folder for each class, as .jpg or .png. The official
    `train.csv`, `val.csv` and `test.csv` (`filename,label`) beside the images, or in the zip, say
    which of them count; without the three, all images of the published 100 classes do.

    Args:
        size: pixels a side.
        resize: scale images of another size; else they are refused.
        file: another zip or folder to read.
    """

    size: int = 84
    resize: bool = False
    file: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.size <= 1024:
            raise DataError(f"size is {self.size}; expected 1 to 1024 pixels")

    def load(self, data_dir: Path | None) -> Dataset:
        """Read all images, the first time into the cache."""
        folder = home(data_dir, "mini_imagenet", "miniimagenet", "a zip or folder of its images")
        place = find_images(folder, "mini_imagenet", self.file)
        lists = [folder / f"{part}.csv" for part in PUBLISHED]
        own = lists if beside(lists) else []
        options = {"size": self.size, "resize": self.resize}
        build = partial(_build, place, own, self.size, self.resize)
        return cached("mini_imagenet", [place, *own], options, build)

    def split(self, dataset: Dataset) -> ClassSplit | None:
        """Return the 64, 16 and 20 classes."""
        return dataset.standard


def find_images(folder: Path, source: str, file: str | None) -> Path:
    """Return the zip or folder with a set's images."""
    if file is not None:
        if not (folder / file).exists():
            raise DataError(f"{source}: {folder / file} does not exist. Correct `file`.")
        return folder / file
    if (folder / "images").is_dir():
        return folder / "images"
    zips = sorted(folder.glob("*.zip"))
    if len(zips) > 1:
        raise DataError(
            f"{source}: {folder} holds {', '.join(z.name for z in zips)}. Say which with `file`."
        )
    if zips:
        return zips[0]
    if folder.is_dir() and any(p.is_dir() for p in folder.iterdir() if p.name != "splits_full"):
        return folder
    raise DataError(
        f"{source}: {folder} holds no images. Put one zip of them there, or a folder for each "
        f"class; `fedshot data get {source} --data-dir {folder.parent}` says where they can be had."
    )


def _build(place: Path, own: Sequence[Path], size: int, resize: bool, put: Put) -> Labels:
    with opened(place) as archive:
        rows = _listed(archive, own)
        members = _matched(archive, rows) if rows is not None else _all(archive)
        names = tuple(sorted({c for c, _ in members}))
        if len(names) != sum(_COUNTS):
            raise DataError(
                f"{place} holds {len(names)} classes, expected {sum(_COUNTS)}. Fetch it again."
            )
        numbers = {name: c for c, name in enumerate(names)}
        members.sort()
        convert = partial(photo, size=size, resize=resize, remedy=RESIZE)
        blocks = decoded(archive, [m for _, m in members], (size, size, 3), convert)
        put((len(members), size, size, 3), blocks)
        lists = packaged("mini_imagenet")
        if rows is not None:
            lists = {part: sorted({c for _, c in listed}) for part, listed in rows.items()}
        y = np.array([numbers[c] for c, _ in members], dtype=np.int64)
        return Labels(y, names, to_split(place, lists, names))


def _listed(archive: Archive, own: Sequence[Path]) -> _Rows | None:
    """Return the rows of the three csv files beside the images, else of those among them."""
    texts: dict[str, tuple[object, str]] = {}
    if own:
        for part, path in zip(PARTS, own, strict=True):
            texts[part] = (path, read_text(path))
    else:
        by_name = {name.rsplit("/", 1)[-1]: name for name in archive.names if name.endswith(".csv")}
        there = [f"{part}.csv" in by_name for part in PUBLISHED]
        if not all(there):
            return None
        for part, word in zip(PARTS, PUBLISHED, strict=True):
            place = f"{archive.path}: {by_name[f'{word}.csv']}"
            try:
                texts[part] = (place, archive.read(by_name[f"{word}.csv"]).decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise DataError(f"{place} is no text ({error}). Fetch it again.") from error
    rows: _Rows = {}
    for (part, (where, text)), count in zip(texts.items(), _COUNTS, strict=True):
        rows[part] = _rows(where, text)
        classes = {c for _, c in rows[part]}
        if len(classes) != count:
            raise DataError(
                f"{where} lists {len(classes)} classes; expected {count}. Fetch the csv again, or "
                "remove the three to use the published split."
            )
    return rows


def _rows(where: object, text: str) -> list[tuple[str, str]]:
    try:
        lines = [line for line in csv.reader(text.splitlines()) if line]
    except csv.Error as error:
        raise DataError(f"{where} is no csv file ({error}). Fetch it again.") from error
    if not lines or lines[0] != ["filename", "label"]:
        raise DataError(f"{where} does not begin with `filename,label`. Fetch the official file.")
    for i, line in enumerate(lines):
        if len(line) != 2 or not all(line) or "/" in line[0] or "\\" in line[0]:
            raise DataError(
                f"{where}, row {i + 1}: {','.join(line)[:80]!r}; expected a file name without "
                "folders, and a class. Fetch the official file."
            )
    return [(line[0], line[1]) for line in lines[1:]]


def _matched(archive: Archive, rows: _Rows) -> list[tuple[str, str]]:
    """Return (class, member) of every row, wherever its file lies."""
    classes = {c for listed in rows.values() for _, c in listed}
    flat: dict[str, str] = {}
    by_class: dict[tuple[str, str], str] = {}
    for member in archive.names:
        *above, file = member.split("/")
        if above and above[-1] in classes:
            by_class[above[-1], file] = member
        else:
            flat[file] = member
    members: list[tuple[str, str]] = []
    for part, listed in rows.items():
        for file, c in listed:
            found = by_class.get((c, file)) or flat.get(file)
            if found is None:
                word = PUBLISHED[PARTS.index(part)]
                raise DataError(
                    f"{word}.csv lists {file} of class {c}, which {archive.path} does not hold. "
                    "Add the image, or remove the row."
                )
            members.append((c, found))
    if len({member for _, member in members}) != len(members):
        raise DataError(f"{archive.path}: the csv files list an image twice. Remove one row.")
    return members


def _all(archive: Archive) -> list[tuple[str, str]]:
    """Return (class, member) of all images: the class is the folder's name or begins the file's."""
    known = {name for names in packaged("mini_imagenet").values() for name in names}
    members: list[tuple[str, str]] = []
    for member in archive.names:
        if not member.lower().endswith(_PICTURES):
            continue
        *above, file = member.split("/")
        c = above[-1] if above and above[-1] in known else file[:_WNID]
        if c not in known:
            raise DataError(
                f"{archive.path}: {member} belongs to none of the 100 published classes. Put "
                "train.csv, val.csv and test.csv beside the images, or remove it."
            )
        members.append((c, member))
    return members
