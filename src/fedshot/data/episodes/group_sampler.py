"""Episodes held by a group of clients: which of them has which images, divided in two halves each.

Few-round learning asks how well a group learns new classes together, so an episode is a small
federation: a few classes, some images of each dealt to the clients, and every client's share of a
class divided in support and queries. Source: Park et al., Few-Round Learning for Federated
Learning, section 4 (experimental setup).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from fedshot.core.errors import DataError, check_word
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.episodes.episode import ClientData, ClientShare, Rows, Tasks, block, halves
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partitioner, check_least
from fedshot.data.partitions.pooled import Iid, Shards


class Gathered(NamedTuple):
    """An episode as row numbers: its classes in the order of their labels, and every hand."""

    classes: Ints  # [way]
    hands: tuple[ClientShare, ...]


@dataclass(frozen=True)
class GroupSampler:
    """How the images of an episode are dealt to a group of clients.

    Args:
        clients: of the group; 0 for none: an episode is in one hand.
        by: "iid" deals every class equally; "shards" sorts the images by class, cuts them into
            shards and gives a few to each client.
        per_client: shards of a client.
        shards: of an episode; null for as many as are given out.
        spare: further clients, with as many images each, of the same classes. They are no part of
            the group: only a method that chooses among more clients looks at them.
    """

    clients: int = 0
    by: Literal["iid", "shards"] = "iid"
    per_client: int = 2
    shards: int | None = None
    spare: int = 0

    def __post_init__(self) -> None:
        check_least(0, clients=self.clients, spare=self.spare)
        check_word("by", self.by, ("iid", "shards"))
        if self.spare and not self.clients:
            raise DataError(f"spare is {self.spare} and clients is 0; set clients, too.")
        if self.clients:
            _ = self.partitioner  # which checks the rest

    @property
    def partitioner(self) -> Partitioner:
        """What deals the images of one episode."""
        if self.by == "iid":
            return Iid(self.clients)
        return Shards(self.clients, self.per_client, self.shards)

    def needs(self, spec: EpisodeSpec) -> EpisodeSpec:
        """Return the shape whose classes are large enough, for the spare clients, too."""
        more = self._more(spec.shot + spec.query)
        return EpisodeSpec(spec.way, spec.shot, spec.query + more, labels=spec.labels)

    def gather(self, pool: ClientData, spec: EpisodeSpec, key: Key) -> Gathered:
        """Draw an episode from a pool: shot + query images of each class, dealt and divided."""
        each = spec.shot + spec.query
        classes, rows = pool.rows_of_episode(self.needs(spec), key.at("images").numpy())
        ours = np.concatenate([held[:each] for held in rows])
        hands = self._hands(self.partitioner, pool.dataset, ours, spec, key.at("group"))
        if self.spare:
            others = np.concatenate([held[each:] for held in rows])
            hands += self._hands(self._others, pool.dataset, others, spec, key.at("spare"))
        return Gathered(classes, hands)

    @property
    def _others(self) -> Partitioner:
        """What deals the images of the spare clients."""
        if self.by == "iid":
            return Iid(self.spare)
        shards = self.shards and max(self.spare * self.per_client,
                                     self.shards * self.spare // self.clients)  # fmt: skip
        return Shards(self.spare, self.per_client, shards)

    def _more(self, each: int) -> int:
        return -(-each * self.spare // self.clients) if self.spare else 0

    def _hands(
        self, partitioner: Partitioner, dataset: Dataset, rows: Ints, spec: EpisodeSpec, key: Key
    ) -> tuple[ClientShare, ...]:
        dealt = partitioner.deal(dataset, rows, key, spec).train
        return tuple(
            halves(dataset, held, spec, key.at("halves", k).numpy()) for k, held in enumerate(dealt)
        )


@dataclass(frozen=True, eq=False)
class GatheredTasks(Tasks):
    """Test episodes with, for every image, the number of the client that holds it."""

    support_held: Rows
    query_held: Rows
    spare: Rows  # support rows of the spare clients
    spare_held: Rows  # their numbers go on from those of the group

    @classmethod
    def gather(
        cls,
        dataset: Dataset,
        rows: Ints,
        spec: EpisodeSpec,
        group_sampler: GroupSampler,
        n: int,
        key: Key,
    ) -> GatheredTasks:
        """Draw n episodes; fewer episodes are the first of more."""
        pool = ClientData(dataset, rows)
        drawn = [group_sampler.gather(pool, spec, key.at("gathering", u)) for u in range(n)]
        parts = [_pooled(one.hands, group_sampler.clients, key.at("order", u))
                 for u, one in enumerate(drawn)]  # fmt: skip
        support, support_held, query, query_held, spare, spare_held = zip(*parts, strict=True)
        return cls(
            block(support),
            block(query),
            block([one.classes for one in drawn]),
            block(support_held),
            block(query_held),
            block(spare),
            block(spare_held),
        )

    def _hashed(self, i: int) -> tuple[Ints, ...]:
        mine = (self.support_held[i], self.query_held[i], self.spare[i], self.spare_held[i])
        return (*super()._hashed(i), *mine)


def _pooled(hands: Sequence[ClientShare], clients: int, key: Key) -> tuple[Ints, ...]:
    """Return rows and holders of supports, of queries in random order, and of spare supports."""

    def pool(parts: Sequence[Ints], first: int = 0) -> tuple[Ints, Ints]:
        holders = np.arange(first, first + len(parts), dtype=np.int64)
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *parts]), np.repeat(holders, [len(part) for part in parts])

    query, held = pool([hand.query for hand in hands[:clients]])
    order = key.numpy().permutation(len(query))
    return (
        *pool([hand.support for hand in hands[:clients]]),
        query[order],
        held[order],
        *pool([hand.support for hand in hands[clients:]], clients),
    )
