"""An arrangement before any training: what the data is and how it is dealt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedshot.core import storage
from fedshot.core.errors import DataError
from fedshot.core.text import count, joined
from fedshot.data.dataset import Ints
from fedshot.data.partitions.partition import ClientSplit
from fedshot.reports.partition_plots import class_histogram, one_client_picture, partition_picture
from fedshot.reports.sheet import contact_sheet
from fedshot.runs.prepare import FederatedDataset

_ROWS = 20  # classes on the contact sheet
DEVICES = (2, 5, 10, 20, 30)


def facts(federated: FederatedDataset) -> list[str]:
    """Return lines that describe the data, the split and the partition; users are only counted."""
    data, sizes = federated.dataset, federated.deal.train.sizes
    noun = "texts" if data.is_text else "images"
    if data.is_text:
        kind_of_x = f"texts of at most {data.shape[0]} words"
    else:
        kind_of_x = f"images of {' x '.join(map(str, data.shape))}"
    lines = [
        f"{data.name}: {len(data)} {kind_of_x}, {data.n_classes} classes, hash {data.digest[:12]}",
        f"split: {_split(federated)}",
        f"partition {federated.config.settings['partition']['name']}: "
        f"{count(len(sizes), 'client')} with {sizes.min()} to {sizes.max()} {noun}, "
        f"median {np.median(sizes):.0f}",
        f"{len(federated.clients)} clients can form a {federated.config.episode} episode",
    ]
    if data.users is not None:
        lines.insert(1, f"{count(len(np.unique(data.users)), 'user')}, known by number alone")
    lines[1:1] = data.remarks
    if federated.copies.identical:
        lines.insert(1, str(federated.copies))
    left_out = list(federated.left_out.items())
    lines += [f"client {c} cannot: {why}" for c, why in left_out[:5]]
    return lines + ([f"and {len(left_out) - 5} more"] if len(left_out) > 5 else [])


def pictures(federated: FederatedDataset, folder: Path) -> dict[Path, str]:
    """Draw the data and who holds what; return the files, and what each shows.

    They are a contact sheet (of images), images per class, images per client and class, and how one
    client's share changes with the number of clients.
    """
    data = federated.dataset
    folder.mkdir(parents=True, exist_ok=True)
    noun = "texts" if data.is_text else "images"
    written: dict[Path, str] = {}
    trained = np.unique(data.y[federated.rows.base])
    if not data.is_text:
        path = folder / f"{data.name}-classes.png"
        scale = max(1, 56 // max(data.shape[:2]))
        some = trained[np.linspace(0, len(trained) - 1, min(_ROWS, len(trained))).astype(int)]
        contact_sheet(data, some.tolist(), scale=scale).save(path)
        written[path] = f"images of {len(some)} of the {len(trained)} base classes"
    held, notes = shares_of_client_0(federated)
    figures = {
        "histogram": (
            class_histogram(data.y, data.class_names, federated.split),
            f"{noun} of each class",
        ),
        "partition": (
            partition_picture(federated.deal.train, data.y, data.class_names),
            f"{noun} of each class at each client",
        ),
        "devices": (
            one_client_picture(held, [data.class_names[c] for c in trained], notes),
            f"what client 0 would hold of {joined([str(n) for n in DEVICES])} clients, whatever "
            "partition.clients is",
        ),
    }
    for name, (svg, shows) in figures.items():
        path = folder / f"{data.name}-{name}.svg"
        storage.write_bytes(path, svg.encode(), sync=False)
        written[path] = shows
    return written


def shares_of_client_0(federated: FederatedDataset) -> tuple[dict[int, Ints], list[str]]:
    """Return what client 0 holds of each base class for 2, 5, 10, 20 and 30 clients.

    The partition's other options stay as they are. Second, notes on the numbers of clients that it
    cannot deal to.
    """
    data, rows = federated.dataset, federated.rows.base
    trained = np.unique(data.y[rows])
    held, notes = {}, []
    for n in DEVICES:
        try:
            deal = _dealt(federated, n)
        except DataError as error:
            notes.append(f"{n} devices: {error}")
            continue
        counts = np.bincount(data.y[deal.train[0]], minlength=data.n_classes)
        held[n] = counts[trained].astype(np.int64)
    return held, notes


def _dealt(federated: FederatedDataset, clients: int) -> ClientSplit:
    partitioner: Any = federated.config.partition
    if "clients" not in {field.name for field in fields(partitioner)}:
        raise DataError(f"{type(partitioner).__name__} does not take a number of clients.")
    return replace(partitioner, clients=clients).assign(  # type: ignore[no-any-return]
        federated.dataset,
        federated.rows.base,
        federated.deal_key,
        federated.config.episode,
    )


def _split(federated: FederatedDataset) -> str:
    split, rows, data = federated.split, federated.rows, federated.dataset
    parts: Mapping[str, Any] = {
        part: getattr(rows if split is None else split, part)
        for part in ("base", "validation", "novel")
    }
    if split is not None:
        return ", ".join(f"{len(found)} {part}" for part, found in parts.items()) + " classes"
    assert data.users is not None  # only users can be split in the place of classes
    counts = {part: len(np.unique(data.users[found])) for part, found in parts.items()}
    return ", ".join(f"{n} {part}" for part, n in counts.items()) + " users"
