"""Backbones: networks that compute a feature vector for each example."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.plugins import T, registering
from fedshot.core.ranges import Below1, OptionalWidth, Width, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.nn.kernels import fused, stem, tensors
from fedshot.nn.models.layers import (
    Shape,
    batch_norm,
    channels_last,
    conv,
    dropout,
    init_conv,
    init_linear,
    init_norm,
    linear,
    needs_gradient,
)
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.module_backbone import ModuleBackbone
from fedshot.nn.models.recurrent import GRU, BiLSTM
from fedshot.nn.models.resnet import ResNet12


@runtime_checkable
class Backbone(Protocol):
    """Computes features of prepared examples. It holds only configuration; see `Model`.

    Prepared images are float [n, C, H, W] for a `shape` of (H, W, C). Prepared texts are float
    [n, L, d + 1]: word vectors, and a last column that is 1 for a word and 0 for the padding after
    the words. Their `shape` is (maximal length, d); L is at most the maximal length. Prepared
    features are float [n, d] for a `shape` of (d,).
    """

    @property
    def takes(self) -> tuple[Literal["images", "text", "features"], ...]:
        """The kinds of examples that the backbone accepts as input."""
        ...

    @property
    def vmappable(self) -> bool:
        """Whether `apply` works under `torch.func.vmap`, mapped over all its tensors."""
        ...

    @property
    def norm_policies(self) -> tuple[str, ...]:
        """The values of `Model.norm_policy` that make a difference.

        They are ("running",) without batch norm.
        """
        ...

    def init(self, key: Key, shape: Shape, dtype: torch.dtype) -> tuple[Tree, Tree]:
        """Return random parameters and initial running statistics for examples of `shape`."""
        ...

    def out_features(self, shape: Shape) -> int:
        """Return the number of features."""
        ...

    def apply(self, params: Tree, stats: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
        """Return (features [n, out_features], running statistics after the forward pass)."""
        ...


@dataclass(frozen=True)
class MLP:
    """A multilayer perceptron: linear, ReLU and dropout per hidden layer; no batch norm.

    The features are the output of the last hidden layer. If the layers are small, `vmap` over
    clients is faster than a loop.

    Args:
        hidden: widths of the hidden layers; if there are none, the features are the input itself.
        dropout: dropout rate after each layer.
    """

    takes: ClassVar[tuple[Literal["images", "features"], ...]] = ("images", "features")
    vmappable: ClassVar[bool] = True
    norm_policies: ClassVar[tuple[str, ...]] = ("running",)

    hidden: tuple[Width, ...] = (64, 64)
    dropout: Below1 = 0.0

    @property
    def trains(self) -> bool:
        """Whether there are parameters to train."""
        return self.hidden != ()

    def __post_init__(self) -> None:
        if any(width < 1 for width in self.hidden):
            raise ConfigError(f"hidden is {self.hidden}; expected widths of at least 1.")
        check_options(self)

    def init(self, key: Key, shape: Shape, dtype: torch.dtype) -> tuple[Tree, Tree]:
        """Return random layers `linear1`, `linear2`, ...; there are no running statistics."""
        widths = (math.prod(shape), *self.hidden)
        params = {
            f"linear{i}": init_linear(key.at(f"linear{i}"), n_in, n_out, dtype)
            for i, (n_in, n_out) in enumerate(pairwise(widths), start=1)
        }
        return params, {}

    def out_features(self, shape: Shape) -> int:
        """Return the width of the last hidden layer, or the size of the input if there is none."""
        return self.hidden[-1] if self.hidden else math.prod(shape)

    def apply(self, params: Tree, stats: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
        """Return (features, the unchanged `stats`)."""
        h = x.flatten(1)
        for i in range(1, len(self.hidden) + 1):
            h = F.relu(linear(params[f"linear{i}"], h))
            h = dropout(h, self.dropout, mode, site=i)
        return h, stats


@dataclass(frozen=True)
class Adapter:
    """A residual adapter on given features h: h + U relu(D h), with U zero at the start.

    Training starts from the encoder's features, whereas an `mlp` starts with random layers on them.
    Source: Houlsby et al. 2019, Parameter-Efficient Transfer Learning for NLP (ICML), with ReLU.

    Args:
        width: number of rows of D.
    """

    takes: ClassVar[tuple[Literal["features"], ...]] = ("features",)
    vmappable: ClassVar[bool] = True
    norm_policies: ClassVar[tuple[str, ...]] = ("running",)

    width: OptionalWidth = 64

    def init(self, key: Key, shape: Shape, dtype: torch.dtype) -> tuple[Tree, Tree]:
        """Draw the layer `down`; the layer `up` is zero. There are no statistics."""
        (d,) = shape
        up = {
            "weight": torch.zeros(d, self.width, dtype=dtype),
            "bias": torch.zeros(d, dtype=dtype),
        }
        return {"down": init_linear(key.at("down"), d, self.width, dtype), "up": up}, {}

    def out_features(self, shape: Shape) -> int:
        """Return the number of given features."""
        return shape[0]

    def apply(self, params: Tree, stats: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
        """Return (features, statistics unchanged)."""
        del mode
        return x + linear(params["up"], F.relu(linear(params["down"], x))), stats


@dataclass(frozen=True)
class Conv4:
    """Four blocks of 3x3 convolution, batch norm, ReLU and 2x2 max-pool; the usual few-shot net.

    The ReLU is computed after the pool, on a quarter of the elements; the two commute. A feature
    map narrower than 2 pixels is not pooled. Images of 84 px have 5 x 5 x width features. On a CPU,
    `vmap` over clients is slower than a loop.

    Args:
        width: channels of every block.
        dropout: dropout rate after each block.
        features: if above 0, a last linear layer maps to this many features, such as 2 for plots.
        order: order within a block: "norm_relu" has batch norm before the ReLU; "relu_norm" has the
            ReLU before batch norm, as some papers list it, and the pool last.
    """

    takes: ClassVar[tuple[Literal["images"], ...]] = ("images",)
    vmappable: ClassVar[bool] = True
    norm_policies: ClassVar[tuple[str, ...]] = ("running", "support", "transductive")

    width: Width = 64
    dropout: Below1 = 0.0
    features: OptionalWidth = 0
    order: Literal["norm_relu", "relu_norm"] = "norm_relu"

    def __post_init__(self) -> None:
        check_options(self)

    def init(self, key: Key, shape: Shape, dtype: torch.dtype) -> tuple[Tree, Tree]:
        """Return random layers `conv1`, `norm1`, ..., and the norms' running statistics."""
        params: dict[str, Tree] = {}
        stats: dict[str, Tree] = {}
        c_in = shape[2]
        for i in range(1, 5):
            params[f"conv{i}"] = init_conv(key.at(f"conv{i}"), c_in, self.width, 3, dtype)
            params[f"norm{i}"], stats[f"norm{i}"] = init_norm(self.width, dtype)
            c_in = self.width
        if self.features:
            n_in = self._flat(shape)
            params["linear"] = init_linear(key.at("linear"), n_in, self.features, dtype)
        return params, stats

    def out_features(self, shape: Shape) -> int:
        """Return `width` times `positions`, or the option `features` if it is not 0."""
        return self.features or self._flat(shape)

    def positions(self, shape: Shape) -> int:
        """Return the number of pixels of the last feature map; 1 if a linear layer follows it.

        The features are ordered channel by channel.
        """
        return 1 if self.features else self._flat(shape) // self.width

    def _flat(self, shape: Shape) -> int:
        h, w, _ = shape
        for _ in range(4):
            if min(h, w) >= 2:
                h, w = h // 2, w // 2
        return self.width * h * w

    def apply(self, params: Tree, stats: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
        """Return (features, running statistics after this forward pass)."""
        after: dict[str, Tree] = {}
        x = channels_last(x)  # 1.8 times as fast as contiguous; the layout of weights is irrelevant
        for i in range(1, 5):
            norm = f"norm{i}"
            block = _block if self.order == "norm_relu" else _relu_first
            x, kept = block(params[f"conv{i}"], params[norm], stats.get(norm, {}), x, mode)
            if kept:  # if no statistics are passed in, none are returned
                after[norm] = kept
            x = dropout(x, self.dropout, mode, site=i)
        h = linear(params["linear"], x.flatten(1)) if self.features else x.flatten(1)
        return h, after if stats or mode.norm == "capture" else stats


def _block(conv_p: Tree, norm_p: Tree, s: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
    """Return (relu(pool(norm(conv(x)))), statistics), computed by C kernels where they apply."""
    given = mode.norm == "given"
    able = not given or not needs_gradient(x, conv_p, norm_p)
    if able and stem.fits(x, conv_p["weight"]):
        return stem.stem(conv_p, norm_p, s, x, mode)
    if able and min(x.shape[-2:]) >= 2 and tensors.fits(x):
        # Batch statistics cancel the bias of the convolution: only the running mean includes it.
        h = conv(conv_p if given else {"weight": conv_p["weight"]}, x)
        if tensors.fits(h):
            bias = None if given else conv_p["bias"]
            return fused.norm_pool_relu(norm_p, s, h, bias, mode)
    h = conv(conv_p if given else _without_bias_gradient(conv_p), x)
    h, kept = batch_norm(norm_p, s, h, mode)
    if min(h.shape[-2:]) >= 2:
        h = F.max_pool2d(h, 2)
    return F.relu(h), kept


def _relu_first(conv_p: Tree, norm_p: Tree, s: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
    """Return (pool(norm(relu(conv(x)))), statistics), computed by C kernels where they apply."""
    h = conv(conv_p, x)
    able = mode.norm != "given" or not needs_gradient(h, norm_p)
    if able and min(h.shape[-2:]) >= 2 and tensors.fits(h):
        return fused.norm_pool_relu(norm_p, s, h, None, mode, fused.RELU_FIRST)
    h, kept = batch_norm(norm_p, s, F.relu(h), mode)
    return F.max_pool2d(h, 2) if min(h.shape[-2:]) >= 2 else h, kept


def _without_bias_gradient(p: Tree) -> Tree:
    """Return p with a bias of the same value whose gradient is exactly 0.

    Its true gradient is 0, because batch statistics cancel the bias. Rounding would make it about
    1e-9 with a random sign, which Adam turns into full steps that differ between fleets. An empty
    sum of the bias is added to keep it in the graph, as `torch.autograd.grad` requires.
    """
    return {"weight": p["weight"], "bias": p["bias"].detach() + p["bias"][:0].sum()}


BACKBONES: dict[str, type[Backbone]] = {
    "mlp": MLP,
    "adapter": Adapter,
    "conv4": Conv4,
    "resnet12": ResNet12,
    "gru": GRU,
    "bilstm": BiLSTM,
    "module": ModuleBackbone,
}


def register(name: str) -> Callable[[T], T]:
    """Register a class as a backbone in this process, so that configurations can name it.

    This is a class decorator. Raises ConfigError if the class is not a `Backbone`, or
    if another class has the name.
    """
    return registering(BACKBONES, Backbone, name)
