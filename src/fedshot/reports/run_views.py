"""Views of a run that need its data or model: client data, and novel classes in two dimensions.

The novel classes are shown as a map of examples, which also needs a checkpoint. A view that cannot
be made is replaced by the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedshot.core import tree
from fedshot.core.errors import CheckpointError, FedshotError
from fedshot.core.machine import arithmetic
from fedshot.core.seeds import Key
from fedshot.core.text import named_client
from fedshot.core.tree import Tree
from fedshot.data.dataset import Ints
from fedshot.data.episodes.episode import examples
from fedshot.nn.models.mode import Mode
from fedshot.reports.partition_plots import class_counts
from fedshot.runs import run_folder
from fedshot.runs.experiment import check_belongs
from fedshot.runs.prepare import FederatedDataset, PreparedRun

_CLIENTS = 40  # maximum number of clients in a partition table
_CLASSES, _EACH = 7, 40  # maximum number of classes in a map (colours), of examples per class
_DIGITS = 4  # decimals of a coordinate


@dataclass(frozen=True)
class PartitionTable:
    """The number of examples of each base class at each client: `table` [clients, classes].

    `clients` are the numbers of the clients in the table, with their names if they have any, and
    `total` counts all clients.
    """

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    table: tuple[tuple[int, ...], ...]
    total: int


@dataclass(frozen=True)
class Map:
    """Examples of novel classes in two dimensions, by class.

    Args:
        points: class -> coordinates of the class's examples in the map.
        classes: number of all novel classes, including classes without points.
        shares: fraction of the variance along each principal axis; None if the axes are the
            model's only two features.
        users: whether the run splits users instead of classes, so that clients may have trained
            on the same classes.
    """

    points: Mapping[str, tuple[tuple[float, float], ...]]
    classes: int
    shares: tuple[float, float] | None
    users: bool = False


@dataclass(frozen=True)
class DataViews:
    """Client data and a map of the novel classes for a run's report, and a note on the data.

    `holdings` is a table of each client's examples by class. `map` shows examples of the novel
    classes in two dimensions. If one of them cannot be made, it is the reason, a string.
    """

    holdings: PartitionTable | str
    map: Map | str
    note: str = ""


def data_views(folder: Path, data_dir: str | None = None) -> DataViews:
    """Load a run's data and its model of the chosen round; return its client data and map.

    Nothing is changed on the disk.
    """
    try:
        prepared = PreparedRun(run_folder.configuration(folder, any_device=True), data_dir)
    except FedshotError as error:
        return DataViews(str(error), str(error))
    held = holdings(prepared)
    note = f"{prepared.dataset.name}: {prepared.copies}" if prepared.copies.identical else ""
    try:
        return DataViews(held, _mapped(prepared, _chosen(prepared, folder)), note)
    except FedshotError as error:
        return DataViews(held, str(error), note)


def holdings(federated: FederatedDataset) -> PartitionTable:
    """Count each client's examples of each class, without classes that no client has."""
    data, parts = federated.dataset, federated.client_split.train
    classes, table = class_counts(parts, data.y, _CLIENTS)
    names = tuple(data.class_names[c] for c in classes)
    clients = tuple(named_client(c, federated.client_names) for c in range(len(table)))
    return PartitionTable(clients, names, tuple(map(tuple, table.tolist())), len(parts))


def _chosen(prepared: PreparedRun, folder: Path) -> Tree:
    """Return the server's state after the chosen round, whatever device the run was trained on.

    Raises CheckpointError if there is no checkpoint, or it belongs to another run or other data.
    """
    checkpoints = run_folder.checkpoints(folder)
    rounds = checkpoints.rounds()
    if not rounds:
        raise CheckpointError(f"{folder} has no checkpoint yet.")
    notes = checkpoints.notes(rounds[-1])
    check_belongs(folder, notes, prepared.config, any_device=True)
    if notes["dataset"] != prepared.dataset.digest:
        raise CheckpointError(
            f"{folder} was trained on other data: the hash of dataset {prepared.dataset.name!r} "
            "differs. Restore the data."
        )
    first = prepared.method.init(prepared.key.at("init"))
    return checkpoints.read(notes["best"][0], first)[0]


