"""Tests of clients on classes of their own: question k belongs to one client.

The support is all that the client trains on, the queries are what was set aside for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedshot.core.errors import DataError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import Tasks
from fedshot.data.partitions.partition import Partition


def own_tasks(
    dataset: Dataset, train: Partition, held: Partition, clients: Sequence[int], key: Key
) -> Tasks:
    """Return one task for each client, in their order.

    Args:
        dataset: holds the rows of both partitions.
        train: what the clients train on: the supports.
        held: what is set aside for them: the queries. The order of a client's queries is drawn, so
            that it does not tell their labels.
        clients: whose tasks.
        key: decides that order alone.

    Raises DataError for a client that has nothing to answer, or a query of a class that it does not
    train on.
    """
    support, query, classes = [], [], []
    for c in clients:
        mine, asked = train[c], held[c]
        known = np.unique(dataset.y[mine]).astype(np.int64)
        if not len(asked):
            raise DataError(f"client {c} has no images to be tested on. Raise `shot`.")
        strange = np.setdiff1d(dataset.y[asked], known)
        if len(strange):
            raise DataError(
                f"client {c} is tested on class {dataset.class_names[strange[0]]!r}, of which it "
                "has no image to train on"
            )
        support.append(mine[np.argsort(dataset.y[mine], kind="stable")])
        query.append(key.at("client", c).numpy().permutation(asked))
        classes.append(known)
    return Tasks(tuple(support), tuple(query), tuple(classes))
