"""Files of hosts whose data never lay in one place: each packs what it holds itself.

What they have in common is the configuration. Its split names every class, and in the order of
these names the classes are numbered on all hosts, whichever of them a host has.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fedshot.config.load import Config
from fedshot.core.errors import ConfigError, DataError
from fedshot.core.text import count
from fedshot.data.dataset import Dataset, first_twice
from fedshot.data.episodes.row_split import RowSplit
from fedshot.data.partitions.partition import Partition, infeasible_clients
from fedshot.data.tokens import Tokens
from fedshot.deploy.flower.server_folder import own_folder
from fedshot.deploy.flower.server_tests import ServerTestRun, write_tests
from fedshot.deploy.flower.shards import kind_of, write_client

_RANGE = re.compile(r"[0-9]{1,9}-[0-9]{1,9}")
_PARTS = ("base", "validation", "novel")
_FEW = 5  # classes that are told by name


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
        parts = {part: tuple(map(_plain, getattr(split, part))) for part in _PARTS}
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
                    f"the split has {name!r}, a range, which a host that has some classes alone "
                    "would count in its own way. Write out the names; a class that is called so "
                    "needs another name."
                )
        twice = first_twice(names)
        if twice is not None:
            raise ConfigError(f"the split names class {twice!r} twice. Remove it from one place.")
        numbers = {name: c for c, name in enumerate(names)}
        return cls(names, *(tuple(sorted(numbers[n] for n in parts[part])) for part in _PARTS))

    def of_part(self, dataset: Dataset, parts: Sequence[str]) -> tuple[Dataset, list[str]]:
        """Return the examples of these parts' classes, under their common numbers.

        The texts say what is passed over. Raises DataError when nothing is left.
        """
        numbers = {name: c for c, name in enumerate(self.names)}
        common = np.array([numbers.get(_plain(n), -1) for n in dataset.class_names], np.int64)
        wanted = np.isin(common, list(chain(*(getattr(self, part) for part in parts))))
        rows = np.flatnonzero(wanted[dataset.y])
        told = self._passed_over(dataset, common, wanted)
        if not len(rows):
            meant = " or ".join(f"split.{part}" for part in parts)
            raise DataError(
                " ".join([f"{dataset.name} has no example of a class of {meant}.", *told])
            )
        groups = None if dataset.groups is None else dataset.groups[rows]
        x = dataset.x.only(rows) if isinstance(dataset.x, Tokens) else dataset.x[rows]
        return Dataset(dataset.name, x, common[dataset.y[rows]], self.names, groups=groups), told

    def _passed_over(self, dataset: Dataset, common: np.ndarray, wanted: np.ndarray) -> list[str]:
        """Say which examples are left out, by class where the split does not know that."""
        counts = np.bincount(dataset.y, minlength=dataset.n_classes)
        strange = np.flatnonzero((common < 0) & (counts > 0)).tolist()
        told = [f"{dataset.name}: {remark}." for remark in dataset.remarks]
        told += [self._strange(dataset.class_names[c], int(counts[c])) for c in strange[:_FEW]]
        if strange[_FEW:]:
            more = count(int(counts[strange[_FEW:]].sum()), "example")
            classes = count(len(strange) - _FEW, "other class", "other classes")
            told.append(f"Passed over: {more} of {classes} that the split does not name.")
        others = int(counts[(common >= 0) & ~wanted].sum())
        if others:
            told.append(f"Passed over: {count(others, 'example')} of the split's other classes.")
        if all(name.isdigit() for name in dataset.class_names):
            told.append(
                f"Classes are known by their names, and those of {dataset.name} are numbers: each "
                "must mean the same on all hosts."
            )
        return told

    def _strange(self, name: str, n: int) -> str:
        close = difflib.get_close_matches(_plain(name), self.names, 1, 0.75)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        what = f"{count(n, 'example')} of {name!r}"
        return f"Passed over: {what}, which the split does not name.{hint}"


def pack_client(
    folder: Path, config: Config, dataset: Dataset, client: int, notes: Mapping[str, str] = {}
) -> list[str]:
    """Write the file of a client who holds the base classes' examples of a dataset.

    Args:
        folder: where to.
        config: the one of all hosts.
        dataset: what this host holds.
        client: its number.
        notes: what all hosts' files must agree on besides classes and shape, by name.

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
    dataset, told = Classes.of(config).of_part(dataset, ["base"])
    rows = np.arange(len(dataset), dtype=np.int64)
    lacking = infeasible_clients(
        dataset, Partition.of([rows]), config.episode, divides=config.divides
    )
    if lacking:
        refused = f"client {client} cannot form {config.episode.whole_text}: it {lacking[0]}."
        fix = (
            "Lower episode.way, episode.shot or episode.query on all hosts; or lower "
            "partition.clients, number the others anew, and pack everything again."
        )
        raise DataError(" ".join([refused, *told, fix]))
    held = count(len(np.unique(dataset.y)), "base class", "base classes")
    own_folder(folder)
    write_client(folder, dataset, rows, client, kind_of(dataset) | dict(notes))
    return [*told, f"client {client}: {count(len(rows), 'example')} of {held}"]


def pack_tests(
    folder: Path, config: Config, dataset: Dataset, notes: Mapping[str, str] = {}
) -> list[str]:
    """Write what a server needs, of a dataset with validation and novel classes.

    Returns what a person should know. Raises as `pack_client`.
    """
    n, classes = _clients(config), Classes.of(config)
    dataset, told = classes.of_part(dataset, ["validation", "novel"])
    held = np.bincount(dataset.y, minlength=dataset.n_classes)
    for part in ("validation", "novel"):
        for c in getattr(classes, part):
            if not held[c]:
                raise DataError(
                    f"{dataset.name} has no example of {classes.names[c]!r}, which split.{part} "
                    "names. Bring some, or take the class out of the split, on all hosts."
                )
    rows = RowSplit(*(dataset.images_of(getattr(classes, part)) for part in _PARTS))
    notes = {"dataset": dataset.digest, **notes}
    with TemporaryDirectory() as tried:  # tests that cannot be are refused here
        write_tests(Path(tried), dataset, rows, classes.base, n, notes)
        ServerTestRun(config, tried)
    own_folder(folder)
    write_tests(folder, dataset, rows, classes.base, n, notes)
    seen = [f"{count(len(part), 'example')} of {name} classes"
            for part, name in ((rows.validation, "validation"), (rows.novel, "novel"))]  # fmt: skip
    return [*told, f"tests for {count(n, 'client')}: {' and '.join(seen)}"]


def _plain(name: str) -> str:
    """Return a name with each letter and its accent as one character, as people mean it."""
    return unicodedata.normalize("NFC", str(name))


def _clients(config: Config) -> int:
    """Return how many clients there are on all hosts, as the partition has it.

    Raises ConfigError for a partition that has no number of clients, or deals anew every round.
    """
    kind = config.settings["partition"]["name"]
    found = getattr(config.partition, "clients", None)
    if kind == "redealt" or not isinstance(found, int):
        raise ConfigError(
            f"partition.name is {kind!r}; clients on hosts hold what they hold. Set partition.name "
            "to 'iid', which deals no training data here, and partition.clients to the number of "
            "clients on all hosts."
        )
    return found
