"""Datasets, partitions over clients, and episodes."""

from fedshot.data.augment import Augment
from fedshot.data.cifar import Cifar10, Cifar100
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset
from fedshot.data.deals import Dirichlet, Iid, Shards, Users, WholeClasses
from fedshot.data.episodes import ClientData, Episode, Hand, Tasks
from fedshot.data.folder import ImageFolder
from fedshot.data.gathering import GatheredTasks, Gathering
from fedshot.data.glyphs import Glyphs
from fedshot.data.hf import HF
from fedshot.data.huffpost import HuffPost
from fedshot.data.memory import InMemory
from fedshot.data.mini_imagenet import MiniImageNet
from fedshot.data.mnist import FashionMnist, Mnist
from fedshot.data.news import News20
from fedshot.data.omniglot import Omniglot
from fedshot.data.own import own_tasks
from fedshot.data.partition import Deal, Dealer, Partition, unable
from fedshot.data.partitions import PARTITIONS
from fedshot.data.personal import Clusters, Pathological
from fedshot.data.places import find_data_dir
from fedshot.data.redealt import Redealt
from fedshot.data.rows import Rows
from fedshot.data.sent140 import Sent140, split_users
from fedshot.data.sources import SOURCES, Digits, Npz, Source
from fedshot.data.spec import EpisodeSpec, Labels
from fedshot.data.texts import Texts
from fedshot.data.tiered_imagenet import TieredImageNet
from fedshot.data.tokens import Tokens

__all__ = [
    "HF",
    "PARTITIONS",
    "SOURCES",
    "Augment",
    "Cifar10",
    "Cifar100",
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
    "FashionMnist",
    "GatheredTasks",
    "Gathering",
    "Glyphs",
    "Hand",
    "HuffPost",
    "Iid",
    "ImageFolder",
    "InMemory",
    "Labels",
    "MiniImageNet",
    "Mnist",
    "News20",
    "Npz",
    "Omniglot",
    "Partition",
    "Pathological",
    "Redealt",
    "Rows",
    "Sent140",
    "Shards",
    "Source",
    "Tasks",
    "Texts",
    "TieredImageNet",
    "Tokens",
    "Users",
    "WholeClasses",
    "find_data_dir",
    "own_tasks",
    "split_users",
    "unable",
]
