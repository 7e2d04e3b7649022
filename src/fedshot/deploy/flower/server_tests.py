"""A server without the training data: the tests, and who there is.

    tests.safetensors   the rows to choose the round and to test on, with their samples and labels

Its notes tell the classes, the number of clients, and those that cannot form an episode. Rows of a
dataset that is dealt keep their numbers, so tests have the episodes and the hash that they have on
all of it; in the place of what the clients hold stand black images or empty texts that nothing
looks at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedshot.config.load import Config
from fedshot.core import storage
from fedshot.core.errors import DataError
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.row_split import RowSplit
from fedshot.data.partitions.partition import ClientSplit, Partition
from fedshot.data.tokens import Tokens
from fedshot.deploy.flower.shards import kind_of, samples_of
from fedshot.runs.prepare import FederatedDataset, PreparedRun

_FILE = "tests.safetensors"
_NONE = np.zeros(0, np.int64)


def write_server_tests(folder: Path, arranged: FederatedDataset) -> None:
    """Write the part of a dataset that a server needs.

    Raises DataError where clients are tested on images of their own, which no server has.
    """
    if arranged.own_tests:
        raise DataError(
            "the split has no novel classes: clients are tested on images of their own, and a "
            "server without these can ask nothing. Start it on the whole dataset, with --data-dir."
        )
    train = arranged.deal.train
    left_out = {str(client): reason for client, reason in arranged.left_out.items()}
    notes = {"dataset": arranged.dataset.digest, "deal": train.digest, "left_out": left_out}
    write_tests(folder, arranged.dataset, arranged.rows, arranged.base_classes, len(train), notes)


def write_tests(
    folder: Path,
    dataset: Dataset,
    rows: RowSplit,
    base: Sequence[int],
    clients: int,
    notes: Mapping[str, Any],
) -> None:
    """Write the samples that a server tests on, and who there is.

    Args:
        folder: where to.
        dataset: of which the rows for validation and test are written, and no others.
        rows: of the dataset.
        base: numbers of the classes that clients train on, of which the dataset may have none.
        clients: how many.
        notes: the hash of the dataset and, where there is one, of its deal, and who is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seen = np.union1d(rows.validation, rows.novel)
    arrays = samples_of(dataset, seen)
    arrays |= {"rows": seen, "validation": rows.validation, "novel": rows.novel}
    told = kind_of(dataset) | {
        "deal": "",
        "left_out": {},
        "samples": len(dataset),
        "base": list(base),
        "clients": clients,
        **notes,
    }
    content = {name: torch.from_numpy(array) for name, array in arrays.items()}
    storage.write(folder / _FILE, content, told, sync=True)


class ServerTestRun(PreparedRun):
    """A setting whose training data are elsewhere.

    Raises:
        DataError: the folder does not hold the tests.
        ConfigError: as `PreparedRun`.
    """

    def __init__(self, config: Config, folder: str) -> None:
        super().__init__(config, folder)

    def _arrange(self, config: Config, data_dir: str | None) -> None:
        del config
        path = Path(data_dir or ".") / _FILE
        if not path.is_file():
            raise DataError(f"{path} does not exist. `fedshot flower deal` writes it, or `pack`.")
        flat, notes, _ = storage.read(path)
        found = {name: leaf.numpy() for name, leaf in flat.items()}
        try:
            self._base = tuple(int(c) for c in notes["base"])
            self.dataset = _whole(found, notes)
            self.rows = RowSplit(_NONE, found["validation"], found["novel"])
            self.deal = ClientSplit(Partition.of([_NONE] * int(notes["clients"])))
            self.left_out = {int(client): str(why) for client, why in notes["left_out"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{path} lacks what it must hold: {error!r}. Write it again, by "
                "`fedshot flower deal` or `pack`."
            ) from None
        self.split, self.own_tests = None, False
        agreed = ("name", "class_names", "shape", "dataset", "deal", "words")
        self.notes = {name: notes[name] for name in agreed if name in notes}
        self.clients = [c for c in range(len(self.deal.train)) if c not in self.left_out]

    @cached_property
    def deal_digest(self) -> str:
        """The SHA-256 of who holds what; "" where each host packed its own."""
        return str(self.notes.get("deal", ""))

    @property
    def base_classes(self) -> tuple[int, ...]:
        """The numbers of the classes that the clients train on."""
        return self._base


def _whole(found: dict[str, Any], notes: dict[str, Any]) -> Dataset:
    """Return a dataset of all rows, of which those that are tested hold something."""
    n, rows = int(notes["samples"]), found["rows"]
    y = np.full(n, notes["base"][0], dtype=np.int64)
    y[rows] = found["y"]
    if "table" in found:
        sizes = np.zeros(n, np.int64)
        sizes[rows] = np.diff(found["offsets"])
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        x: Any = Tokens(found["ids"], offsets, found["table"], int(notes["cut"]))
    else:
        x = np.zeros((n, *found["x"].shape[1:]), dtype=np.uint8)
        x[rows] = found["x"]
    names = tuple(map(str, notes["class_names"]))
    return Dataset(str(notes["name"]), x, y, names, known_digest=str(notes["dataset"]))
