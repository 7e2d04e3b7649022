"""Datasets, partitions over clients, and episodes."""

from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import ClientData, Episode
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.data.partitions.registry import PARTITIONS
from fedshot.data.sources.registry import SOURCES
from fedshot.data.sources.source import Source
from fedshot.data.tokens import Tokens

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "ClassSplit",
    "ClientData",
    "Dataset",
    "Episode",
    "EpisodeSpec",
    "Partition",
    "Source",
    "Tokens",
]
