"""Files of hosts whose data never lay in one place: each packs what it holds itself.

What they have in common is the configuration. Its split names every class, and in the order of
these names the classes are numbered on all hosts, whichever of them a host has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fedshot.config import Config
from fedshot.data import Dataset, Partition, Rows, Tokens, unable
from fedshot.data.dataset import first_twice
from fedshot.deploy.flower.exams import ExamSetting, write_tests
from fedshot.deploy.flower.shards import write_client
from fedshot.errors import ConfigError, DataError, nearest

_RANGE = re.compile(r"[0-9]{1,9}-[0-9]{1,9}")
_PARTS = ("base", "validation", "novel")


@dataclass(frozen=True)
class Classes:
    """All classes that the hosts speak of: their names, in order, and the numbers of each part."""

    names: tuple[str, ...]
    base: tuple[int, ...]
    validation: tuple[int, ...]
    novel: tuple[int, ...]

    @classmethod
    def of(cls, config: Config) -> Classes:
        """Return the classes of a configuration.

        Raises ConfigError for a split that does not name them, or has no novel ones.
        """
        split = config.split
        if split.random is not None or split.users is not None:
            raise ConfigError(
                f"split.{'random' if split.random is not None else 'users'} is set, which draws "
                "from data in one place. Name the classes in split.base and split.novel."
            )
        parts = {part: tuple(map(str, getattr(split, part))) for part in _PARTS}
        for part in ("base", "novel"):
            if not parts[part]:
                raise ConfigError(
                    f"split.{part} names no class. Each host has some classes alone, so the "
                    "configuration must name all of them, in split.base, split.validation and "
                    "split.novel."
                )
        names = tuple(sorted(chain(*parts.values())))
        for name in names:
            if _RANGE.fullmatch(name):
                raise ConfigError(
                    f"the split has the range {name!r}, which a host that has some classes alone "
                    "would count in its own way. Write out the names."
                )
        twice = first_twice(names)
        if twice is not None:
            raise ConfigError(f"the split names class {twice!r} twice. Remove it from one place.")
        numbers = {name: c for c, name in enumerate(names)}
        return cls(names, *(tuple(sorted(numbers[n] for n in parts[part])) for part in _PARTS))

    def numbered(self, dataset: Dataset) -> tuple[Dataset, list[str]]:
        """Return the examples of these classes under their common numbers.

        The texts say what is passed over. Raises DataError when nothing is left.
        """
        numbers = {name: c for c, name in enumerate(self.names)}
        common = np.array([numbers.get(name, -1) for name in dataset.class_names], np.int64)
        counts = np.bincount(dataset.y, minlength=dataset.n_classes)
        strange = [c for c in np.flatnonzero(common < 0).tolist() if counts[c]]
        told = [
            f"passed over: {counts[c]} examples of {dataset.class_names[c]!r}, which the split "
            f"does not name. {nearest(dataset.class_names[c], self.names)}"
            for c in strange
        ]
        rows = np.flatnonzero(common[dataset.y] >= 0)
        if not len(rows):
            raise DataError(
                f"{dataset.name} has no example of a class that the split names. "
                f"{told[0] if told else ''}".strip()
            )
        x = dataset.x.only(rows) if isinstance(dataset.x, Tokens) else dataset.x[rows]
        return Dataset(dataset.name, x, common[dataset.y[rows]], self.names), told


def pack_client(folder: Path, config: Config, dataset: Dataset, client: int) -> list[str]:
    """Write the file of a client who holds the base classes' examples of a dataset.

    Returns:
        What a person should know.

    Raises:
        ConfigError: a split that does not name the classes, or a client that is not one of them.
        DataError: too little for one of its episodes.
    """
    n = _clients(config)
    if not 0 <= client < n:
        raise ConfigError(
            f"--client is {client}; partition.clients is {n}, so that clients are 0..{n - 1}."
        )
    classes = Classes.of(config)
    dataset, told = classes.numbered(dataset)
    rows = dataset.images_of(classes.base)
    others = len(dataset) - len(rows)
    if others:
        told.append(f"passed over: {others} examples of validation and novel classes")
    if not len(rows):
        raise DataError(f"{dataset.name} has no example of a base class. {' '.join(told)}")
    lacking = unable(dataset, Partition.of([rows]), config.episode, divides=config.divides)
    if lacking:
        raise DataError(
            f"client {client} cannot form a {config.episode} episode: it {lacking[0]}. "
            f"{' '.join([*told, ''])}Lower episode.way, episode.shot or episode.query on all "
            "hosts, or do without this client."
        )
    held = len(np.unique(dataset.y[rows]))
    write_client(folder, dataset, rows, client)
    return [*told, f"client {client}: {len(rows)} examples of {held} base classes"]


def pack_tests(folder: Path, config: Config, dataset: Dataset) -> list[str]:
    """Write what a server needs, of a dataset with validation and novel classes.

    Returns what a person should know. Raises as `pack_client`.
    """
    n, classes = _clients(config), Classes.of(config)
    dataset, told = classes.numbered(dataset)
    rows = Rows(*(dataset.images_of(getattr(classes, part)) for part in _PARTS))
    for part in ("validation", "novel"):
        _check_there(dataset, getattr(classes, part), part)
    if len(rows.base):
        told.append(f"passed over: {len(rows.base)} examples of base classes")
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as tried:  # tests that cannot be are refused here
        for to in (Path(tried), folder):
            write_tests(to, dataset, rows, classes.base, n, {"dataset": dataset.digest})
            ExamSetting(config, str(to))
    seen = [f"{len(getattr(rows, part))} of {part} classes" for part in ("validation", "novel")]
    return [*told, f"tests for {n} clients: {' and '.join(seen)}"]


def _check_there(dataset: Dataset, classes: Iterable[int], part: str) -> None:
    held = np.bincount(dataset.y, minlength=dataset.n_classes)
    for c in classes:
        if not held[c]:
            raise DataError(
                f"{dataset.name} has no example of {dataset.class_names[c]!r}, which split.{part} "
                "names. Bring some, or take the class out of the split, on all hosts."
            )


def _clients(config: Config) -> int:
    """Return how many clients there are on all hosts. Raises ConfigError where nothing says so."""
    kind = config.settings["partition"]["name"]
    found = getattr(config.partition, "clients", None)
    if kind == "redealt" or not isinstance(found, int):
        raise ConfigError(
            f"partition.name is {kind!r}; clients on hosts hold what they hold. Set partition.name "
            "to 'iid', which deals nothing here, and partition.clients to the number of clients on "
            "all hosts."
        )
    return found
