"""The interface of a data source, and functions that the sources of images share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from fedshot.core.errors import DataError
from fedshot.data.dataset import Dataset, Pixels, check_classes
from fedshot.data.files.archives import Archive
from fedshot.data.files.cache import Labels, Put
from fedshot.data.files.images import decoded
from fedshot.data.files.places import OPTION, default_data_dir
from fedshot.data.sources.publishers import PUBLISHERS


class Source(Protocol):
    """Interface of a data source; its fields are its options."""

    def load(self, data_dir: Path | None) -> Dataset:
        """Read the data; `data_dir` is the folder of downloaded datasets, or None if there is none.

        Raises DataError if the data are missing or damaged.
        """

    def load_raw(self, data_dir: Path | None) -> Dataset:
        """Read the data for an encoder: texts are not tokenised and need no word vectors."""
        return self.load(data_dir)


def dataset_folder(data_dir: Path | None, source: str, wanted: str) -> Path:
    """Return the folder of a dataset below the data folder.

    Raises DataError if there is no data folder; `wanted` names the files that belong there.
    """
    folder = PUBLISHERS[source].folder
    if data_dir is None:
        raise DataError(
            f"{source} needs a data folder and none is given. Set $FEDSHOT_DATA, or {OPTION}, to "
            f"the folder that holds {folder}/ with {wanted}; the default, {default_data_dir()}, "
            "does not exist. `fedshot data get` downloads the datasets that allow it, and explains "
            "how to get the others."
        )
    return data_dir / folder


def find_images(folder: Path, source: str, file: str | None, known: tuple[str, ...]) -> Path | None:
    """Return the file or folder of images in a dataset's folder, or None.

    It is `file` if given, else the first of `known` that exists, else the only .zip. Raises
    DataError if `file` does not exist, or if there are several .zip files to choose from.
    """
    if file is not None:
        if not (folder / file).exists():
            raise DataError(f"{source}: {folder / file} does not exist. Correct `file`.")
        return folder / file
    for name in known:
        if (folder / name).exists():
            return folder / name
    zips = sorted(folder.glob("*.zip"))
    if len(zips) > 1:
        raise DataError(
            f"{source}: {folder} holds {', '.join(z.name for z in zips)}. Choose one with `file`."
        )
    return zips[0] if zips else None


class Member(NamedTuple):
    """An image file in an archive, and its class."""

    class_name: str
    archive: Archive
    name: str


def put_images(
    put: Put,
    members: Sequence[Member],
    class_names: tuple[str, ...],
    shape: tuple[int, int, int],
    convert: Callable[[bytes, str], Pixels],
    *,
    where: Path,
    fix: str = "Fetch the file again.",
) -> Labels:
    """Decode images into the cache; return their labels. Raises DataError for an empty class.

    Args:
        put: writes images to the cache, given the shape of all images and the images in blocks.
        members: the images, in the order of the dataset.
        class_names: class names of the dataset.
        shape: (height, width, channels) of every image.
        convert: returns an image, given its bytes and a name for errors.
        where: the archive or folder that errors name.
        fix: the last sentence of the error for an empty class.
    """
    numbers = {name: c for c, name in enumerate(class_names)}
    y = np.array([numbers[member.class_name] for member in members], dtype=np.int64)
    check_classes(where, "images", y, class_names, fix)
    files = [(member.archive, member.name) for member in members]
    put((len(files), *shape), decoded(files, shape, convert))
    return Labels(y, class_names)
