"""The published class splits of few-shot image datasets, as lists of class names.

The lists are part of fedshot, so that a user needs only the publisher's images. Lists beside the
data replace them. Sources of the lists:

- omniglot.json: Vinyals et al. 2016 without rotations, as in renmengye/few-shot-ssl-public.
- cifar100.json: FC100 (Oreshkin et al. 2018, by superclass) and CIFAR-FS (Bertinetto et al. 2019).
- mini_imagenet.json: Ravi and Larochelle 2017.
- tiered_imagenet.json: Ren et al. 2018.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fedshot.core.errors import DataError, nearest
from fedshot.core.regular_files import read_regular
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import first_twice

_LIMIT = 1 << 26  # bytes of a list; the longest has 3e7
PARTS = ("base", "validation", "novel")
PUBLISHED = ("train", "val", "test")  # the names of the same parts in the published files


def packaged(name: str) -> dict[str, Any]:
    """Return the content of `name`.json, a file of class lists that comes with fedshot."""
    text = resources.files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def all_exist(paths: Sequence[Path]) -> bool:
    """Whether the three split files exist. Raises DataError if only some of them do."""
    there = [path.is_file() for path in paths]
    if any(there) and not all(there):
        missing = paths[there.index(False)]
        raise DataError(
            f"{missing} is missing, though {paths[there.index(True)]} is there. Put the file "
            f"{missing.parent.name}/{missing.name} into {missing.parent.parent}, or remove the "
            "others to use the published split."
        )
    return all(there)


def read_split_files(
    paths: Sequence[Path], counts: Sequence[int | None] = (None, None, None)
) -> dict[str, list[str]] | None:
    """Return part -> class names from the three split files, or None if they do not exist.

    A .csv file has the class names in its first column; other files separate them by whitespace.
    `counts` are the numbers of classes that the files must list, if known.
    """
    if not all_exist(paths):
        return None
    lists: dict[str, list[str]] = {}
    for part, path, count in zip(PARTS, paths, counts, strict=True):
        text = read_text(path)
        is_csv = path.suffix == ".csv"
        names = [row[0] for row in csv_rows_of(path, text)] if is_csv else text.split()
        twice = first_twice(names)
        if twice is not None:
            raise DataError(
                f"{path} lists class {twice!r} twice; expected each class once. Fetch the lists of "
                "the split again, or remove the three to use the published one."
            )
        check_count(path, part, names, count)
        lists[part] = names
    return lists


def csv_rows_of(where: object, text: str) -> list[list[str]]:
    """Return the nonempty rows of a csv text; errors name `where`, the file it comes from."""
    try:
        return [row for row in csv.reader(text.splitlines()) if row]
    except csv.Error as error:
        raise DataError(f"{where} is not a csv file ({error}). Fetch it again.") from error


def check_count(where: object, part: str, names: Collection[str], expected: int | None) -> None:
    """Raise DataError if a list of classes does not have the expected length."""
    if expected is not None and len(names) != expected:
        raise DataError(
            f"{where} lists {len(names)} {part} classes; expected {expected}. Fetch the lists of "
            "the split again, or remove the three to use the published one."
        )


def read_text(path: Path) -> str:
    """Return the content of a text file. Raises DataError if it cannot be read."""
    try:
        return read_regular(path, _LIMIT).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text ({error}). Fetch it again.") from error


def to_split(
    places: Sequence[object], lists: Mapping[str, Iterable[str]], class_names: Sequence[str]
) -> ClassSplit:
    """Return the class split given by three lists of names.

    Args:
        places: the origin of each list, such as its file, for error messages.
        lists: part -> class names.
        class_names: class names of the dataset.

    Raises DataError if a list names a class that the dataset does not have.
    """
    numbers = {name: c for c, name in enumerate(class_names)}
    for place, part in zip(places, PARTS, strict=True):
        for name in lists[part]:
            if name not in numbers:
                raise DataError(
                    f"{place} names class {name!r}, of which the data has no image. "
                    f"{nearest(name, numbers)} Fetch the split and the data again."
                )
    return ClassSplit(*(tuple(sorted(numbers[name] for name in lists[part])) for part in PARTS))
