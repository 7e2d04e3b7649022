"""miniImageNet: 100 classes of ImageNet, 600 photographs of each, at 84 x 84 pixels.

Source: Vinyals et al. 2016; split: Ravi and Larochelle 2017 (64, 16 and 20 classes). The authors of
the split publish lists of files, not the images, so copies differ in folders and in scaling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedshot.core.errors import DataError
from fedshot.core.ranges import SmallSide
from fedshot.core.text import typed
from fedshot.data.dataset import Dataset
from fedshot.data.files.archives import Archive, opened
from fedshot.data.files.cache import Labels, Put, cached
from fedshot.data.files.images import photo
from fedshot.data.sources.publishers import published_split
from fedshot.data.sources.source import Member, Source, dataset_folder, find_images, put_images
from fedshot.data.sources.splits.published import (
    PARTS,
    PUBLISHED,
    all_exist,
    check_count,
    csv_rows_of,
    packaged,
    read_text,
    to_split,
)

_COUNTS = published_split("mini_imagenet")
IMAGES = (".jpg", ".jpeg", ".png")
_WNID = 9  # characters of a class number such as n01532829
_Rows = dict[str, list[tuple[str, str]]]  # part -> (file name, class)


@dataclass(frozen=True)
class ImageNetSubset(Source):
    """Photographs of some classes of ImageNet, scaled to squares.

    Args:
        size: side length of the images in pixels.
        resize: whether to scale images of another size; otherwise they are an error.
        file: zip or folder to read in the dataset's folder; null looks for a folder `images`, a
            .zip or class folders.
    """

    size: SmallSide = 84
    resize: bool = False
    file: str | None = None

    def find(self, folder: Path, source: str) -> Path:
        """Return the zip or folder of images in the dataset's folder. Raises DataError if none."""
        place = find_images(folder, source, self.file, ("images",))
        if place is not None:
            return place
        if folder.is_dir() and any(p.is_dir() for p in folder.iterdir() if p.name != "splits_full"):
            return folder
        raise DataError(
            f"{source}: {folder} holds no images. Put one zip of them there, or a folder for each "
            f"class; `fedshot data get {source} --data-dir {typed(folder.parent)}` "
            "says where to get them."
        )

    def put_images(
        self, put: Put, members: Sequence[Member], names: tuple[str, ...], where: Path
    ) -> Labels:
        """Decode the images into the cache; return their labels."""
        remedy = "Replace it, or set resize=true to scale every image."
        convert = partial(photo, size=self.size, resize=self.resize, remedy=remedy)
        fix = "Add their folders, with their images."
        shape = (self.size, self.size, 3)
        return put_images(put, members, names, shape, convert, where=where, fix=fix)


@dataclass(frozen=True)
class MiniImageNet(ImageNetSubset):
    """Photographs from `<data_dir>/miniimagenet`: a .zip, a folder `images`, or class folders.

    Images are .jpg or .png files, in one folder or in a folder for each class. The official
    `train.csv`, `val.csv` and `test.csv` (`filename,label`), in the dataset's folder or in the zip,
    list the images to use; without them, all images of the 100 published classes are used.
    """

    def load(self, data_dir: Path | None) -> Dataset:
        """Return the dataset; the first call decodes all images into the cache on disk."""
        folder = dataset_folder(data_dir, "mini_imagenet", "a zip or folder of its images")
        place = self.find(folder, "mini_imagenet")
        lists = [folder / f"{part}.csv" for part in PUBLISHED]
        own = lists if all_exist(lists) else []
        options = {"size": self.size, "resize": self.resize}
        return cached("mini_imagenet", [place, *own], options, partial(self._build, place, own))

    def _build(self, place: Path, own: Sequence[Path], put: Put) -> Labels:
        with opened(place) as archive:
            rows = _listed(archive, own)
            members = _matched(archive, rows) if rows is not None else _all(archive)
            names = tuple(sorted({member.class_name for member in members}))
            if len(names) != sum(_COUNTS):
                raise DataError(
                    f"{place} holds {len(names)} classes, expected {sum(_COUNTS)}. Fetch it again."
                )
            members.sort(key=lambda member: (member.class_name, member.name))
            labels = self.put_images(put, members, names, place)
            lists = packaged("mini_imagenet")
            if rows is not None:
                lists = {part: {c for _, c in listed} for part, listed in rows.items()}
            return labels._replace(standard=to_split([place] * len(lists), lists, names))


def _listed(archive: Archive, own: Sequence[Path]) -> _Rows | None:
    """Return the rows of the csv files `own`, or else of those in the archive; None if none."""
    texts = [(str(path), read_text(path)) for path in own]
    if not own:
        by_name = {name.rsplit("/", 1)[-1]: name for name in archive.names}
        if not {f"{word}.csv" for word in PUBLISHED} <= by_name.keys():
            return None
        for word in PUBLISHED:
            member = by_name[f"{word}.csv"]
            where = f"{archive.path}: {member}"
            try:
                texts.append((where, archive.read(member).decode("utf-8-sig")))
            except UnicodeDecodeError as error:
                raise DataError(f"{where} is not text ({error}). Fetch it again.") from error
    rows: _Rows = {}
    for part, (where, text), count in zip(PARTS, texts, _COUNTS, strict=True):
        rows[part] = _rows(where, text)
        check_count(where, part, {c for _, c in rows[part]}, count)
    return rows


def _rows(where: object, text: str) -> list[tuple[str, str]]:
    rows = csv_rows_of(where, text)
    if not rows or rows[0] != ["filename", "label"]:
        raise DataError(f"{where} does not begin with `filename,label`. Fetch the official file.")
    for i, row in enumerate(rows, start=1):
        if len(row) != 2 or not all(row) or "/" in row[0] or "\\" in row[0]:
            raise DataError(
                f"{where}, row {i}: {','.join(row)[:80]!r}; expected a file name without folders, "
                "and a class. Fetch the official file."
            )
    return [(file, c) for file, c in rows[1:]]


def _matched(archive: Archive, rows: _Rows) -> list[Member]:
    """Return the member of the archive for each row of the csv files."""
    classes = {c for listed in rows.values() for _, c in listed}
    flat: dict[str, str] = {}
    by_class: dict[tuple[str, str], str] = {}
    for member in archive.names:
        *above, file = member.split("/")
        if above and above[-1] in classes:
            by_class[above[-1], file] = member
        else:
            flat[file] = member
    members: list[Member] = []
    for word, listed in zip(PUBLISHED, rows.values(), strict=True):
        for file, c in listed:
            found = by_class.get((c, file)) or flat.get(file)
            if found is None:
                raise DataError(
                    f"{word}.csv lists {file} of class {c}, which {archive.path} does not hold. "
                    "Add the image, or remove the row."
                )
            members.append(Member(c, archive, found))
    if len({member.name for member in members}) != len(members):
        raise DataError(f"{archive.path}: the csv files list an image twice. Remove one row.")
    return members


def _all(archive: Archive) -> list[Member]:
    """Return all images; the class is in the name of the folder or file."""
    known = {name for names in packaged("mini_imagenet").values() for name in names}
    members: list[Member] = []
    for member in archive.names:
        if not member.lower().endswith(IMAGES):
            continue
        *above, file = member.split("/")
        c = above[-1] if above and above[-1] in known else file[:_WNID]
        if c not in known:
            raise DataError(
                f"{archive.path}: {member} belongs to none of the 100 published classes. Put "
                "train.csv, val.csv and test.csv beside the images, or remove it."
            )
        members.append(Member(c, archive, member))
    return members
