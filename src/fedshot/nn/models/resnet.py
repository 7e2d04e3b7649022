"""ResNet-12, the residual network of the few-shot literature, with DropBlock.

Sources: the network as in F2L (Wang et al. 2023, C.1.1); DropBlock from Ghiasi et al. 2018.
Departures: F2L uses DropBlock but does not give its positions, size and rate; the usual values are
used here. The rate is constant, without the warm-up that Ghiasi et al. suggest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.ranges import Below1, OptionalWidth, Width, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.nn.models.layers import (
    Shape,
    batch_norm,
    channels_last,
    conv,
    dropout,
    init_conv,
    init_linear,
    init_norm,
    kept,
    linear,
    site_seed,
)
from fedshot.nn.models.mode import Mode

BLOCKS = 4
_LARGEST_BLOCK = 5  # pixels: the last map at 84 px


@dataclass(frozen=True)
class ResNet12:
    """Four residual blocks of three 3x3 convolutions, then the mean over the pixels.

    A block computes z = norm3(conv3(a(norm2(conv2(a(norm1(conv1(x)))))))) and outputs a(maxpool(z +
    norm(conv1x1(x)))), with a leaky ReLU a. The last activation usually comes before the pool; the
    two commute, and after the pool only a quarter of the elements is left. A feature map narrower
    than 2 pixels is not pooled.

    The convolutions have no bias, because batch norm would cancel it. Parameters with RGB images:
    8.0 M with the default widths, 12.4 M with F2L's (64, 160, 320, 640), and 5.6 M with
    (64, 128, 256, 384), the usual widths nearest to FedFSL's "about 5M".

    On a CPU, `vmap` over clients is slower than a loop. A training step with 80 images of 84 px
    takes 1.7 TFLOP, which is a few seconds on a CPU.

    Args:
        widths: channels of the four blocks; the last is the number of features.
        dropblock: fraction of the elements dropped after the last two blocks, in training.
        block_size: side of a dropped square in pixels, at most that of the feature map. null: the
            side of the last feature map, at most 5; that is 5 at 84 px and 2 at 32 px.
        dropout: fraction of single elements dropped after the first two blocks, in training.
        slope: slope of the activation below 0; 0 gives the ReLU.
        features: if above 0, a last linear layer maps to this many features, such as 2 for plots.
    """

    takes: ClassVar[tuple[Literal["images"], ...]] = ("images",)
    vmappable: ClassVar[bool] = True
    norm_policies: ClassVar[tuple[str, ...]] = ("running", "support", "transductive")

    widths: tuple[Width, Width, Width, Width] = (64, 128, 256, 512)
    dropblock: Below1 = 0.1
    block_size: Width | None = None
    dropout: Below1 = 0.0
    slope: Below1 = 0.1
    features: OptionalWidth = 0

    def __post_init__(self) -> None:
        if len(self.widths) != BLOCKS or min(self.widths) < 1:
            raise ConfigError(f"widths is {self.widths}; expected {BLOCKS} widths of at least 1.")
        check_options(self)

    def init(self, key: Key, shape: Shape, dtype: torch.dtype) -> tuple[Tree, Tree]:
        """Return random layers `block1` to `block4`, and their norms' running statistics."""
        params: dict[str, Tree] = {}
        stats: dict[str, Tree] = {}
        c_in = shape[2]
        for i, width in enumerate(self.widths, start=1):
            name = f"block{i}"
            params[name], stats[name] = _init_block(key.at(name), c_in, width, dtype)
            c_in = width
        if self.features:
            params["linear"] = init_linear(key.at("linear"), c_in, self.features, dtype)
        return params, stats

    def out_features(self, shape: Shape) -> int:
        """Return the last width, or `features` if not 0; the shape does not matter."""
        del shape
        return self.features or self.widths[-1]

    def apply(self, params: Tree, stats: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
        """Return (features [n, `out_features`], running statistics after this forward pass)."""
        size = self.block_size or min(_LARGEST_BLOCK, max(1, min(x.shape[-2:]) // 2**BLOCKS))
        after: dict[str, Tree] = {}
        x = channels_last(x)
        for i in range(1, BLOCKS + 1):
            name = f"block{i}"
            x, after[name] = self._block(params[name], stats.get(name, {}), x, mode)
            if i <= BLOCKS - 2:
                x = dropout(x, self.dropout, mode, site=i)
            else:
                x = drop_block(x, self.dropblock, size, mode, site=i)
        kept = stats or mode.norm == "capture"  # no statistics are returned if none are passed in
        h = x.mean((-2, -1))
        h = linear(params["linear"], h) if self.features else h
        return h, after if kept else stats

    def _block(self, p: Tree, s: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
        after: dict[str, Tree] = {}

        def normed(name: str, z: Tensor) -> Tensor:
            norm = f"norm{name}"
            z = conv(p[f"conv{name}"], z)
            z, after[norm] = batch_norm(p[norm], s.get(norm, {}), z, mode)
            return z

        z = x
        for name in ("1", "2"):
            z = F.leaky_relu(normed(name, z), self.slope)
        z = normed("3", z) + normed("", x)
        if min(z.shape[-2:]) >= 2:
            z = F.max_pool2d(z, 2)
        return F.leaky_relu(z, self.slope), after


def _init_block(key: Key, c_in: int, width: int, dtype: torch.dtype) -> tuple[Tree, Tree]:
    """Return (parameters, running statistics) of a block.

    They are `conv1` to `conv3` with `norm1` to `norm3`, and the shortcut's `conv` and `norm`.
    """
    params: dict[str, Tree] = {}
    stats: dict[str, Tree] = {}
    for i, c, kernel in (("1", c_in, 3), ("2", width, 3), ("3", width, 3), ("", c_in, 1)):
        at = key.at(f"conv{i}")
        params[f"conv{i}"] = init_conv(at, c, width, kernel, dtype, bias=False)
        params[f"norm{i}"], stats[f"norm{i}"] = init_norm(width, dtype)
    return params, stats


def drop_block(x: Tensor, rate: float, size: int, mode: Mode, site: int) -> Tensor:
    """Return x [n, c, h, w] with squares of `size` pixels set to 0 and the rest scaled up.

    In each channel, a square starts at each possible position with probability

        gamma = rate / size^2 * h w / ((h - size + 1) (w - size + 1)),     Ghiasi et al., eq. (1)

    Squares overlap, so slightly less than `rate` is dropped, unless a square covers the feature
    map. The remaining elements are divided by their fraction of the batch (algorithm 1 of Ghiasi et
    al.).

    The mask is a max-pool over hashed start positions and depends on (seed, site) alone.
    """
    if not mode.train or rate == 0.0:
        return x
    n, c, h, w = x.shape
    size = min(size, h, w)
    rows, columns = h - size + 1, w - size + 1
    gamma = rate / size**2 * (h * w) / (rows * columns)
    places = torch.Size((n, c, rows, columns))
    starts = 1.0 - kept(places, gamma, site_seed(mode, site), 1.0, x.dtype)
    holes = F.max_pool2d(F.pad(starts, (size - 1,) * 4), size, stride=1)
    keep = 1.0 - holes
    share = keep.mean(dtype=torch.float64).clamp_min(1.0 / (n * c * h * w))
    return x * (keep * (1.0 / share).to(x.dtype))
