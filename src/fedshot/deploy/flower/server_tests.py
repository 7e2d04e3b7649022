"""Test data for a server that does not have the training data.

    tests.safetensors   the rows for validation and test, with their samples and labels

Its metadata name the classes, the number of clients, and the clients that cannot form an episode.
Rows keep the numbers that they have in the whole dataset, so the test episodes and their hash are
the same as on the whole dataset. The clients' rows are filled with black images or empty texts,
which are never read.
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


def write_server_tests(folder: Path, federated: FederatedDataset) -> None:
    """Write the part of a dataset that a server needs.

    Raises DataError if clients are tested on their own examples, which the server would not have.
    """
    if federated.own_tests:
        raise DataError(
            "the split has no novel classes: clients are tested on their own examples, which a "
            "server without the dataset does not have. Start it with the whole dataset, with "
            "--data-dir."
        )
    train = federated.client_split.train
    left_out = {str(client): reason for client, reason in federated.left_out.items()}
    notes = {"dataset": federated.dataset.digest, "deal": train.digest, "left_out": left_out}
    write_tests(
        folder, federated.dataset, federated.rows, federated.base_classes, len(train), notes
    )


def write_tests(
    folder: Path,
    dataset: Dataset,
    rows: RowSplit,
    base: Sequence[int],
    clients: int,
    notes: Mapping[str, Any],
) -> None:
    """Write the samples that a server validates and tests on.

    Args:
        folder: folder of the file.
        dataset: only its rows for validation and test are written.
        rows: row numbers of the dataset, by part of the split.
        base: numbers of the classes that clients train on; the dataset may lack their examples.
        clients: number of clients.
        notes: further metadata, such as hashes of dataset and client split, or clients left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seen = np.union1d(rows.validation, rows.novel)
    arrays = samples_of(dataset, seen)
    arrays |= {"rows": seen, "validation": rows.validation, "novel": rows.novel}
    metadata = kind_of(dataset) | {
        "deal": "",
        "left_out": {},
        "samples": len(dataset),
        "base": list(base),
        "clients": clients,
        **notes,
    }
    content = {name: torch.from_numpy(array) for name, array in arrays.items()}
    storage.write(folder / _FILE, content, metadata, sync=True)


class ServerTestRun(PreparedRun):
    """A prepared run whose training data are on the nodes; `data_dir` holds the test data.

    Raises:
        DataError: the folder does not hold the test data.
        ConfigError: as `PreparedRun`.
    """

    def _load(self, config: Config, data_dir: str | None) -> None:
        del config
        path = Path(data_dir or ".") / _FILE
        if not path.is_file():
            raise DataError(f"{path} does not exist. `fedshot flower deal` writes it, or `pack`.")
        flat, notes, _ = storage.read(path)
        found = {name: leaf.numpy() for name, leaf in flat.items()}
        try:
            self._base = tuple(int(c) for c in notes["base"])
            self.dataset = _full_dataset(found, notes)
            self.rows = RowSplit(_NONE, found["validation"], found["novel"])
            self.client_split = ClientSplit(Partition.of([_NONE] * int(notes["clients"])))
            self.left_out = {int(client): str(why) for client, why in notes["left_out"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{path} is incomplete: {error!r}. Write it again with `fedshot flower deal` or "
                "`pack`."
            ) from None
        self.split, self.own_tests = None, False
        agreed = ("name", "class_names", "shape", "dataset", "deal", "words")
        self.notes = {name: notes[name] for name in agreed if name in notes}
        self.clients = [c for c in range(len(self.client_split.train)) if c not in self.left_out]

    @cached_property
    def partition_digest(self) -> str:
        """SHA-256 of the client split; "" if each host packed its own data."""
        return str(self.notes.get("deal", ""))

    @property
    def base_classes(self) -> tuple[int, ...]:
        """Numbers of the classes that the clients train on."""
        return self._base


def _full_dataset(found: dict[str, Any], notes: dict[str, Any]) -> Dataset:
    """Return a dataset of all rows; only the rows for validation and test hold samples."""
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
