"""Episodes of a group of clients: each client holds a share of the support and of the queries.

Few-round learning measures how well a group learns new classes together, so an episode is a small
federation: a few classes, some images of each assigned to the clients, and each client's images of
a class divided into support and queries. Source: Park et al., Few-Round Learning for Federated
Learning, section 4 (experimental setup).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from fedshot.core.errors import DataError
from fedshot.core.ranges import AtLeast0, AtLeast1
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.episodes.episode import ClientData, ClientShare, Rows, Tasks, block, divide
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partitioner
from fedshot.data.partitions.pooled import Iid, Shards


class GroupEpisode(NamedTuple):
    """An episode of a group: its classes in label order, and each client's share of the rows."""

    classes: Ints  # [way]
    shares: tuple[ClientShare, ...]


@dataclass(frozen=True)
class GroupSampler:
    """How the images of an episode are divided among a group of clients.

    Args:
        clients: number of clients of the group; 0 if one client holds the whole episode.
        by: "iid" divides every class equally; "shards" sorts the images by class, cuts them into
            shards and gives a few to each client.
        per_client: number of shards of each client.
        shards: total number of shards of an episode; null for `clients * per_client`.
        spare: number of additional clients. They get other images of the episode's classes, as many
            per client as in the group. They are not part of the group: only methods that select
            among more clients use them.
    """

    clients: AtLeast0 = 0
    by: Literal["iid", "shards"] = "iid"
    per_client: AtLeast1 = 2
    shards: AtLeast1 | None = None
    spare: AtLeast0 = 0

    def __post_init__(self) -> None:
        if self.spare and not self.clients:
            raise DataError(f"spare is {self.spare} and clients is 0; set clients, too.")
        if self.clients:
            _ = self.partitioner  # checks the other options

    @property
    def partitioner(self) -> Partitioner:
        """The partitioner that divides the images of one episode."""
        return self._partitioner(self.clients, self.shards)

    def _partitioner(self, clients: int, shards: int | None) -> Partitioner:
        return Iid(clients) if self.by == "iid" else Shards(clients, self.per_client, shards)

    def needs(self, spec: EpisodeSpec) -> EpisodeSpec:
        """Return the shape of an episode, with the spare clients' images counted as queries."""
        each = spec.shot + spec.query
        more = -(-each * self.spare // self.clients) if self.spare else 0
        return EpisodeSpec(spec.way, spec.shot, spec.query + more, labels=spec.labels)

    def sample(self, pool: ClientData, spec: EpisodeSpec, key: Key) -> GroupEpisode:
        """Sample shot + query images of each class from a pool, and divide them among clients.

        Raises DataError if the pool has too few images, or a client's support would be empty.
        """
        each = spec.shot + spec.query
        classes, rows = pool.class_index.rows_of_episode(self.needs(spec), key.at("images").numpy())
        ours = np.concatenate([held[:each] for held in rows])
        shares = _shares(self.partitioner, pool.dataset, ours, spec, key.at("group"))
        if self.spare:
            others = np.concatenate([held[each:] for held in rows])
            least = self.spare * self.per_client
            shards = self.shards and max(least, self.shards * self.spare // self.clients)
            partitioner = self._partitioner(self.spare, shards)
            shares += _shares(partitioner, pool.dataset, others, spec, key.at("spare"))
        return GroupEpisode(classes, shares)


def _shares(
    partitioner: Partitioner, dataset: Dataset, rows: Ints, spec: EpisodeSpec, key: Key
) -> tuple[ClientShare, ...]:
    clients = partitioner.assign(dataset, rows, key, spec).train
    return tuple(
        divide(dataset, held, spec, key.at("halves", k).numpy()) for k, held in enumerate(clients)
    )


@dataclass(frozen=True, eq=False)
class GroupTasks(Tasks):
    """Test episodes, and for each image the number of the client in the group that holds it."""

    support_held: Rows
    query_held: Rows
    spare: Rows  # support rows of the spare clients
    spare_held: Rows  # client number of each row in `spare`, after the group's

    @classmethod
    def sample(
        cls,
        dataset: Dataset,
        rows: Ints,
        spec: EpisodeSpec,
        group_sampler: GroupSampler,
        n: int,
        key: Key,
    ) -> GroupTasks:
        """Sample n episodes; a smaller n gives the first n of the same list."""
        pool = ClientData(dataset, rows)
        drawn = [group_sampler.sample(pool, spec, key.at("gathering", u)) for u in range(n)]
        parts = [_pooled(one.shares, group_sampler.clients, key.at("order", u))
                 for u, one in enumerate(drawn)]  # fmt: skip
        support, support_held, query, query_held, spare, spare_held = map(
            block, zip(*parts, strict=True)
        )
        classes = block([one.classes for one in drawn])
        return cls(support, query, classes, support_held, query_held, spare, spare_held)

    def _hashed(self, i: int) -> tuple[Ints, ...]:
        own = (self.support_held[i], self.query_held[i], self.spare[i], self.spare_held[i])
        return (*super()._hashed(i), *own)


def _pooled(shares: Sequence[ClientShare], clients: int, key: Key) -> tuple[Ints, ...]:
    """Return six arrays: the rows of three sets, each followed by the client number of each row.

    The sets are the group's support, the group's queries in random order, and the spare clients'
    support.
    """

    def pool(parts: Sequence[Ints], first: int = 0) -> tuple[Ints, Ints]:
        holders = np.arange(first, first + len(parts), dtype=np.int64)
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *parts]), np.repeat(holders, [len(part) for part in parts])

    query, held = pool([share.query for share in shares[:clients]])
    order = key.numpy().permutation(len(query))
    return (
        *pool([share.support for share in shares[:clients]]),
        query[order],
        held[order],
        *pool([share.support for share in shares[clients:]], clients),
    )
