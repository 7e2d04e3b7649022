"""The published class splits of few-shot image sets, as lists of class names.

Facts, not files: a person who has only the publisher's images needs no second download. Lists that
lie beside the data win over these. Sources of the lists:

- omniglot.json: Vinyals et al. 2016 without rotations, as in renmengye/few-shot-ssl-public.
- cifar100.json: FC100 (Oreshkin et al. 2018, by superclass) and CIFAR-FS (Bertinetto et al. 2019).
- mini_imagenet.json: Ravi and Larochelle 2017.
- tiered_imagenet.json: Ren et al. 2018.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fedshot.core.errors import DataError, nearest
from fedshot.core.regular_files import read_regular
from fedshot.data.class_split import ClassSplit

_LARGEST = 1 << 26  # bytes of a list; the longest has 3e7
PARTS = ("base", "validation", "novel")
PUBLISHED = ("train", "val", "test")  # the same three in the words of the published files


def packaged(name: str) -> dict[str, Any]:
    """Return the contents of one of the JSON files of this folder."""
    text = resources.files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def beside(paths: Sequence[Path]) -> bool:
    """Return whether the three split files are there; some without the others is an error."""
    there = [path.is_file() for path in paths]
    if any(there) and not all(there):
        missing = paths[there.index(False)]
        raise DataError(
            f"{missing} is missing, though {paths[there.index(True)]} is there. Put the file "
            f"{missing.parent.name}/{missing.name} into {missing.parent.parent}, or remove the "
            "others to use the published split."
        )
    return all(there)


def read_text(path: Path) -> str:
    """Return a small text file's content, or raise a DataError that names it."""
    try:
        return read_regular(path, _LARGEST).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text ({error}). Fetch it again.") from error


def to_split(
    where: object,
    lists: Mapping[str, Iterable[str]],
    class_names: Sequence[str],
    counts: tuple[int, int, int] | None = None,
) -> ClassSplit:
    """Return the split told by three lists of names; `counts` is how many each must have.

    `where` is what an error names: one thing for all, or the three files.
    """
    places = where if isinstance(where, list) else [where] * len(PARTS)
    numbers = {name: c for c, name in enumerate(class_names)}
    parts: list[tuple[int, ...]] = []
    for i, part in enumerate(PARTS):
        names = list(lists[part])
        if counts is not None and len(set(names)) != counts[i]:
            raise DataError(
                f"{places[i]} lists {len(set(names))} {part} classes; expected {counts[i]}. Fetch "
                "the split again, or remove it to use the published one."
            )
        for name in names:
            if name not in numbers:
                raise DataError(
                    f"{places[i]} names {name!r}, of which the data hold no image. "
                    f"{nearest(name, numbers)} Fetch the split and the data again."
                )
        parts.append(tuple(sorted(numbers[name] for name in names)))
    return ClassSplit(*parts)
