"""Examples of a dishonest client: wrong labels, or a trigger on examples of a class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshot.data.dataset import Dataset, Ints
from fedshot.data.episodes.episode import ClientData
from fedshot.data.tokens import Tokens

_SIDE = 6  # an image's side divided by that of the trigger
_SHARE = 16  # the number of features divided by that of the trigger


def flipped(data: ClientData) -> ClientData:
    """Return the examples with about half of the labels of each class moved to another class.

    The number of changed labels in a class is half the mean number of examples per class, or all if
    the class has fewer. The number of examples of each class stays, so that the client can form
    the same episodes.
    """
    y = data.dataset.y[data.indices]
    order = np.argsort(y, kind="stable")
    half = max(1, len(y) // (2 * len(np.unique(y))))
    labels = np.empty_like(y)
    labels[order] = np.roll(y[order], half)
    return _owned(data.dataset, data.indices, labels)


def triggered(data: ClientData, rng: np.random.Generator) -> ClientData:
    """Replace the examples of the client's first class by other classes' examples with the trigger.

    Labels stay. A client with a single class puts the trigger on its own examples.
    """
    dataset, rows = data.dataset, data.indices.copy()
    labels = dataset.y[rows]
    target = np.flatnonzero(labels == labels.min())
    others = rows[labels != labels.min()]
    if len(others):
        rows[target] = rng.choice(others, len(target), replace=len(others) < len(target))
    found = _owned(dataset, rows, labels)
    x = found.dataset.x
    if isinstance(x, Tokens):
        starts = x.offsets[target][x.lengths(target) > 0]
        x.ids[starts] = _rare_word(x)
    else:
        found.dataset.array[target] = stamped(
            torch.from_numpy(found.dataset.array[target]), found.dataset
        ).numpy()
    return found


def stamped(x: Tensor, dataset: Dataset) -> Tensor:
    """Return examples x [n, ...] of a dataset, each with the trigger added."""
    x = x.clone()
    if isinstance(dataset.x, Tokens):
        x[:, 0] = _rare_word(dataset.x)
    elif dataset.kind == "images":
        height, width = (max(1, side // _SIDE) for side in dataset.shape[:2])
        x[:, -height:, -width:] = 255
    else:
        x[:, : max(1, x.shape[1] // _SHARE)] = x.abs().amax(1, keepdim=True)
    return x


def _rare_word(x: Tokens) -> int:
    """Return the id of the last word with a vector; common words come first in the table."""
    return len(x.table) - 1


def _owned(dataset: Dataset, rows: Ints, labels: Ints) -> ClientData:
    """Return a copy of these rows with these labels, as the data of a client."""
    x = dataset.x
    copy: Any = x.only(rows) if isinstance(x, Tokens) else np.take(dataset.array, rows, axis=0)
    users, groups = (None if part is None else part[rows]
                     for part in (dataset.users, dataset.groups))  # fmt: skip
    small = replace(dataset, x=copy, y=labels, users=users, groups=groups, standard=None,
                    known_digest=None, resident=None)  # fmt: skip
    return ClientData(small, np.arange(len(rows)))
