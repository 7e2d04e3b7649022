"""A folder of picture files, one folder for each class."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from fedshot.core.errors import DataError, check_word
from fedshot.core.text import count, other_kinds
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.files.bounded import check_memory
from fedshot.data.files.images import SUFFIXES, Aspect, check_side, decode, workers
from fedshot.data.tokens import Numbers

_PARTS = ("base", "validation", "novel")


@dataclass(frozen=True)
class ImageFolder:
    """Pictures from `path/<class>/`, or `path/{base,validation,novel}/<class>/` with a split.

    Hidden files are passed over. So are files that are no pictures by their suffix, pictures beside
    the class folders and folders within them, which is told.

    Args:
        path: the folder.
        size: every picture becomes a square of that many pixels; null where all have one size.
        aspect: how: "squeeze" changes its aspect, "crop" keeps its middle, "pad" adds black.
        groups: a regular expression that finds in a file's name the group of the picture, such as
            "^[^_]+" for all up to the first "_". Pictures of one group are nearly alike (frames of
            a track, pictures of a patient): an episode has those of a class in its support or in
            its queries, never in both.
        channels: 3 for colours, 1 for grey.
    """

    path: str
    size: int | None = None
    channels: Literal[1, 3] = 3
    aspect: Aspect = "squeeze"
    groups: str | None = None

    def __post_init__(self) -> None:
        check_word("aspect", self.aspect, get_args(Aspect))
        try:
            re.compile(self.groups or "")
        except re.error as error:
            raise DataError(f"groups is {self.groups!r}, no regular expression ({error})") from None
        if self.channels not in (1, 3):
            raise DataError(f"channels is {self.channels}; expected 1 (grey) or 3 (colour)")
        check_side(self.size)

    def load(self, data_dir: Path | None) -> Dataset:
        """Read all pictures; `path` is relative to the working folder."""
        del data_dir
        root = Path(self.path).expanduser()
        if not root.is_dir():
            raise DataError(
                f"{root} is not a folder{_seen_from(root)}; expected one with a folder for each "
                "class"
            )
        root = root.resolve()
        classes, parts = _classes(root)
        names = tuple(folder.name for folder in classes)
        files: list[Path] = []
        labels: list[int] = []
        for c, folder in enumerate(classes):
            pictures = _pictures(root, folder)
            files += pictures
            labels += [c] * len(pictures)
        split = None
        if parts:
            split = ClassSplit(
                *(tuple(c for c, part in enumerate(parts) if part == which) for which in _PARTS)
            )
        x = self._read(root, files)
        groups = None if self.groups is None else _groups(files, self.groups)
        y, others = np.array(labels, dtype=np.int64), _passed_over(root, classes)
        return Dataset(root.name, x, y, names, standard=split, passed_over=others, groups=groups)

    def split(self, dataset: Dataset) -> ClassSplit | None:
        """Return the split the folders tell, if they do."""
        return dataset.standard

    def _read(self, root: Path, files: list[Path]) -> np.ndarray:
        first = decode(files[0], files[0], self.channels, self.size, self.aspect)
        check_memory(str(root), len(files) * first.nbytes, "Set `size`, or lower it.")
        x = np.empty((len(files), *first.shape), dtype=np.uint8)

        def fill(i: int) -> None:
            pixels = decode(files[i], files[i], self.channels, self.size, self.aspect)
            if pixels.shape != first.shape:
                (h, w, _), (h2, w2, _) = first.shape, pixels.shape
                raise DataError(
                    f"pictures differ in size: {files[0]} is {w}x{h} and {files[i]} is {w2}x{h2} "
                    f"(width x height). Set `size`, for example size={min(h, w)}."
                )
            x[i] = pixels

        with workers() as pool:
            for _ in pool.map(fill, range(len(files))):  # raises what `fill` raised, and stops
                pass
        return x


def _classes(root: Path) -> tuple[list[Path], list[str]]:
    """Return the class folders, sorted by name, and the part of each (empty without a split)."""
    folders = _folders(root, root)
    by_name = {folder.name: folder for folder in folders}
    told = {"base", "novel"} <= by_name.keys() <= set(_PARTS)
    if told and _folders(root, by_name["base"]):
        placed = [(c, part) for part in by_name for c in _folders(root, by_name[part])]
        placed.sort(key=lambda pair: pair[0].name)
        for (a, part_a), (b, part_b) in pairwise(placed):
            if a.name == b.name:
                raise DataError(
                    f"class {a.name!r} lies in both {part_a} and {part_b} of {root}; base, "
                    "validation and novel classes must be disjoint. Move it to one of them."
                )
        return [c for c, _ in placed], [part for _, part in placed]
    if not folders:
        raise DataError(f"{root} holds no folders; expected one for each class, of pictures")
    return folders, []


def _folders(root: Path, folder: Path) -> list[Path]:
    found = [p for p in folder.iterdir() if not p.name.startswith(".") and p.is_dir()]
    return [_inside(root, p) for p in sorted(found, key=lambda p: p.name)]


def _pictures(root: Path, folder: Path) -> list[Path]:
    found = [
        _inside(root, p)
        for p in sorted(folder.iterdir(), key=lambda p: p.name)
        if not p.name.startswith(".") and p.suffix.lower() in SUFFIXES and not p.is_dir()
    ]
    if found:
        return found
    if _folders(root, folder):
        raise DataError(
            f"class folder {folder} holds folders and no picture. Expected a folder of pictures "
            "for each class; or three folders of such folders, by the names base, validation "
            "(which may be left out) and novel, and no other beside them."
        )
    raise DataError(
        f"class folder {folder} holds no picture ({', '.join(sorted(SUFFIXES))}). Add some, or "
        "remove the folder."
    )


def _passed_over(root: Path, classes: list[Path]) -> str:
    """Say what lies in the folder and is not read, hidden files aside."""
    above = {root, *(folder.parent for folder in classes)}
    beside = [p for folder in above for p in _shown(folder) if p.is_file()]
    within = [p for folder in classes for p in _shown(folder)]
    kinds = [p for p in (*beside, *within) if p.suffix.lower() not in SUFFIXES and p.is_file()]
    pictures = sum(p.suffix.lower() in SUFFIXES for p in beside)
    folders = sum(p.is_dir() for p in within)
    told = [other_kinds(kinds, "passed over")]
    if pictures:
        told.append(f"{count(pictures, 'picture')} beside the class folders passed over")
    if folders:
        told.append(f"{count(folders, 'folder')} within class folders passed over")
    return "; ".join(filter(None, told))


def _shown(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if not p.name.startswith(".")]


def _groups(files: list[Path], pattern: str) -> Ints:
    """Return the number of each file's group. Raises DataError for a name that tells none."""
    numbers, found = Numbers(), []
    for file in files:
        match = re.search(pattern, file.name)
        if match is None:
            raise DataError(
                f"groups is {pattern!r}, which finds nothing in the name of {file}. Change it, or "
                "rename the file."
            )
        found.append(numbers[match[1] or "" if match.re.groups else match[0]])
    return np.array(found, dtype=np.int64)


def _seen_from(path: Path) -> str:
    """Say where a relative path was looked for."""
    return "" if path.is_absolute() else f" (below {Path.cwd()}, from where the command is given)"


def _inside(root: Path, path: Path) -> Path:
    """Return the path, unless a link leads out of the folder."""
    if path.is_symlink() and not path.resolve().is_relative_to(root):
        raise DataError(
            f"{path} is a link to {path.resolve()}, outside {root}. Copy the file into the folder."
        )
    return path
