"""The table of data sources, keyed by their names in configurations."""

from __future__ import annotations

from collections.abc import Callable

from fedshot.core.plugins import T, registering
from fedshot.data.sources.cifar import Cifar10, Cifar100
from fedshot.data.sources.digits import Digits
from fedshot.data.sources.folder import ImageFolder
from fedshot.data.sources.glyphs import Glyphs
from fedshot.data.sources.hf import HF
from fedshot.data.sources.huffpost import HuffPost
from fedshot.data.sources.in_memory import InMemory
from fedshot.data.sources.mini_imagenet import MiniImageNet
from fedshot.data.sources.mnist import FashionMnist, Mnist
from fedshot.data.sources.news import News20
from fedshot.data.sources.npz import Npz
from fedshot.data.sources.omniglot import Omniglot
from fedshot.data.sources.sent140 import Sent140
from fedshot.data.sources.source import Source
from fedshot.data.sources.texts import Texts
from fedshot.data.sources.tiered_imagenet import TieredImageNet

SOURCES: dict[str, type[Source]] = {
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "digits": Digits,
    "fashion_mnist": FashionMnist,
    "folder": ImageFolder,
    "glyphs": Glyphs,
    "hf": HF,
    "huffpost": HuffPost,
    "memory": InMemory,
    "mini_imagenet": MiniImageNet,
    "mnist": Mnist,
    "news20": News20,
    "npz": Npz,
    "omniglot": Omniglot,
    "sent140": Sent140,
    "texts": Texts,
    "tiered_imagenet": TieredImageNet,
}


def register(name: str) -> Callable[[T], T]:
    """Register a class as a data source in this process, so that configurations can name it.

    This is a class decorator. Raises ConfigError if the class is not a `Source`, or
    if another class has the name.
    """
    return registering(SOURCES, Source, name)
