"""Client and test files for data that are spread over hosts: each host writes its own files.

All hosts share one configuration. Its split names every class, and all hosts number the classes in
the sorted order of these names, even if a host lacks some of the classes.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fedshot.config.load import Config
from fedshot.core.errors import ConfigError, DataError
from fedshot.core.text import count
from fedshot.data.class_split import RowSplit
from fedshot.data.dataset import Dataset, first_twice
from fedshot.data.partitions.partition import Partition, infeasible_clients
from fedshot.data.tokens import Tokens
from fedshot.deploy.flower.data_files import ServerTestRun, kind_of, write_client, write_tests
from fedshot.deploy.flower.server_folder import make_private_folder

_RANGE = re.compile(r"[0-9]{1,9}-[0-9]{1,9}")
_PARTS = ("base", "validation", "novel")
_MAX_NAMED = 5  # unknown classes that are named in the report


@dataclass(frozen=True)
class Classes:
    """The classes of all hosts: sorted names, and sorted class numbers by part of the split."""

    names: tuple[str, ...]
    parts: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, config: Config) -> Classes:
        """Return the classes of a configuration.

        Raises ConfigError if the split does not name its classes, or lacks base or novel classes.
        """
        split = config.split
        if split.random is not None or split.users is not None:
            raise ConfigError(
                f"split.{'random' if split.random is not None else 'users'} is set, which needs "
                "the data in one place. Name the classes in split.base and split.novel."
            )
        parts = {part: tuple(map(_plain, getattr(split, part))) for part in _PARTS}
        for part in ("base", "novel"):
            if not parts[part]:
                raise ConfigError(
                    f"split.{part} names no class. A host may lack some classes, so the "
                    "configuration must name all of them, in split.base, split.validation and "
                    "split.novel."
                )
        names = tuple(sorted(chain(*parts.values())))
        for name in names:
            if _RANGE.fullmatch(name):
                raise ConfigError(
                    f"the split has {name!r}, a range, which depends on the classes that a host "
                    "has. Write out the names; a class of this name must be renamed."
                )
        twice = first_twice(names)
        if twice is not None:
            raise ConfigError(f"the split names class {twice!r} twice. Remove it from one place.")
        numbers = {name: c for c, name in enumerate(names)}
        return cls(names, {part: tuple(sorted(numbers[n] for n in parts[part])) for part in _PARTS})

    def of_part(self, dataset: Dataset, parts: Sequence[str]) -> tuple[Dataset, list[str]]:
        """Return the examples of these parts of the split, and remarks for the user.

        In the returned dataset, the number of a class is its position in `self.names`. The remarks
        say, for example, which examples are skipped. Raises DataError if no example is left.
        """
        numbers = {name: c for c, name in enumerate(self.names)}
        common = np.array([numbers.get(_plain(n), -1) for n in dataset.class_names], np.int64)
        wanted = np.isin(common, list(chain(*(self.parts[part] for part in parts))))
        rows = np.flatnonzero(wanted[dataset.y])
        remarks = self._remarks(dataset, common, wanted)
        if not len(rows):
            meant = " or ".join(f"split.{part}" for part in parts)
            raise DataError(
                " ".join([f"{dataset.name} has no example of a class of {meant}.", *remarks])
            )
        groups = None if dataset.groups is None else dataset.groups[rows]
        x = dataset.x.only(rows) if isinstance(dataset.x, Tokens) else dataset.array[rows]
        how = dataset.encoding and replace(dataset.encoding, original=None)
        y = common[dataset.y[rows]]
        return Dataset(dataset.name, x, y, self.names, groups=groups, encoding=how), remarks

    def _remarks(self, dataset: Dataset, common: np.ndarray, wanted: np.ndarray) -> list[str]:
        counts = np.bincount(dataset.y, minlength=dataset.n_classes)
        unknown = np.flatnonzero((common < 0) & (counts > 0)).tolist()
        remarks = [f"{dataset.name}: {remark}." for remark in dataset.remarks]
        remarks += [
            self._skipped(dataset.class_names[c], int(counts[c])) for c in unknown[:_MAX_NAMED]
        ]
        if unknown[_MAX_NAMED:]:
            more = count(int(counts[unknown[_MAX_NAMED:]].sum()), "example")
            classes = count(len(unknown) - _MAX_NAMED, "other class", "other classes")
            remarks.append(f"Skipped: {more} of {classes} that the split does not name.")
        others = int(counts[(common >= 0) & ~wanted].sum())
        if others:
            remarks.append(f"Skipped: {count(others, 'example')} of the split's other classes.")
        if all(name.isdigit() for name in dataset.class_names):
            remarks.append(
                f"Classes are identified by name, and those of {dataset.name} are numbers: each "
                "number must mean the same class on all hosts."
            )
        return remarks

    def _skipped(self, name: str, n: int) -> str:
        close = difflib.get_close_matches(_plain(name), self.names, 1, 0.75)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        what = f"{count(n, 'example')} of {name!r}"
        return f"Skipped: {what}, which the split does not name.{hint}"


def pack_client(
    folder: Path, config: Config, dataset: Dataset, client: int, notes: Mapping[str, str] = {}
) -> list[str]:
    """Write the file of a client, with the dataset's examples of base classes.

    Args:
        folder: folder of the file.
        config: the configuration of all hosts.
        dataset: data of this host.
        client: id of the client.
        notes: further metadata that must be equal in the files of all hosts.

    Returns:
        Remarks for the user; the last one is a summary.

    Raises:
        ConfigError: the split does not name the classes, or there is no such client.
        DataError: the data are too few for an episode.
    """
    n = _clients(config)
    if not 0 <= client < n:
        raise ConfigError(
            f"--client is {client}; partition.clients is {n}, so clients are 0..{n - 1}."
        )
    dataset, remarks = Classes.of(config).of_part(dataset, ["base"])
    rows = np.arange(len(dataset), dtype=np.int64)
    lacking = infeasible_clients(
        dataset, Partition.of([rows]), config.training_episode, divides=config.divides
    )
    if lacking:
        refused = f"client {client} cannot form {config.episode.whole_text}: it {lacking[0]}."
        fix = (
            "Lower episode.way, episode.shot or episode.query on all hosts; or lower "
            "partition.clients, renumber the other clients, and pack everything again."
        )
        raise DataError(" ".join([refused, *remarks, fix]))
    held = count(len(np.unique(dataset.y)), "base class", "base classes")
    make_private_folder(folder)
    write_client(folder, dataset, rows, client, kind_of(dataset) | dict(notes))
    return [*remarks, f"client {client}: {count(len(rows), 'example')} of {held}"]


def pack_tests(
    folder: Path, config: Config, dataset: Dataset, notes: Mapping[str, str] = {}
) -> list[str]:
    """Write the server's test data, with the dataset's examples of validation and novel classes.

    The return value and errors are those of `pack_client`.
    """
    n, classes = _clients(config), Classes.of(config)
    dataset, remarks = classes.of_part(dataset, ["validation", "novel"])
    held = np.bincount(dataset.y, minlength=dataset.n_classes)
    for part in ("validation", "novel"):
        for c in classes.parts[part]:
            if not held[c]:
                raise DataError(
                    f"{dataset.name} has no example of {classes.names[c]!r}, which split.{part} "
                    "names. Add some, or remove the class from the split on all hosts."
                )
    rows = RowSplit(*(dataset.images_of(classes.parts[part]) for part in _PARTS))
    notes = {"dataset": dataset.digest, **notes}
    with TemporaryDirectory() as trial:  # raises an error if the tests cannot be formed
        write_tests(Path(trial), dataset, rows, classes.parts["base"], n, notes)
        ServerTestRun(config, trial)
    make_private_folder(folder)
    write_tests(folder, dataset, rows, classes.parts["base"], n, notes)
    seen = [f"{count(len(part), 'example')} of {name} classes"
            for part, name in ((rows.validation, "validation"), (rows.novel, "novel"))]  # fmt: skip
    return [*remarks, f"tests for {count(n, 'client')}: {' and '.join(seen)}"]


def _plain(name: str) -> str:
    # NFC makes a letter and its accent one character.
    return unicodedata.normalize("NFC", str(name))


def _clients(config: Config) -> int:
    """Return the number of clients on all hosts.

    Raises ConfigError for a partition that has no number of clients or changes every round.
    """
    kind = config.settings["partition"]["name"]
    found = getattr(config.partition, "clients", None)
    if kind == "resampled" or not isinstance(found, int):
        raise ConfigError(
            f"partition.name is {kind!r}; the clients' data are already on their hosts. Set "
            "partition.name to 'iid', which moves no data here, and partition.clients to the "
            "number of clients on all hosts."
        )
    return found
