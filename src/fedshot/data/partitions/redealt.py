"""Images dealt anew for every episode: the partition of simulated few-round learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from fedshot.core.errors import DataError
from fedshot.core.ranges import AtLeast1
from fedshot.core.seeds import Key
from fedshot.core.text import count
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.episodes.episode import ClientData, ClientShare
from fedshot.data.episodes.group_sampler import Gathered, GroupSampler
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import (
    ClientSplit,
    Partition,
    check_client_split,
    check_least,
)

_HELD = 8  # episodes whose hands are remembered, so that a client's next exchange finds its own


@dataclass(frozen=True)
class Redealt:
    """Every episode deals images of its own to the clients, all from one pool: a simulation.

    Real clients keep what they hold; for them there are the other partitions. Here each client sees
    the whole pool, and a method that learns in episodes gets the client's hand of each.

    Args:
        clients: how many, of each episode.
        by: how an episode's images are dealt: "iid" or "shards".
        per_client: shards that a client draws.
        shards: of all; null is `clients * per_client`.
    """

    clients: AtLeast1 = 10
    by: Literal["iid", "shards"] = "iid"
    per_client: AtLeast1 = 2
    shards: int | None = None

    def __post_init__(self) -> None:
        check_least(1, clients=self.clients)
        _ = self.group_sampler  # which checks the rest

    @property
    def group_sampler(self) -> GroupSampler:
        """How the images of an episode are dealt."""
        return GroupSampler(self.clients, self.by, self.per_client, self.shards)

    def deal(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Let every client see all rows; an episode is dealt once to see whether it can be."""
        check_client_split(dataset, indices, self.clients)
        needed = self.clients * (self.per_client if self.by == "shards" else 1)
        if spec.min_way * (spec.shot + spec.query) < needed:
            raise DataError(
                f"an episode has {spec.min_way * (spec.shot + spec.query)} images ({spec}) for "
                f"{self.clients} clients. With partition 'redealt', episode.shot and episode.query "
                "count the images of a class that all clients hold together; raise them, or lower "
                "`clients`."
            )
        for way in range(spec.min_way, spec.max_way + 1):
            if self._may_lack_support(spec, way):
                raise DataError(
                    f"in an episode of {count(way, 'class', 'classes')} a client may get images and"
                    f" no support: too few of each class to divide {spec.shot} to {spec.query}. "
                    "Raise episode.shot and episode.query, or lower `clients` or `per_client`."
                )
        self.group_sampler.gather(ClientData(dataset, indices), spec, key.at("trial"))
        return ClientSplit(Pool.shared(dataset, indices, self.group_sampler))

    def _may_lack_support(self, spec: EpisodeSpec, way: int) -> bool:
        """Whether some deal of an episode leaves a client without a support."""
        each = spec.shot + spec.query
        classes = np.repeat(np.arange(way), each)
        most = spec.divided - 1  # images of a class that give none
        if self.by == "iid":
            hands = (np.bincount(classes[k :: self.clients]) for k in range(self.clients))
            return any(bool((held <= most).all()) for held in hands)
        total = self.shards or self.clients * self.per_client
        shards = np.split(classes, np.arange(1, total) * len(classes) // total)
        return _bare_together(shards, most) >= self.per_client


def _bare_together(shards: Sequence[Ints], most: int) -> int:
    """Return how many shards can lie in one hand with no more than `most` images of any class.

    Shards are labels in rising order, so two of them share at most the class where one ends and the
    next begins: what counts of a choice so far is its size and what it has of that class.
    """
    best, at = {0: 0}, 0  # images of class `at` in a hand: the most shards of such a hand
    for labels in shards:
        first, last = int(labels[0]), int(labels[-1])
        if first != at:
            best, at = {0: max(best.values())}, first
        held = np.bincount(labels - first)
        grown: dict[int, int] = {}
        for used, n in best.items():
            choices = [(used if last == at else 0, n)]
            if used + held[0] <= most and bool((held[1:] <= most).all()):
                choices.append((used * (last == at) + int(held[-1]), n + 1))
            for now, size in choices:
                grown[now] = max(size, grown.get(now, 0))
        best, at = grown, last
    return max(best.values())


@dataclass(frozen=True, eq=False)
class Pool(Partition):
    """All rows at every client, and hands dealt anew for every episode."""

    table: _Table

    @classmethod
    def shared(cls, dataset: Dataset, indices: Ints, group_sampler: GroupSampler) -> Pool:
        """Return the pool of so many clients."""
        whole = Partition.of([indices] * group_sampler.clients)
        return cls(
            whole.indices, whole.offsets, _Table(ClientData(dataset, indices), group_sampler)
        )

    def data(self, dataset: Dataset, k: int) -> ClientData:
        """Return the pool as client k sees it."""
        del dataset
        return PoolData(self.table, k)


class _Table:
    """Where the hands of an episode lie; the last few episodes stay on it."""

    def __init__(self, pool: ClientData, group_sampler: GroupSampler) -> None:
        self.pool, self.group_sampler = pool, group_sampler
        self.episode = lru_cache(_HELD)(self._gather)

    def _gather(self, spec: EpisodeSpec, key: Key) -> Gathered:
        return self.group_sampler.gather(self.pool, spec, key)


class PoolData(ClientData):
    """The pool as one client sees it."""

    def __init__(self, table: _Table, client: int) -> None:
        super().__init__(table.pool.dataset, table.pool.indices)
        self._table, self._client = table, client

    def hand(
        self, spec: EpisodeSpec, key: Key, whose: Sequence[str | int] = ()
    ) -> tuple[Ints, ClientShare]:
        """Return the classes of the episode, and this client's share of their images."""
        del whose
        classes, hands = self._table.episode(spec, key)
        return classes, hands[self._client]
