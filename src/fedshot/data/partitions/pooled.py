"""Ways of dealing one pool of images to clients: every image to one client, none to two.

The partitions that give each client its own test images are in `personal.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedshot.core.errors import DataError
from fedshot.core.ranges import Above0, AtLeast1
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.dirichlet import check_alpha, counts, shares
from fedshot.data.partitions.partition import (
    ClientSplit,
    Partition,
    check_client_split,
    check_least,
    shuffled_classes,
)


@dataclass(frozen=True)
class Iid:
    """Every class is shuffled and dealt equally; remainders move on to the next clients.

    Args:
        clients: how many.
    """

    clients: AtLeast1 = 10

    def __post_init__(self) -> None:
        check_least(1, clients=self.clients)

    def deal(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Deal like cards, class after class, without starting afresh at client 0."""
        del spec
        check_client_split(dataset, indices, self.clients)
        rng = key.at("iid").numpy()
        rows = np.concatenate([rows for _, rows in shuffled_classes(dataset, indices, rng)])
        seats = rng.permutation(self.clients)
        owners = seats[np.arange(len(rows)) % self.clients]
        return ClientSplit(Partition.by_owner(rows, owners, self.clients))


@dataclass(frozen=True)
class Dirichlet:
    """Class by class, client k gets the share q_k of the images, with q ~ Dir(alpha 1_K).

    The draw is repeated until every client can form an episode; failing that, the draw with the
    most such clients is kept. Where no draw at all can serve every client (too few images), the
    first is kept.

    Args:
        clients: how many, K.
        alpha: concentration: the smaller, the more a client's classes differ from another's.
        balance_cap: give no more images to clients that already hold n/K (the balanced variant of
            the NIID-bench family).
        redraws: the most draws after the first.
    """

    clients: AtLeast1 = 10
    alpha: Above0 = 1.0
    balance_cap: bool = False
    redraws: int = 100

    def __post_init__(self) -> None:
        check_least(1, clients=self.clients)
        check_least(0, redraws=self.redraws)
        check_alpha(self.alpha)

    def deal(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Deal each class by its shares, rounded so that nothing is lost."""
        check_client_split(dataset, indices, self.clients)
        pool = shuffled_classes(dataset, indices, key.at("dirichlet", "shuffle").numpy())
        sizes = [len(rows) for _, rows in pool]
        # A class can serve at most this many clients, whatever the shares.
        seats = sum(min(self.clients, n // spec.needed) for n in sizes)
        draws = 1 + self.redraws if seats >= self.clients * spec.fewest else 1
        best, most = 0, -1
        for attempt in range(draws):
            able = np.zeros(self.clients, dtype=np.int64)
            for got in self._counts(sizes, key.at("dirichlet", attempt)):
                able += got >= spec.needed
            served = int((able >= spec.fewest).sum())
            if served > most:
                best, most = attempt, served
            if served == self.clients:
                break
        owners = [
            np.repeat(np.arange(self.clients, dtype=np.int64), got)
            for got in self._counts(sizes, key.at("dirichlet", best))
        ]
        rows = np.concatenate([rows for _, rows in pool])
        return ClientSplit(Partition.by_owner(rows, np.concatenate(owners), self.clients))

    def _counts(self, sizes: list[int], key: Key) -> Iterator[Ints]:
        """Yield, class after class, how many of its images each client gets."""
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
        clients: how many.
        per_client: shards that a client draws.
        shards: of all; above `clients * per_client` some go to nobody, and null is that number.
    """

    clients: AtLeast1 = 10
    per_client: AtLeast1 = 2
    shards: int | None = None

    def __post_init__(self) -> None:
        check_least(1, clients=self.clients, per_client=self.per_client, shards=self.shards)
        drawn = self.clients * self.per_client
        if self.shards is not None and self.shards < drawn:
            raise DataError(
                f"shards is {self.shards}; {self.clients} clients that draw {self.per_client} each "
                f"need {drawn}. Raise `shards`, or leave it out."
            )

    def deal(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Deal shards without replacement; where sizes do not divide they differ by one image."""
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
        hands = np.repeat(np.arange(self.clients, dtype=np.int64), self.per_client)
        owner_of_shard[rng.permutation(total)[:drawn]] = hands
        cuts = np.arange(total + 1, dtype=np.int64) * n // total
        owners = np.repeat(owner_of_shard, np.diff(cuts))
        dealt = owners >= 0
        return ClientSplit(Partition.by_owner(rows[dealt], owners[dealt], self.clients))


@dataclass(frozen=True)
class Users:
    """Images go by user, and no user is divided.

    Args:
        clients: how many; null makes each user one.
    """

    clients: AtLeast1 | None = None

    def __post_init__(self) -> None:
        check_least(1, clients=self.clients)

    def deal(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Deal whole users; client k is the k-th user by number when each is a client."""
        del spec
        check_client_split(dataset, indices, 1)
        if dataset.users is None:
            raise DataError(
                f"{dataset.name} does not say which user an image is from, which partition 'users' "
                "needs. Give `users` in the data, or choose another partition."
            )
        return _whole(indices, dataset.users[indices], self.clients, "users", key)


@dataclass(frozen=True)
class WholeClasses:
    """Each class belongs to one client; clients' numbers of classes differ by one at most.

    Args:
        clients: how many.
    """

    clients: AtLeast1 = 10

    def __post_init__(self) -> None:
        check_least(1, clients=self.clients)

    def deal(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Deal whole classes in random order."""
        del spec
        check_client_split(dataset, indices, 1)
        return _whole(indices, dataset.y[indices], self.clients, "classes", key)


def _whole(indices: Ints, labels: Ints, clients: int | None, what: str, key: Key) -> ClientSplit:
    """Deal the rows of equal label together, in random order, labels as evenly as they go."""
    found, group = np.unique(labels, return_inverse=True)
    groups = len(found)
    if clients is None:
        return ClientSplit(Partition.by_owner(indices, group, groups))
    if clients > groups:
        raise DataError(
            f"clients is {clients}, but there are only {groups} {what} to deal, and none is "
            f"divided. Lower `clients` to {groups} or fewer."
        )
    owner = np.empty(groups, dtype=np.int64)
    owner[key.at(what).numpy().permutation(groups)] = np.arange(groups) % clients
    return ClientSplit(Partition.by_owner(indices, owner[group], clients))