def _mapped(prepared: PreparedRun, server: Tree) -> Map | str:
    """Return a map of novel examples in two dimensions, or why there is none.

    The coordinates are computed from features of the server's encoder.
    """
    if prepared.own_tests:
        return "there are no novel classes: clients are tested on images of their own"
    model = prepared.method.model
    body = _body(server)
    if body is None:
        return "the server has no single encoder: each client has its own"
    params, stats = model.init(Key(0))
    if (found := tree.difference(params["body"], body)) is not None:
        return f"the server's encoder is not the model's: {found}"
    rows = _some(prepared.dataset.y, prepared.rows.novel)
    x = examples(prepared.dataset, np.concatenate(list(rows.values())))
    kept = _fields(server).get("stats", stats) if model.norm_policy == "running" else stats
    mode = Mode(norm="given" if model.norm_policy == "running" else "batch")
    with torch.no_grad(), arithmetic(1):
        h, _ = model.features({**params, "body": body}, kept, x, mode)
    if not bool(torch.isfinite(h).all()):
        return "the features are not finite: training diverged"
    places, shares = _flat(h.double().numpy())
    parts = np.split(places, np.cumsum([len(r) for r in rows.values()])[:-1])
    names = prepared.dataset.class_names
    points = {
        names[c]: tuple((x, y) for x, y in np.round(part, _DIGITS).tolist())
        for c, part in zip(rows, parts, strict=True)
    }
    novel = len(np.unique(prepared.dataset.y[prepared.rows.novel]))
    return Map(points, novel, shares, users=prepared.split is None)


def _body(server: Any) -> Tree | None:
    """Return the parameters of the encoder in a server's state; None without one."""
    fields = _fields(server)
    if "body" in fields:
        found: Tree = fields["body"]
        return found
    # "start" is a trained model only if there are learned step sizes, "alpha".
    names = ("theta", "w", "phi", *(("start",) if "alpha" in fields else ()))
    inner = next((name for name in names if name in fields), None)
    return None if inner is None else _body(fields[inner])


def _fields(state: Any) -> Mapping[str, Any]:
    """Return the parts of a server's state, a named tuple or a mapping, by their names."""
    fields = state._asdict() if hasattr(state, "_asdict") else state
    return fields if isinstance(fields, Mapping) else {}


def _some(y: Ints, novel: Ints) -> dict[int, Ints]:
    """Sample novel examples for the map; return class -> rows.

    If there are too many classes, or rows of a class, evenly spaced ones are taken.
    """
    classes = np.unique(y[novel])
    chosen = classes[_spread(len(classes), _CLASSES)]
    every = {int(c): novel[y[novel] == c] for c in chosen}
    return {c: rows[_spread(len(rows), _EACH)] for c, rows in every.items()}


def _spread(n: int, most: int) -> Ints:
    return np.linspace(0, n - 1, min(n, most)).round().astype(np.int64)


def _flat(
    h: np.ndarray[Any, np.dtype[np.float64]],
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], tuple[float, float] | None]:
    """Project features h [n, d] on two principal axes; return [n, 2] and fractions of variance.

    If d is 2, `h` is returned unchanged, with None for the fractions.
    """
    if h.shape[1] == 2:
        return h, None
    h = h - h.mean(axis=0)
    u, s, v = np.linalg.svd(h, full_matrices=False)
    if len(s) < 2:
        return np.pad(u * s, ((0, 0), (0, 2 - len(s)))), (1.0, 0.0)
    # The sign of an axis is arbitrary; this choice makes the figure reproducible.
    signs = np.sign(v[np.arange(2), np.abs(v[:2]).argmax(axis=1)])
    total = float((s**2).sum()) or 1.0
    return u[:, :2] * (s[:2] * signs), (float(s[0] ** 2) / total, float(s[1] ** 2) / total)
