"""Datasets, partitions over clients, and episodes."""

from fedshot.data.dataset import ClassSplit, Dataset
from fedshot.data.deals import PARTITIONS, Dirichlet, Iid, Shards, Users, WholeClasses
from fedshot.data.episodes import ClientData, Episode, Tasks
from fedshot.data.folder import ImageFolder
from fedshot.data.omniglot import Omniglot
from fedshot.data.partition import Deal, Dealer, Partition, unable
from fedshot.data.personal import Clusters, Pathological
from fedshot.data.sources import SOURCES, Digits, Npz, Source, find_data_dir
from fedshot.data.spec import EpisodeSpec

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "ClassSplit",
    "ClientData",
    "Clusters",
    "Dataset",
    "Deal",
    "Dealer",
    "Digits",
    "Dirichlet",
    "Episode",
    "EpisodeSpec",
    "Iid",
    "ImageFolder",
    "Npz",
    "Omniglot",
    "Partition",
    "Pathological",
    "Shards",
    "Source",
    "Tasks",
    "Users",
    "WholeClasses",
    "find_data_dir",
    "unable",
]
