"""The partitions, by the names they have in configurations."""

from fedshot.data.deals import Dirichlet, Iid, Shards, Users, WholeClasses
from fedshot.data.partition import Dealer
from fedshot.data.personal import Clusters, Pathological
from fedshot.data.redealt import Redealt

PARTITIONS: dict[str, type[Dealer]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "pathological": Pathological,
    "clusters": Clusters,
    "users": Users,
    "classes": WholeClasses,
    "redealt": Redealt,
}
