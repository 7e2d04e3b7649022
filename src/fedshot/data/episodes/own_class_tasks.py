"""Test tasks of clients on their own classes: one task for each client.

The support set is the client's training data, the query set its held-out data.
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
    """Return one task for each client, in the order of `clients`.

    Args:
        dataset: the dataset of both partitions.
        train: the training data of the clients, used as support sets.
        held: their held-out data, used as query sets in random order, so that positions do not
            reveal labels.
        clients: the clients to return tasks for.
        key: seeds the order of queries.

    Raises DataError for a client without held-out data, or with a query of a class that it does not
    train on.
    """
    support, query, classes = [], [], []
    for c in clients:
        mine, asked = train[c], held[c]
        known = np.unique(dataset.y[mine]).astype(np.int64)
        if not len(asked):
            raise DataError(f"client {c} has no images to test on. Raise `shot`.")
        strange = np.setdiff1d(dataset.y[asked], known)
        if len(strange):
            raise DataError(
                f"client {c} is tested on class {dataset.class_names[strange[0]]!r}, of which it "
                "has no training image"
            )
        support.append(mine[np.argsort(dataset.y[mine], kind="stable")])
        query.append(key.at("client", c).numpy().permutation(asked))
        classes.append(known)
    return Tasks(tuple(support), tuple(query), tuple(classes))
