"""The partition of simulated few-round learning: images are reassigned for every episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import numpy as np

from fedshot.core.errors import DataError
from fedshot.core.ranges import AtLeast1
from fedshot.core.seeds import Key
from fedshot.core.text import count
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.episodes.episode import ClientData, ClientShare
from fedshot.data.episodes.group_sampler import GroupEpisode, GroupSampler
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import ClientSplit, Partition, check_client_split

_CACHED = 8  # episodes to remember, so that all clients of an episode get the same one


@dataclass(frozen=True)
class Resampled:
    """A simulation in which each episode assigns images from one pool to the clients again.

    Real clients keep their images, as in the other partitions. Here each client sees the whole
    pool, and a method that learns in episodes gets the client's share of each episode.

    Args:
        clients: number of clients of each episode.
        by: how the images of an episode are divided: "iid" or "shards", as in these partitions.
        per_client: number of shards of each client.
        shards: total number of shards; null for `clients * per_client`.
    """

    clients: AtLeast1 = 10
    by: Literal["iid", "shards"] = "iid"
    per_client: AtLeast1 = 2
    shards: AtLeast1 | None = None

    def __post_init__(self) -> None:
        _ = self.group_sampler  # checks the other options

    @property
    def group_sampler(self) -> GroupSampler:
        """The sampler that divides the images of an episode among the clients."""
        return GroupSampler(self.clients, self.by, self.per_client, self.shards)

    def assign(self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Give all rows to every client. Raises DataError if an episode cannot be divided."""
        check_client_split(dataset, indices, self.clients)
        needed = self.clients * (self.per_client if self.by == "shards" else 1)
        if spec.min_way * (spec.shot + spec.query) < needed:
            raise DataError(
                f"an episode has {spec.min_way * (spec.shot + spec.query)} images ({spec}) for "
                f"{self.clients} clients. With partition 'resampled', episode.shot and "
                "episode.query count the images of a class that all clients hold together; raise "
                "them, or lower `clients`."
            )
        for way in range(spec.min_way, spec.max_way + 1):
            if self._may_lack_support(spec, way):
                raise DataError(
                    f"in an episode of {count(way, 'class', 'classes')} a client may get images but"
                    f" no support set: too few of each class to divide {spec.shot} to {spec.query}."
                    " Raise episode.shot and episode.query, or lower `clients` or `per_client`."
                )
        self.group_sampler.sample(ClientData(dataset, indices), spec, key.at("trial"))
        return ClientSplit(Pool.shared(dataset, indices, self.group_sampler))

    def _may_lack_support(self, spec: EpisodeSpec, way: int) -> bool:
        """Whether some assignment of an episode leaves a client without a support set."""
        each = spec.shot + spec.query
        classes = np.repeat(np.arange(way), each)
        most = spec.min_to_divide - 1  # images of a class that give no support example
        if self.by == "iid":
            shares = (np.bincount(classes[k :: self.clients]) for k in range(self.clients))
            return any(bool((held <= most).all()) for held in shares)
        total = self.shards or self.clients * self.per_client
        shards = np.split(classes, np.arange(1, total) * len(classes) // total)
        return _max_shards_below(shards, most) >= self.per_client


def _max_shards_below(shards: Sequence[Ints], most: int) -> int:
    """Return how many shards can be chosen with at most `most` images of each class in total.

    Shards are sorted labels, so two consecutive shards share at most one class: the last of one and
    the first of the next. Dynamic programming over shards finds the maximum; its state is the
    number of images of the shared class.
    """
    best, at = {0: 0}, 0  # number of images of class `at` -> maximum number of shards
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
    """A partition in which every client sees all rows, and gets its own share of every episode."""

    pool: ClientData
    episode: Callable[[EpisodeSpec, Key], GroupEpisode]  # remembers the last few

    @classmethod
    def shared(cls, dataset: Dataset, indices: Ints, group_sampler: GroupSampler) -> Pool:
        """Return a pool of the rows `indices` for the clients of `group_sampler`."""
        whole = Partition.of([indices] * group_sampler.clients)
        pool = ClientData(dataset, indices)
        episode = lru_cache(_CACHED)(partial(group_sampler.sample, pool))
        return cls(whole.indices, whole.offsets, pool, episode)

    def data(self, dataset: Dataset, k: int) -> ClientData:
        """Return the whole pool as the data of client k, who gets a share of each episode."""
        del dataset
        return _PoolData(self, k)


class _PoolData(ClientData):
    """The whole pool as one client's data; `share` returns this client's part of an episode."""

    def __init__(self, pool: Pool, client: int) -> None:
        super().__init__(pool.pool.dataset, pool.pool.indices)
        self._episode, self._client = pool.episode, client

    def share(
        self, spec: EpisodeSpec, key: Key, whose: Sequence[str | int] = ()
    ) -> tuple[Ints, ClientShare]:
        """Return the classes of the episode, and this client's share of its images."""
        del whose
        classes, shares = self._episode(spec, key)
        return classes, shares[self._client]
