"""The licences of the datasets, as far as their publishers state them."""

from __future__ import annotations

_IMAGENET = "ImageNet's terms of access: non-commercial research and education only"
_CIFAR = "none stated; the publisher asks to cite Krizhevsky 2009"

LICENCES = {
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "digits": "CC BY 4.0 (UCI, Optical Recognition of Handwritten Digits)",
    "fashion_mnist": "MIT",
    "glyphs": "Apache-2.0 (drawn by fedshot itself)",
    "huffpost": "that of the News Category Dataset (Misra), commonly cited as CC BY 4.0",
    "mini_imagenet": _IMAGENET,
    "mnist": "CC BY-SA 3.0, as commonly stated",
    "news20": "none stated; published for research, the posts belong to their authors",
    "omniglot": "MIT",
    "sent140": "none stated; offered for academic use, and Twitter's terms apply",
    "tiered_imagenet": _IMAGENET,
}
UNKNOWN = "not known to fedshot: the data belongs to you or to others; state it with --licence"
VECTORS = "word vectors: GloVe, PDDL 1.0, unless others were given"
