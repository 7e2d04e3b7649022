"""Partitions of one pool of images: each image belongs to at most one client.

The partitions that give each client its own test images are in `own_classes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedshot.core.errors import DataError
from fedshot.core.ranges import Above0, AtLeast0, AtLeast1
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.episodes.episode import shuffled_classes
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.dirichlet import counts, shares
from fedshot.data.partitions.partition import ClientSplit, Partition, check_client_split


@dataclass(frozen=True)
class Iid:
    """The images of each class are shuffled and divided equally; remainders go to clients in turn.

    Args:
        clients: number of clients.
    """

    clients: AtLeast1 = 10

    def assign(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Assign the rows to the clients in turn, class by class.

        The turn continues from one class to the next, so that clients' sizes differ by at most one.
        """
        del spec
        check_client_split(dataset, indices, self.clients)
        rng = key.at("iid").numpy()
        rows = np.concatenate([rows for _, rows in shuffled_classes(dataset, indices, rng)])
        order = rng.permutation(self.clients)
        owners = order[np.arange(len(rows)) % self.clients]
        return ClientSplit(Partition.by_owner(rows, owners, self.clients))


@dataclass(frozen=True)
class Dirichlet:
    """Client k gets the share q_k of each class's images; q ~ Dir(alpha 1_K) is drawn per class.

    The shares are drawn again until every client can form an episode. If `redraws` repetitions do
    not achieve that, the draw in which the largest number of clients can form an episode is used.
    If there are too few images for all clients in any draw, the shares are drawn only once.

    Args:
        clients: number of clients, K.
        alpha: concentration of the distribution; small values give clients different classes.
        balance_cap: whether to give no more images to clients that already have n/K of the n images
            (the balanced variant of the NIID-bench family).
        redraws: maximum number of draws after the first.
    """

    clients: AtLeast1 = 10
    alpha: Above0 = 1.0
    balance_cap: bool = False
    redraws: AtLeast0 = 100

    def assign(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Assign each class to the clients in random proportions; every image is assigned once."""
        check_client_split(dataset, indices, self.clients)
        pool = shuffled_classes(dataset, indices, key.at("dirichlet", "shuffle").numpy())
        sizes = [len(rows) for _, rows in pool]
        # The most (client, class) pairs that can get enough images in any draw.
        pairs = sum(min(self.clients, n // spec.min_images) for n in sizes)
        draws = 1 + self.redraws if pairs >= self.clients * spec.min_classes else 1
        best: list[Ints] = []
        most = -1
        for attempt in range(draws):
            drawn = list(self._counts(sizes, key.at("dirichlet", attempt)))
            able = np.sum([got >= spec.min_images for got in drawn], axis=0)
            served = int((able >= spec.min_classes).sum())
            if served > most:
                best, most = drawn, served
            if served == self.clients:
                break
        rows = np.concatenate([rows for _, rows in pool])
        owners = np.concatenate([np.repeat(np.arange(self.clients), got) for got in best])
        return ClientSplit(Partition.by_owner(rows, owners, self.clients))

    def _counts(self, sizes: list[int], key: Key) -> Iterator[Ints]:
        """Yield, for each class, the number of its images that each client gets."""
        rng = key.numpy()
        held = np.zeros(self.clients, dtype=np.int64)
        full = sum(sizes) / self.clients
        for n in sizes:
            q = shares(self.clients, self.alpha, rng)
            if self.balance_cap:
                room = held < full
                q = np.where(room, q, 0.0)
                q = q / q.sum() if q.sum() > 0 else room / room.sum()
            got = counts(q, n)
            held += got
            yield got


@dataclass(frozen=True)
class Shards:
    """The images, sorted by class, are cut into equal shards; each client draws a few.

    Args:
        clients: number of clients.
        per_client: number of shards of each client.
        shards: total number of shards; null for `clients * per_client`. Shards that no client
            draws are not used.
    """

    clients: AtLeast1 = 10
    per_client: AtLeast1 = 2
    shards: AtLeast1 | None = None

    def __post_init__(self) -> None:
        drawn = self.clients * self.per_client
        if self.shards is not None and self.shards < drawn:
            raise DataError(
                f"shards is {self.shards}; {self.clients} clients that draw {self.per_client} each "
                f"need {drawn}. Raise `shards`, or leave it out."
            )

    def assign(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Draw shards without replacement; their sizes differ by at most one image."""
        del spec
        check_client_split(dataset, indices, self.clients)
        drawn = self.clients * self.per_client
        n, total = len(indices), self.shards or drawn
        if n < total:
            raise DataError(
                f"cannot cut {n} images into {total} shards; each needs at least one image. Lower "
                "`clients`, `per_client` or `shards`."
            )
        rng = key.at("shards").numpy()
        rows = np.concatenate([rows for _, rows in shuffled_classes(dataset, indices, rng)])
        owner_of_shard = np.full(total, -1, dtype=np.int64)
        owners = np.repeat(np.arange(self.clients, dtype=np.int64), self.per_client)
        owner_of_shard[rng.permutation(total)[:drawn]] = owners
        cuts = np.arange(total + 1, dtype=np.int64) * n // total
        owners = np.repeat(owner_of_shard, np.diff(cuts))
        used = owners >= 0
        return ClientSplit(Partition.by_owner(rows[used], owners[used], self.clients))


@dataclass(frozen=True)
class Users:
    """Each user's images belong to one client.

    Args:
        clients: number of clients; null makes each user a client.
    """

    clients: AtLeast1 | None = None

    def assign(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Assign whole users; if `clients` is None, client k is the k-th user by number."""
        del spec
        check_client_split(dataset, indices, 1)
        if dataset.users is None:
            raise DataError(
                f"{dataset.name} has no users, which partition 'users' needs. Add `users` to the "
                "data, or choose another partition."
            )
        return _whole(indices, dataset.users[indices], self.clients, "users", key)


@dataclass(frozen=True)
class WholeClasses:
    """Each class belongs to one client; clients' numbers of classes differ by at most one.

    Args:
        clients: number of clients.
    """

    clients: AtLeast1 = 10

    def assign(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Assign whole classes in random order."""
        del spec
        check_client_split(dataset, indices, 1)
        return _whole(indices, dataset.y[indices], self.clients, "classes", key)


def _whole(indices: Ints, labels: Ints, clients: int | None, what: str, key: Key) -> ClientSplit:
    """Assign all rows of a label to one client, drawn at random.

    Clients' numbers of labels differ by at most one. If `clients` is None, client k has the k-th
    label. Raises DataError, which calls the labels `what`, for more clients than labels.
    """
    found, group = np.unique(labels, return_inverse=True)
    groups = len(found)
    if clients is None:
        return ClientSplit(Partition.by_owner(indices, group, groups))
    if clients > groups:
        raise DataError(
            f"clients is {clients}, but there are only {groups} {what}, and each belongs to one "
            f"client. Lower `clients` to {groups} or fewer."
        )
    owner = np.empty(groups, dtype=np.int64)
    owner[key.at(what).numpy().permutation(groups)] = np.arange(groups) % clients
    return ClientSplit(Partition.by_owner(indices, owner[group], clients))
