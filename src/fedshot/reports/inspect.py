"""Descriptions and pictures of a federated dataset before training, for `fedshot data show`."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedshot.core import storage
from fedshot.core.errors import DataError
from fedshot.core.text import count, joined, named_client
from fedshot.data.dataset import Ints
from fedshot.reports.partition_plots import class_histogram, one_client_picture, partition_picture
from fedshot.reports.sheet import contact_sheet
from fedshot.runs.prepare import FederatedDataset

_NOUNS = {"images": "images", "text": "texts", "features": "examples"}
_ROWS = 20  # maximum number of classes on the contact sheet
_CLIENTS = (2, 5, 10, 20, 30)  # numbers of clients compared in the last picture


def facts(federated: FederatedDataset) -> list[str]:
    """Describe the data, the split and the partition, one line each."""
    data, sizes = federated.dataset, federated.client_split.train.sizes
    noun = _NOUNS[data.kind]
    shapes = {
        "images": f"images of {' x '.join(map(str, data.shape))}",
        "text": f"texts of at most {data.shape[0]} words",
        "features": f"examples of {data.shape[0]} features",
    }
    lines = [
        f"{data.name}: {len(data)} {shapes[data.kind]}, {data.n_classes} classes, "
        f"hash {data.digest[:12]}"
    ]
    if federated.copies.identical:
        lines.append(str(federated.copies))
    lines += data.remarks
    if data.users is not None:
        lines.append(f"{count(len(np.unique(data.users)), 'user')}, identified by numbers")
    if data.encoding is not None:
        name = federated.config.settings["model"]["encoder"]["name"]
        lines.append(f"features of the encoder {name!r}, hash {data.encoding.encoder[:12]}")
    lines += [
        f"split: {_split(federated)}",
        f"partition {federated.config.settings['partition']['name']}: "
        f"{count(len(sizes), 'client')} with {sizes.min()} to {sizes.max()} {noun}, "
        f"median {np.median(sizes):.0f}",
        f"{len(federated.clients)} clients can form a {federated.config.episode} episode",
    ]
    left_out = list(federated.left_out.items())
    names = federated.client_names
    lines += [f"client {named_client(c, names)} cannot: {why}" for c, why in left_out[:5]]
    return lines + ([f"and {len(left_out) - 5} more"] if len(left_out) > 5 else [])


def pictures(federated: FederatedDataset, folder: Path) -> dict[Path, str]:
    """Write pictures of the data and its partition; return file -> description.

    The pictures are a contact sheet of the images, examples per class, examples per client and
    class, and one client's data, if the data are split among different numbers of clients.
    """
    data = federated.dataset
    folder.mkdir(parents=True, exist_ok=True)
    noun = _NOUNS[data.kind]
    written: dict[Path, str] = {}
    trained = np.unique(data.y[federated.rows.base])
    shown = (data.encoding and data.encoding.original) or data
    if shown.kind == "images":
        path = folder / f"{data.name}-classes.png"
        scale = max(1, 56 // max(shown.shape[:2]))
        some = trained[np.linspace(0, len(trained) - 1, min(_ROWS, len(trained))).astype(int)]
        contact_sheet(shown, some.tolist(), scale).save(path)
        written[path] = f"images of {len(some)} of the {len(trained)} base classes"
    held, notes = shares_of_client_0(federated)
    figures = {
        "histogram": (
            class_histogram(data.y, data.class_names, federated.split),
            f"{noun} of each class",
        ),
        "partition": (
            partition_picture(federated.client_split.train, data.y, data.class_names),
            f"{noun} of each class at each client",
        ),
        "devices": (
            one_client_picture(held, [data.class_names[c] for c in trained], notes),
            f"what client 0 would have among {joined([str(n) for n in _CLIENTS])} clients",
        ),
    }
    for name, (svg, shows) in figures.items():
        path = folder / f"{data.name}-{name}.svg"
        storage.write_bytes(path, svg.encode(), sync=False)
        written[path] = shows
    return written


def shares_of_client_0(federated: FederatedDataset) -> tuple[dict[int, Ints], list[str]]:
    """Split the data among different numbers of clients; return client 0's class counts.

    Returns number of clients -> examples of each base class at client 0, int64 [base classes], and
    a note on each number of clients that fails. The partition's other options are unchanged.
    """
    data, rows = federated.dataset, federated.rows.base
    trained = np.unique(data.y[rows])
    held, notes = {}, []
    partitioner: Any = federated.config.partition
    for n in _CLIENTS:
        try:
            if "clients" not in {field.name for field in fields(partitioner)}:
                raise DataError(f"{type(partitioner).__name__} has no option for their number.")
            split = replace(partitioner, clients=n).assign(
                data, rows, federated.partition_key, federated.config.episode
            )
        except DataError as error:
            notes.append(f"{n} clients: {error}")
            continue
        counts = np.bincount(data.y[split.train[0]], minlength=data.n_classes)
        held[n] = counts[trained].astype(np.int64)
    return held, notes


def _split(federated: FederatedDataset) -> str:
    split, rows, data = federated.split, federated.rows, federated.dataset
    parts = ("base", "validation", "novel")
    if split is not None:
        what, counts = "classes", [len(getattr(split, part)) for part in parts]
    else:
        assert data.users is not None  # rows are split by classes or by users
        what, counts = "users", [len(np.unique(data.users[getattr(rows, part)])) for part in parts]
    return ", ".join(f"{n} {part}" for n, part in zip(counts, parts, strict=True)) + f" {what}"
