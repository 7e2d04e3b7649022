"""The data files of a deployment: one for each client, and the server's test data.

    client-000004.safetensors   x uint8 [n, H, W, C] and y int64 [n]; for texts ids, offsets, table
    tests.safetensors           the same arrays for validation and test, and the rows' indices

The metadata of a client's file list all classes; a class has the same index on all nodes. If one
dataset was split into the files, the metadata also hold the hashes of the dataset and of the client
split. A server with the test data needs neither client files nor the dataset: rows keep their
indices in the whole dataset, so the test episodes and their hash are the same. The clients' rows
are filled with black images or empty texts, which are never read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedshot.config.load import Config
from fedshot.config.registry import difference
from fedshot.core import storage
from fedshot.core.errors import ConfigError, DataError
from fedshot.data.class_split import RowSplit
from fedshot.data.dataset import Dataset, Encoding, Ints
from fedshot.data.partitions.partition import ClientSplit, Partition
from fedshot.data.partitions.resampled import Pool
from fedshot.data.tokens import PADDING, Table, Tokens, Words
from fedshot.runs.dataset_info import DatasetInfo
from fedshot.runs.prepare import FederatedDataset, PreparedRun

_NAME = re.compile(r"client-(\d{6,})\.safetensors")
_TESTS = "tests.safetensors"
_NONE = np.zeros(0, np.int64)


def path_of(folder: Path, client: int) -> Path:
    """Return the path of a client's data file in a folder."""
    return folder / f"client-{client:06d}.safetensors"


def notes_of(dataset: Dataset, partition: Partition) -> dict[str, Any]:
    """Return the metadata that all files of a client split share."""
    return kind_of(dataset) | {"dataset": dataset.digest, "deal": partition.digest}


def kind_of(dataset: Dataset) -> dict[str, Any]:
    """Return the metadata that all files with the same classes and shape share.

    Raises DataError for a dataset with `groups` of nearly identical examples, such as frames of a
    video: client files cannot store the groups.
    """
    if dataset.groups is not None:
        raise DataError(
            f"{dataset.name} has groups, which client files do not support. Remove the groups from "
            "the data."
        )
    found = {
        "name": dataset.name,
        "class_names": list(dataset.class_names),
        "shape": list(dataset.shape),
    }
    if dataset.encoding is not None:
        found |= {"encoder": dataset.encoding.encoder, "original": list(dataset.encoding.shape)}
    return found | ({"cut": dataset.x.cut} if isinstance(dataset.x, Tokens) else {})


def shares_of(clients: Sequence[int], nodes: int) -> list[list[int]]:
    """Return the clients of each node. Raises ConfigError if a node would have no client."""
    shares = [[client for client in clients if client % nodes == i] for i in range(nodes)]
    if [] in shares:
        raise ConfigError(
            f"--nodes is {nodes}, and node {shares.index([])} would hold no client: there are "
            f"{len(clients)}. Choose fewer nodes."
        )
    return shares


def check_apart(folder: Path, shares: Sequence[Collection[int]]) -> None:
    """Raise ConfigError if a node's folder holds a client that is not in the node's share."""
    for node in sorted(folder.glob("node-*")):
        number = node.name.removeprefix("node-")
        share = shares[int(number)] if number.isdecimal() and int(number) < len(shares) else ()
        if others := sorted({*clients_in(node)} - {*share}):
            raise ConfigError(
                f"{path_of(node, others[0])} belongs to another client split, and two nodes would "
                f"hold the client. Write into another folder, or remove {node} first."
            )


def write_shards(
    folder: Path, dataset: Dataset, partition: Partition, clients: Collection[int]
) -> None:
    """Write the data file of each of these clients.

    Raises DataError for a partition that changes in every round.
    """
    if isinstance(partition, Pool):
        raise DataError(
            "partition.name is 'resampled', which redistributes the data in every round; clients "
            "on nodes keep their data. Set it to another, such as 'classes' or 'iid'."
        )
    notes = notes_of(dataset, partition)
    for client in clients:
        write_client(folder, dataset, partition[client], client, notes)


def write_client(
    folder: Path, dataset: Dataset, rows: Ints, client: int, metadata: Mapping[str, Any]
) -> None:
    """Write the data file of a client, which holds these rows of a dataset."""
    _write(path_of(folder, client), samples_of(dataset, rows), metadata)


