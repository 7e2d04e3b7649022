"""The table of partitions, keyed by their names in configurations."""

from fedshot.data.partitions.own_classes import Clusters, Pathological
from fedshot.data.partitions.partition import Partitioner
from fedshot.data.partitions.pooled import Dirichlet, Iid, Shards, Users, WholeClasses
from fedshot.data.partitions.redealt import Redealt

PARTITIONS: dict[str, type[Partitioner]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "pathological": Pathological,
    "clusters": Clusters,
    "users": Users,
    "classes": WholeClasses,
    "redealt": Redealt,
}
