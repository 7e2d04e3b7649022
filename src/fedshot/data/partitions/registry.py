"""The table of partitions, keyed by their names in configurations."""

from collections.abc import Callable

from fedshot.core.plugins import T, registering
from fedshot.data.partitions.overlapping import Overlapping
from fedshot.data.partitions.own_classes import Clusters, Pathological
from fedshot.data.partitions.partition import Partitioner
from fedshot.data.partitions.pooled import Dirichlet, Iid, Shards, Users, WholeClasses
from fedshot.data.partitions.resampled import Resampled

PARTITIONS: dict[str, type[Partitioner]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "pathological": Pathological,
    "clusters": Clusters,
    "users": Users,
    "classes": WholeClasses,
    "resampled": Resampled,
    "overlapping": Overlapping,
}


def register(name: str) -> Callable[[T], T]:
    """Register a class as a partition in this process, so that configurations can name it.

    This is a class decorator. Raises ConfigError if the class is not a `Partitioner`, or
    if another class has the name.
    """
    return registering(PARTITIONS, Partitioner, name)