def _write(path: Path, arrays: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {name: torch.from_numpy(array) for name, array in arrays.items()}
    storage.write(path, content, metadata, sync=True)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays and the metadata of a file."""
    content, metadata, _ = storage.read(path)
    return {name: leaf.numpy() for name, leaf in content.items()}, metadata


def samples_of(dataset: Dataset, rows: Ints) -> dict[str, Any]:
    """Return the examples of these rows as named arrays, in the format of a client's data file."""
    y = dataset.y[rows]
    if isinstance(dataset.x, Tokens):
        texts = dataset.x.only(rows).alone()
        return {"ids": texts.ids, "offsets": texts.offsets, "table": texts.table, "y": y}
    return {"x": np.ascontiguousarray(dataset.array[rows]), "y": y}


@dataclass(frozen=True)
class NodeData:
    """The data of a node: the samples of its clients."""

    dataset: Dataset
    partition: Partition  # clients of other nodes have no rows
    clients: tuple[int, ...]
    notes: Mapping[str, Any]


def clients_in(folder: Path) -> list[int]:
    """Return the clients that have a file in a folder."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("client-*"))
    return sorted(int(name[1]) for name in found if name)


def read_shards(folder: Path, clients: Sequence[int] | None = None) -> NodeData:
    """Read the files of these clients, or of all clients in a folder.

    Raises DataError if there is no file, a file is missing, or the metadata of two files differ.
    """
    present = clients_in(folder)
    wanted = present if clients is None else sorted(set(clients))
    if not wanted:
        raise DataError(
            f"{folder} holds no client: expected files such as {path_of(folder, 0).name}. "
            "`fedshot flower pack` writes them, or `partition` from one dataset."
        )
    if missing := sorted(set(wanted) - set(present)):
        raise DataError(
            f"{path_of(folder, missing[0])} does not exist. Copy it there, or leave the client out "
            "of --clients."
        )
    read = [_read(path_of(folder, client)) for client in wanted]
    parts, notes = [arrays for arrays, _ in read], read[0][1]
    for client, (_, other) in zip(wanted, read, strict=True):
        differing = [name for name in ("class_names", "shape", "deal", "cut", "words", "encoder")
                     if other.get(name) != notes.get(name)]  # fmt: skip
        if differing:
            raise DataError(
                f"{path_of(folder, client)} does not belong to the file of client {wanted[0]}: "
                f"{', '.join(differing)} differ. Write both with one `fedshot flower partition`, "
                "or pack them with one configuration."
            )
    try:
        dataset = _concatenate(parts, notes)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder}: a client's file is incomplete: {error}") from None
    rows, start = [_NONE] * (wanted[-1] + 1), 0
    for client, part in zip(wanted, parts, strict=True):
        rows[client] = np.arange(start, start + len(part["y"]), dtype=np.int64)
        start += len(part["y"])
    return NodeData(dataset, Partition.of(rows), tuple(wanted), notes)


def _concatenate(parts: Sequence[Mapping[str, Any]], notes: Mapping[str, Any]) -> Dataset:
    y = np.concatenate([part["y"] for part in parts])
    names = tuple(map(str, notes["class_names"]))
    if "table" in parts[0]:
        cut = int(notes["cut"])
        texts = [Tokens(part["ids"], part["offsets"], part["table"], cut) for part in parts]
        sizes = np.concatenate([[0], *(np.diff(one.offsets) for one in texts)])
        ids, table = _one_table(texts)
        x: Any = Tokens(ids, np.cumsum(sizes), table, cut)
    else:
        x = np.concatenate([part["x"] for part in parts])
    return Dataset(str(notes.get("name", "shards")), x, y, names)


def _one_table(texts: Sequence[Tokens]) -> tuple[Words, Table]:
    """Return the concatenated word ids, renumbered, and a table that holds each vector once."""
    rows = list(texts[0].table[: PADDING + 1])
    numbers: dict[bytes, int] = {}  # new ids of all vectors except the padding's
    ids = []
    for one in texts:
        renumbered = np.zeros(len(one.table), np.int32)
        for i, vector in enumerate(one.table[PADDING + 1 :], PADDING + 1):
            renumbered[i] = numbers.setdefault(vector.tobytes(), len(rows))
            if renumbered[i] == len(rows):
                rows.append(vector)
        ids.append(renumbered[one.ids])
    return np.concatenate(ids), np.stack(rows)


def write_server_tests(folder: Path, federated: FederatedDataset) -> None:
    """Write the part of a dataset that a server needs to validate and test.

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
    notes = {
        "dataset": federated.dataset.digest,
        "deal": train.digest,
        "left_out": left_out,
        "examples": len(federated.rows.base),
        "settings": _assigning(federated.config),
    }
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
        rows: row indices of the dataset, by part of the class split.
        base: class numbers of the base classes; the dataset may lack their examples.
        clients: number of clients.
        notes: further metadata, such as hashes of dataset and client split, or clients left out.
    """
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
    _write(folder / _TESTS, arrays, metadata)


class ServerTestRun(PreparedRun):
    """A prepared run whose training data are on the nodes; `data_dir` holds the test data.

    Raises:
        DataError: the folder does not hold the test data.
        ConfigError: the test data were written with other data, another split or partition, or
            another number of clients; or as `PreparedRun`.
    """

    def _load(self, config: Config, data_dir: str | None) -> None:
        path = Path(data_dir or ".") / _TESTS
        if not path.is_file():
            raise DataError(
                f"{path} does not exist. `fedshot flower partition` writes it, or `pack`."
            )
        found, notes = _read(path)
        try:
            self.base_classes = tuple(int(c) for c in notes["base"])
            self.dataset = _full_dataset(found, notes)
            self.rows = RowSplit(_NONE, found["validation"], found["novel"])
            self.client_split = ClientSplit(Partition.of([_NONE] * int(notes["clients"])))
            self._examples = int(notes.get("examples", 0))
            self.left_out = {int(client): str(why) for client, why in notes["left_out"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{path} is incomplete: {error!r}. Write it again with `fedshot flower partition` "
                "or `pack`."
            ) from None
        _check_settings(config, notes, path)
        self.split, self.own_tests = None, False
        self.config = _with_encoder(config, notes.get("encoder"), path)
        agreed = ("name", "class_names", "shape", "dataset", "deal", "words", "encoder", "original")
        self.notes = {name: notes[name] for name in agreed if name in notes}
        self.partition_digest = str(self.notes.get("deal", ""))  # "": each host packed its own data
        self.clients = [c for c in range(len(self.client_split.train)) if c not in self.left_out]

    def dataset_info(self) -> DatasetInfo:
        """Return the information about the data, whose training examples are on the nodes.

        Their number is 0 if the clients' files were packed on other hosts.
        """
        info = super().dataset_info()
        return replace(info, base=self.base_classes, examples=self._examples)


def _check_settings(config: Config, notes: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError unless the test file fits the configuration's data, split and partition.

    A file that `pack` wrote holds no settings, but the number of clients.
    """
    changed, clients = None, getattr(config.partition, "clients", None)
    if "settings" in notes:
        changed = difference(notes["settings"], _assigning(config), except_for=("data.path",))
    elif clients not in (None, int(notes["clients"])):
        changed = f"partition.clients was {notes['clients']}, is {clients}"
    if changed:
        raise ConfigError(
            f"{path} was written with another configuration: {changed}. Use the one that the "
            "clients' files were written with, or write all files again."
        )


def _assigning(config: Config) -> dict[str, Any]:
    """Return the settings that decide which client has which data, and what the test is drawn from.

    `split.seed` is that of the drawn split, null if nothing is drawn.
    """
    settings, split = config.settings, dict(config.settings["split"])
    drawn = config.split.random is not None or config.split.users is not None
    if config.split.seed is None and drawn:
        split["seed"] = config.test.seed
    found = {"data": settings["data"], "partition": settings["partition"]}
    return {**found, "split": split, "seed": config.seed}


def _with_encoder(config: Config, held: str | None, path: Path) -> Config:
    """Return the configuration, whose encoder (if any) gets the hash `held`.

    `held` is the hash of the encoder that computed the features in the test file `path`; None if
    there was none. Raises ConfigError if the configuration has another encoder, or lacks one.
    """
    options = config.model.encoder
    if options is None:
        expected: str | None = None
    else:
        expected = options.digest or held or "any"
    if expected != held:
        raise ConfigError(
            f"{path} was written with the encoder {held or 'none'}, and model.encoder is "
            f"{expected or 'none'}. Write it again with the server's configuration."
        )
    return config if options is None else config.with_encoder(replace(options, digest=held))


def _full_dataset(found: dict[str, Any], notes: dict[str, Any]) -> Dataset:
    """Return a dataset with the rows of `tests.safetensors` (arrays `found`, metadata `notes`).

    All other rows of the whole dataset are filled with black images or empty texts.
    """
    n, rows = int(notes["samples"]), found["rows"]
    y = np.full(n, notes["base"][0], dtype=np.int64)
    y[rows] = found["y"]
    if "table" in found:
        sizes = np.zeros(n, np.int64)
        sizes[rows] = np.diff(found["offsets"])
        x: Any = Tokens(
            found["ids"], np.append(0, np.cumsum(sizes)), found["table"], int(notes["cut"])
        )
    else:
        x = np.zeros((n, *found["x"].shape[1:]), dtype=found["x"].dtype)
        x[rows] = found["x"]
    names = tuple(map(str, notes["class_names"]))
    encoding = None
    if "encoder" in notes:
        encoding = Encoding(str(notes["encoder"]), tuple(map(int, notes["original"])))
    known = str(notes["dataset"])
    return Dataset(str(notes["name"]), x, y, names, known_digest=known, encoding=encoding)
