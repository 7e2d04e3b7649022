"""A folder of image files, with a subfolder for each class."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from fedshot.core.errors import DataError
from fedshot.core.ranges import Side
from fedshot.core.regular_files import real_path
from fedshot.core.text import count, other_kinds
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, Ints, Pixels
from fedshot.data.files.bounded import check_link, check_memory
from fedshot.data.files.images import SUFFIXES, Aspect, decode, workers
from fedshot.data.sources.source import Source
from fedshot.data.sources.splits.published import PARTS
from fedshot.data.tokens import Numbers

_SHOWN = 10  # unusable images that an error names
_LONGEST_PATTERN = 200  # characters of `groups`; long ones take seconds to compile


@dataclass(frozen=True)
class ImageFolder(Source):
    """Images from `path/<class>/`, or `path/{base,validation,novel}/<class>/` with a split.

    Hidden files are skipped. Files without an image suffix, images beside the class folders and
    folders within the class folders are skipped and reported.

    Args:
        path: the folder.
        size: side in pixels of the square that images are resized to; null to keep their size,
            which must then be the same for all images.
        channels: 3 for colour, 1 for grey.
        aspect: how images become squares: "squeeze" changes their aspect ratio, "crop" keeps the
            middle, "pad" adds black.
        groups: a regular expression that finds an image's group in its file name, such as "^[^_]+"
            for the text before the first "_". Images of one group are nearly alike (frames of a
            video, images of a patient): within a class, an episode never has images of one group in
            both support and query set.
    """

    path: str
    size: Side | None = None
    channels: Literal[1, 3] = 3
    aspect: Aspect = "squeeze"
    groups: str | None = None

    def __post_init__(self) -> None:
        if len(self.groups or "") > _LONGEST_PATTERN:
            raise DataError(f"groups has more than {_LONGEST_PATTERN} characters. Shorten it.")
        try:
            re.compile(self.groups or "")
        except re.error as error:
            raise DataError(
                f"groups is {self.groups!r}, not a regular expression ({error})"
            ) from None

    def load(self, data_dir: Path | None) -> Dataset:
        """Read all images; `path` is relative to the working directory.

        Raises DataError if the folder is missing, a class has no image, or an image is unreadable.
        """
        del data_dir
        root = Path(self.path).expanduser()
        if not root.is_dir():
            relative = f" (relative to the working directory {Path.cwd()})"
            raise DataError(
                f"{root} is not a folder{'' if root.is_absolute() else relative}; expected one "
                "with a subfolder for each class"
            )
        root = real_path(root)
        classes, parts = _classes(root)
        images = [_images(root, folder) for folder in classes]
        files = [file for held in images for file in held]
        split = (tuple(c for c, part in enumerate(parts) if part == which) for which in PARTS)
        return Dataset(
            root.name,
            self._read(root, files),
            np.repeat(np.arange(len(classes)), [len(held) for held in images]),
            tuple(folder.name for folder in classes),
            standard=ClassSplit(*split) if parts else None,
            groups=None if self.groups is None else _groups(files, self.groups),
            skipped=_skipped(root, classes),
        )

    def _read(self, root: Path, files: list[Path]) -> Pixels:
        first = self._first(files)
        check_memory(str(root), len(files) * first.nbytes, "Set `size`, or lower it.")
        x = np.empty((len(files), *first.shape), dtype=np.uint8)

        def fill(i: int) -> DataError | None:
            try:
                pixels = self._decode(files[i])
            except DataError as error:
                return error
            if pixels.shape != first.shape:
                (h, w, _), (h2, w2, _) = first.shape, pixels.shape
                raise DataError(
                    f"images differ in size: {files[0]} is {w}x{h} and {files[i]} is {w2}x{h2} "
                    f"(width x height). Set `size`, for example size={min(h, w)}."
                )
            x[i] = pixels
            return None

        with workers() as pool:
            failed = [error for error in pool.map(fill, range(len(files))) if error is not None]
        if len(failed) > 1:
            shown = "".join(f"\n- {error}" for error in failed[:_SHOWN])
            more = f"\n- and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
            raise DataError(f"{len(failed)} images of {root} cannot be used:{shown}{more}")
        if failed:
            raise failed[0]
        return x

    def _first(self, files: list[Path]) -> Pixels:
        """Return the first image that can be decoded. Raises the error of the first if none can."""
        for file in files:
            with suppress(DataError):
                return self._decode(file)
        return self._decode(files[0])

    def _decode(self, file: Path) -> Pixels:
        return decode(file, file, self.channels, self.size, self.aspect)


def _classes(root: Path) -> tuple[list[Path], list[str]]:
    """Return the class folders, sorted by name, and the part of the split that each is in.

    The list of parts is empty if the folder has no split.
    """
    folders = _folders(root, root)
    by_name = {folder.name: folder for folder in folders}
    is_split = {"base", "novel"} <= by_name.keys() <= set(PARTS)
    if is_split and _folders(root, by_name["base"]):
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
        pictures = sum(map(_is_image, _shown(root)))
        lie = f", and {count(pictures, 'picture')} outside folders" if pictures else ""
        raise DataError(
            f"{root} holds no folders{lie}; expected one for each class, with its images. Move the "
            "images of each class into a folder that has its name."
        )
    return folders, []


def _shown(folder: Path) -> list[Path]:
    """Return the entries of a folder that are not hidden, sorted by name."""
    found = [p for p in folder.iterdir() if not p.name.startswith(".")]
    return sorted(found, key=lambda p: p.name)


def _folders(root: Path, folder: Path) -> list[Path]:
    """Return the subfolders. Raises DataError for a link to a place outside `root`."""
    found = [p for p in _shown(folder) if p.is_dir()]
    for path in found:
        check_link(root, path)
    return found


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _images(root: Path, folder: Path) -> list[Path]:
    found = [p for p in _shown(folder) if _is_image(p) and not p.is_dir()]
    for path in found:
        check_link(root, path)
    if not found and _folders(root, folder):
        raise DataError(
            f"class folder {folder} holds folders and no image. Expected a folder of images for "
            "each class; or three folders of such folders, named base, validation (optional) and "
            "novel, and no other beside them."
        )
    if not found:
        raise DataError(
            f"class folder {folder} holds no image ({', '.join(sorted(SUFFIXES))}). Add some, or "
            "remove the folder."
        )
    return found


def _skipped(root: Path, classes: list[Path]) -> str:
    """Describe the files and folders that are not read, except hidden ones."""
    above = {root, *(folder.parent for folder in classes)}
    beside = [p for folder in sorted(above) for p in _shown(folder) if p.is_file()]
    within = [p for folder in classes for p in _shown(folder)]
    kinds = [p for p in (*beside, *within) if not _is_image(p) and p.is_file()]
    images, folders = sum(map(_is_image, beside)), sum(p.is_dir() for p in within)
    parts = [
        other_kinds(kinds, "skipped"),
        f"{count(images, 'image')} beside the class folders skipped" if images else "",
        f"{count(folders, 'folder')} within class folders skipped" if folders else "",
    ]
    return "; ".join(filter(None, parts))


def _groups(files: list[Path], pattern: str) -> Ints:
    """Return the group number of each file. Raises DataError if `pattern` finds no group."""
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
