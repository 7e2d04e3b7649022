"""Omniglot: 1623 handwritten characters of 50 alphabets, 20 drawings of each.

Source: Lake, Salakhutdinov and Tenenbaum, Science 2015. Split: Vinyals et al., 2016, without
rotations (1028 training, 172 validation and 423 test characters).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from fedshot.core.errors import DataError
from fedshot.core.ranges import SmallSide
from fedshot.core.text import typed
from fedshot.data.dataset import Dataset, Pixels
from fedshot.data.files.archives import Archive, opened
from fedshot.data.files.cache import Labels, Put, cached
from fedshot.data.files.images import check_image, open_image
from fedshot.data.sources.source import Member, Source, dataset_folder, put_images
from fedshot.data.sources.splits.published import PUBLISHED, packaged, read_split_files, to_split

_HALVES = ("images_background", "images_evaluation")
_MEMBER = re.compile(r"(?:.*/)?([^/]+/character\d+)/\d+_\d+\.png")
_MAX_PIXELS = 1 << 20  # a drawing has 105 x 105
_CHARACTERS = 1623


@dataclass(frozen=True)
class Omniglot(Source):
    """Drawings from `<data_dir>/omniglot`, inverted (ink is 255) and scaled down by averaging.

    Needs `images_background.zip` and `images_evaluation.zip` as published, or the folders unpacked
    from them. The files `splits_vinyals/{train,val,test}.txt`, if they exist, replace the built-in
    split of Vinyals et al.

    Args:
        size: side length of the images in pixels; the drawings have 105.
    """

    size: SmallSide = 28

    def load(self, data_dir: Path | None) -> Dataset:
        """Return the dataset; the first call decodes all images into the cache on disk."""
        wanted = " and ".join(f"{half}.zip" for half in _HALVES)
        folder = dataset_folder(data_dir, "omniglot", wanted)
        places = [_place(folder, half) for half in _HALVES]
        own = [folder / "splits_vinyals" / f"{part}.txt" for part in PUBLISHED]
        lists = read_split_files(own)
        build = partial(_build, places, self.size)
        dataset = cached("omniglot", places, {"size": self.size}, build)
        if lists is None and dataset.n_classes != _CHARACTERS:
            raise DataError(
                f"{folder} holds {dataset.n_classes} characters, expected {_CHARACTERS}. Fetch "
                "both halves again, or add a split of your own as "
                "splits_vinyals/{train,val,test}.txt."
            )
        origin = "the split of Vinyals et al."
        split = to_split(
            own if lists else [origin] * len(own), lists or _published(), dataset.class_names
        )
        return replace(dataset, standard=split)


def _published() -> dict[str, list[str]]:
    return {
        part: [f"{alphabet}/character{n:02}" for alphabet, ns in alphabets.items() for n in ns]
        for part, alphabets in packaged("omniglot").items()
    }


def _place(folder: Path, half: str) -> Path:
    """Return the zip file of `half`, such as "images_background", or its unpacked folder."""
    for path in (folder / f"{half}.zip", folder / half):
        if path.exists():
            return path
    raise DataError(
        f"omniglot: {folder / half}.zip is missing. Put the file {half}.zip into {folder}, or run "
        f"`fedshot data get omniglot --data-dir {typed(folder.parent)}`."
    )


def _build(places: Sequence[Path], size: int, put: Put) -> Labels:
    with ExitStack() as stack:
        halves = [stack.enter_context(opened(place)) for place in places]
        members = [member for half in halves for member in _drawings(half)]
        members.sort(key=lambda member: (member.class_name, member.archive.path, member.name))
        names = tuple(dict.fromkeys(member.class_name for member in members))
        convert = partial(_decode, size=size)
        return put_images(put, members, names, (size, size, 1), convert, where=places[0])


def _drawings(archive: Archive) -> list[Member]:
    matches = [_MEMBER.fullmatch(name) for name in archive.names]
    found = [Member(match[1], archive, match[0]) for match in matches if match]
    if not found:
        raise DataError(
            f"{archive.path} holds no drawings; expected members such as "
            "images_background/Greek/character01/0394_01.png. Download the file again."
        )
    return found


def _decode(data: bytes, name: str, size: int) -> Pixels:
    with open_image(data, name, ("PNG",)) as image:
        if image.width * image.height > _MAX_PIXELS:
            raise DataError(f"image {name} is {image.size}; drawings are 105 x 105 pixels")
        check_image(image, name)
        paper = image.convert("L").resize((size, size), Image.Resampling.BOX)
        return 255 - np.asarray(paper)[:, :, None]
