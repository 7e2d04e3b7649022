"""Heads: layers that compute logits from features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch import Tensor

from fedshot.core.ranges import Above0, Way, Width, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.nn.models.layers import init_linear, init_linear_head, linear
from fedshot.nn.prototypes import cosine_logits


@runtime_checkable
class Head(Protocol):
    """Computes logits from features. It holds only configuration; its parameters are a tree."""

    @property
    def way(self) -> int:
        """The number of logits."""
        ...

    def init(self, key: Key, n_features: int, dtype: torch.dtype) -> Tree:
        """Return random initial parameters for features of width `n_features`."""
        ...

    def logits(self, params: Tree, h: Tensor) -> Tensor:
        """Return logits [n, way] of features h [n, n_features]."""
        ...


@dataclass(frozen=True)
class LinearHead:
    """One linear layer.

    Args:
        way: number of outputs, at least the number of classes in an episode; with episode.labels
            "global", one for each class of the dataset.
    """

    way: Way = 5

    def __post_init__(self) -> None:
        check_options(self)

    def init(self, key: Key, n_features: int, dtype: torch.dtype) -> Tree:
        """Draw weight and bias, uniform in +-1/sqrt(n_features)."""
        return init_linear_head(key, n_features, self.way, dtype)

    def logits(self, params: Tree, h: Tensor) -> Tensor:
        """Return h W^T + b."""
        return linear(params, h)


@dataclass(frozen=True)
class TwoLayerHead:
    """A hidden layer with ReLU, then a linear layer.

    Args:
        way: number of outputs, at least the number of classes in an episode; with episode.labels
            "global", one for each class of the dataset.
        hidden: width of the hidden layer.
    """

    way: Way = 5
    hidden: Width = 128

    def __post_init__(self) -> None:
        check_options(self)

    def init(self, key: Key, n_features: int, dtype: torch.dtype) -> Tree:
        """Draw `linear1` (hidden) and `linear2` (logits)."""
        return {
            "linear1": init_linear(key.at("linear1"), n_features, self.hidden, dtype),
            "linear2": init_linear_head(key.at("linear2"), self.hidden, self.way, dtype),
        }

    def logits(self, params: Tree, h: Tensor) -> Tensor:
        """Return linear2(relu(linear1(h)))."""
        return linear(params["linear2"], F.relu(linear(params["linear1"], h)))


@dataclass(frozen=True)
class MLPClassifier:
    """A hidden layer as wide as the features, with ReLU, then two linear layers.

    F2L's authors use it in their code as the classifier of the server model.

    Args:
        way: number of outputs, one for each class.
        narrow: width of the second layer, which has no ReLU.
    """

    way: int
    narrow: int = 256

    def init(self, key: Key, n_features: int, dtype: torch.dtype) -> Tree:
        """Draw `linear1` (hidden), `linear2` (narrow) and `linear3` (logits)."""
        return {
            "linear1": init_linear(key.at("linear1"), n_features, n_features, dtype),
            "linear2": init_linear_head(key.at("linear2"), n_features, self.narrow, dtype),
            "linear3": init_linear_head(key.at("linear3"), self.narrow, self.way, dtype),
        }

    def logits(self, params: Tree, h: Tensor) -> Tensor:
        """Return linear3(linear2(relu(linear1(h))))."""
        h = linear(params["linear2"], F.relu(linear(params["linear1"], h)))
        return linear(params["linear3"], h)


@dataclass(frozen=True)
class CosineHead:
    """The logit of a class is `scale` times the cosine between the features and its weight row.

    Args:
        way: number of outputs, at least the number of classes in an episode; with episode.labels
            "global", one for each class of the dataset.
        scale: factor that multiplies the cosine.
    """

    way: Way = 5
    scale: Above0 = 10.0

    def __post_init__(self) -> None:
        check_options(self)

    def init(self, key: Key, n_features: int, dtype: torch.dtype) -> Tree:
        """Draw the weight rows; their norm does not matter."""
        return {"weight": init_linear_head(key, n_features, self.way, dtype)["weight"]}

    def logits(self, params: Tree, h: Tensor) -> Tensor:
        """Return scale * cos(h, weight)."""
        return cosine_logits(h, params["weight"], self.scale)


HEADS: dict[str, type[Head]] = {
    "linear": LinearHead,
    "two_layer": TwoLayerHead,
    "cosine": CosineHead,
}
