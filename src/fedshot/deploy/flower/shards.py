"""What one client holds, as a file on the node where it lives.

    client-000004.safetensors   x uint8 [n, H, W, C] and y int64 [n]; for texts ids, offsets, table

Notes beside the arrays tell the names of all classes, which are numbered alike everywhere, and
where the file was dealt from a dataset, the hashes of it and of the deal. A node reads the files of
its own folder and has no others; a server needs none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedshot.core import storage
from fedshot.core.errors import ConfigError, DataError
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.partitions.partition import Partition
from fedshot.data.partitions.redealt import Pool
from fedshot.data.tokens import PADDING, Table, Tokens, Words

_NAME = re.compile(r"client-(\d{6,})\.safetensors")


def path_of(folder: Path, client: int) -> Path:
    """Return the file of a client."""
    return folder / f"client-{client:06d}.safetensors"


def notes_of(dataset: Dataset, partition: Partition) -> dict[str, Any]:
    """Return what the files of a deal have in common."""
    hashes = {"dataset": dataset.digest, "deal": partition.digest}
    return kind_of(dataset) | hashes


def kind_of(dataset: Dataset) -> dict[str, Any]:
    """Return what files of the same classes and shape have in common.

    Raises DataError where examples come in groups, which these files do not tell.
    """
    if dataset.groups is not None:
        raise DataError(
            f"{dataset.name} has groups, which are kept apart on one machine alone. Leave them out "
            "of the data to deal or pack it for nodes."
        )
    found = {
        "name": dataset.name,
        "class_names": list(dataset.class_names),
        "shape": list(dataset.shape),
    }
    return found | ({"cut": dataset.x.cut} if isinstance(dataset.x, Tokens) else {})


def check_apart(folder: Path, deals: Sequence[Collection[int]]) -> None:
    """Raise ConfigError where folders of nodes hold clients that a deal gives to others."""
    for held in sorted(folder.glob("node-*")):
        number = held.name.removeprefix("node-")
        mine = deals[int(number)] if number.isdecimal() and int(number) < len(deals) else ()
        if strange := sorted({*clients_in(held)} - {*mine}):
            raise ConfigError(
                f"{path_of(held, strange[0])} is of another deal, and would be of two nodes. Deal "
                f"into another folder, or remove {held} first."
            )


def write_shards(
    folder: Path, dataset: Dataset, partition: Partition, clients: Collection[int]
) -> None:
    """Write a file for each of the clients.

    Raises DataError for images that are dealt anew in every round: nodes keep what they hold.
    """
    if isinstance(partition, Pool):
        raise DataError(
            "partition.name is 'redealt', which deals images anew in every round; clients on nodes "
            "keep what they hold. Set it to another, such as 'classes' or 'iid'."
        )
    notes = notes_of(dataset, partition)
    for client in clients:
        write_client(folder, dataset, partition[client], client, notes)


def write_client(
    folder: Path,
    dataset: Dataset,
    rows: Ints,
    client: int,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write the file of a client who holds these rows; `notes` where they were dealt."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = samples_of(dataset, rows)
    content = {name: torch.from_numpy(array) for name, array in arrays.items()}
    storage.write(path_of(folder, client), content, notes or kind_of(dataset), sync=True)


def samples_of(dataset: Dataset, rows: Ints) -> dict[str, Any]:
    """Return the arrays of some rows."""
    y = dataset.y[rows]
    if isinstance(dataset.x, Tokens):
        own = dataset.x.only(rows).alone()
        return {"ids": own.ids, "offsets": own.offsets, "table": own.table, "y": y}
    return {"x": np.ascontiguousarray(dataset.x[rows]), "y": y}


@dataclass(frozen=True)
class NodeData:
    """What a node holds: the samples of its clients, and nobody else's."""

    dataset: Dataset
    partition: Partition  # of no rows for clients that live elsewhere
    clients: tuple[int, ...]
    notes: Mapping[str, Any]


def clients_in(folder: Path) -> list[int]:
    """Return the clients of which a folder holds a file."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("client-*"))
    return sorted(int(name[1]) for name in found if name)


def read_shards(folder: Path, clients: Sequence[int] | None = None) -> NodeData:
    """Read the files of these clients, or all that are in a folder.

    Raises DataError when there are none, one is missing, or two do not belong together.
    """
    there = clients_in(folder)
    wanted = there if clients is None else sorted(set(clients))
    if not wanted:
        raise DataError(
            f"{folder} holds no client: expected files such as {path_of(folder, 0).name}. "
            "`fedshot flower pack` writes them, or `deal` from one dataset."
        )
    missing = sorted(set(wanted) - set(there))
    if missing:
        raise DataError(f"{path_of(folder, missing[0])} does not exist. Bring it, or ask for less.")
    read = [storage.read(path_of(folder, client)) for client in wanted]
    notes: dict[str, Any] = read[0][1]
    for client, (_, other, _) in zip(wanted, read, strict=True):
        differing = [name for name in ("class_names", "shape", "deal", "cut", "words")
                     if other.get(name) != notes.get(name)]  # fmt: skip
        if differing:
            raise DataError(
                f"{path_of(folder, client)} is of another deal than client {wanted[0]}: "
                f"{', '.join(differing)} differ. Deal them again together, or pack them with one "
                "configuration."
            )
    parts = [{name: leaf.numpy() for name, leaf in flat.items()} for flat, _, _ in read]
    try:
        dataset = _together(parts, notes)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder}: a client's file lacks what it must hold: {error}") from None
    rows, start = [np.zeros(0, np.int64)] * (wanted[-1] + 1), 0
    for client, part in zip(wanted, parts, strict=True):
        rows[client] = np.arange(start, start + len(part["y"]), dtype=np.int64)
        start += len(part["y"])
    return NodeData(dataset, Partition.of(rows), tuple(wanted), notes)


def _together(parts: Sequence[Mapping[str, Any]], notes: Mapping[str, Any]) -> Dataset:
    y = np.concatenate([part["y"] for part in parts])
    names = tuple(map(str, notes["class_names"]))
    if "table" not in parts[0]:
        x: Any = np.concatenate([part["x"] for part in parts])
        return Dataset(str(notes.get("name", "shards")), x, y, names)
    cut = int(notes["cut"])
    texts = [Tokens(part["ids"], part["offsets"], part["table"], cut) for part in parts]
    sizes = np.concatenate([np.diff(one.offsets) for one in texts])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    ids, table = _one_table(texts)
    tokens = Tokens(ids, offsets, table, cut)
    return Dataset(str(notes.get("name", "shards")), tokens, y, names)


def _one_table(texts: Sequence[Tokens]) -> tuple[Words, Table]:
    """Return words end to end and the vectors of all, each vector once."""
    rows = list(texts[0].table[: PADDING + 1])
    numbers: dict[bytes, int] = {}  # of every vector but that of padding
    moved = []
    for one in texts:
        renumbered = np.zeros(len(one.table), np.int32)
        for i, vector in enumerate(one.table[PADDING + 1 :], PADDING + 1):
            renumbered[i] = numbers.setdefault(vector.tobytes(), len(rows))
            if renumbered[i] == len(rows):
                rows.append(vector)
        moved.append(renumbered[one.ids])
    return np.concatenate(moved), np.stack(rows)
