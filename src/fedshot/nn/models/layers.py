"""Layers as pure functions: `init_*` returns random parameters, the other functions apply them.

No layer changes its arguments; updated running statistics are returned. Parameters are drawn in
float64 and then cast, so that float32 and float64 models drawn from the same key agree.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch import Tensor

from fedshot.core import kernel_build, tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.nn.kernels import tensors, winograd
from fedshot.nn.models.mode import Mode, mix64, mix_int, readable, signed
from fedshot.nn.stacks import stacked

Shape = tuple[int, ...]  # (height, width, channels) of images, (words, vector length) of texts

NO_STATISTICS = (
    "batch norm needs statistics here and got none; pass those of training or of a support set, or "
    "use Mode(norm='batch')."
)
EPS = 1e-5  # added to a variance before the root, as in torch
MOMENTUM = 0.1  # weight of a batch in the running statistics, as in torch

_MIX32 = (-2048144789, -1028477387)  # multipliers of the 32-bit murmur finaliser, signed
_STRIDE32 = -1640531527  # 2**32 / golden ratio, signed


def _kaiming(key: Key, shape: tuple[int, ...], fan_in: int, dtype: torch.dtype) -> Tensor:
    """Return weights drawn from N(0, 2 / fan_in): He et al. 2015, for layers before a ReLU."""
    draw = torch.randn(shape, generator=key.torch(), dtype=torch.float64)
    return (draw * math.sqrt(2.0 / fan_in)).to(dtype)


def _uniform(key: Key, shape: tuple[int, ...], bound: float, dtype: torch.dtype) -> Tensor:
    draw = torch.rand(shape, generator=key.torch(), dtype=torch.float64)
    return ((2.0 * draw - 1.0) * bound).to(dtype)


def init_linear(key: Key, n_in: int, n_out: int, dtype: torch.dtype) -> Tree:
    """Return a linear layer that precedes a ReLU: Kaiming-normal weight, zero bias."""
    weight = _kaiming(key.at("weight"), (n_out, n_in), n_in, dtype)
    return {"weight": weight, "bias": torch.zeros(n_out, dtype=dtype)}


def init_linear_head(key: Key, n_in: int, n_out: int, dtype: torch.dtype) -> Tree:
    """Return a linear layer for logits: weight and bias uniform in +-1/sqrt(n_in)."""
    return init_uniform(key, n_in, n_out, 1.0 / math.sqrt(n_in), dtype)


def init_uniform(key: Key, n_in: int, n_out: int, bound: float, dtype: torch.dtype) -> Tree:
    """Return a linear layer with weight and bias uniform in +-bound."""
    return {
        "weight": _uniform(key.at("weight"), (n_out, n_in), bound, dtype),
        "bias": _uniform(key.at("bias"), (n_out,), bound, dtype),
    }


def linear(p: Tree, x: Tensor) -> Tensor:
    """Return x W^T + b."""
    return F.linear(x, p["weight"], p["bias"])


def init_conv(
    key: Key, c_in: int, c_out: int, kernel: int, dtype: torch.dtype, *, bias: bool = True
) -> Tree:
    """Return a square convolution: Kaiming-normal weight, zero bias (or none)."""
    shape = (c_out, c_in, kernel, kernel)
    weight = _kaiming(key.at("weight"), shape, c_in * kernel * kernel, dtype)
    if not bias:
        return {"weight": weight}
    return {"weight": weight, "bias": torch.zeros(c_out, dtype=dtype)}


def conv(p: Tree, x: Tensor) -> Tensor:
    """Return the convolution of x with an odd kernel, padded to keep height and width."""
    weight = contiguous(p["weight"])
    if winograd.fits(x, weight):
        return winograd.conv3x3(x, weight, p.get("bias"))
    return F.conv2d(x, weight, p.get("bias"), padding=weight.shape[-1] // 2)


def contiguous(weight: Tensor) -> Tensor:
    """Return the filters in contiguous layout, so that results depend on the values alone.

    torch rounds convolutions of small feature maps differently if the weight is channels-last.
    """
    return weight.reshape(-1).view(weight.shape)


def channels_last(x: Tensor) -> Tensor:
    """Return the feature maps x [n, c, h, w] laid out in memory as [n, h, w, c].

    Convolutions round differently in each layout, so this makes results depend on the values alone.
    `contiguous(memory_format=...)` is not enough: with one channel it accepts any strides as
    channels-last, and torch then uses a slow convolution.
    """
    n, c, h, w = x.shape
    return x.permute(0, 2, 3, 1).reshape(-1).view(n, h, w, c).permute(0, 3, 1, 2)


def init_norm(c: int, dtype: torch.dtype) -> tuple[Tree, Tree]:
    """Return initial parameters and running statistics of batch norm over c channels.

    With them, batch norm is the identity.
    """
    params = {"weight": torch.ones(c, dtype=dtype), "bias": torch.zeros(c, dtype=dtype)}
    return params, {"mean": torch.zeros(c, dtype=dtype), "var": torch.ones(c, dtype=dtype)}


def batch_norm(
    p: Tree, s: Tree, x: Tensor, mode: Mode, eps: float = EPS, momentum: float = MOMENTUM
) -> tuple[Tensor, Tree]:
    """Return batch norm of x [n, c, ...], and the statistics after this forward pass.

    `s` is `{"mean", "var"}`, or `{}` without running statistics.

    No gradient flows through given or returned statistics. If `mode.norm` is "batch" or "capture",
    the output is differentiable through the batch statistics, also twice.

    Under `vmap` and in ONNX export, scale and shift are separate operations. If `F.batch_norm` did
    them, torch 2.13 would silently compute wrong second derivatives for `grad(vmap(grad))` on a
    CPU. It would also update buffers in place, which stacked clients would share and ONNX export
    would lose.

    Raises ConfigError if there are fewer than two values per channel, or no given statistics.
    """
    if mode.norm == "given":
        if not s:
            raise ConfigError(NO_STATISTICS)
        mean, var = s["mean"].detach(), s["var"].detach()
        return F.batch_norm(x, mean, var, p["weight"], p["bias"], eps=eps), s
    n = x.numel() // x.shape[1]
    if n < 2:
        raise ConfigError(too_few(n, x))
    if stacked() or torch.compiler.is_exporting():
        return _batch_norm_stacked(p, s, x, mode, eps, momentum)
    if mode.norm == "batch" and not s:
        return F.batch_norm(x, None, None, p["weight"], p["bias"], True, 0.0, eps), s
    # torch updates the buffers in place, so it gets copies.
    shape = x.shape[1:2]
    mean = s["mean"].detach().clone() if s else p["weight"].new_zeros(shape)
    var = s["var"].detach().clone() if s else p["weight"].new_ones(shape)
    momentum = 1.0 if mode.norm == "capture" else momentum
    y = F.batch_norm(x, mean, var, p["weight"], p["bias"], True, momentum, eps)
    if mode.norm == "capture":
        var = var * ((n - 1) / n)  # torch returns the unbiased variance
    return y, {"mean": mean, "var": var}


def _batch_norm_stacked(
    p: Tree, s: Tree, x: Tensor, mode: Mode, eps: float, momentum: float
) -> tuple[Tensor, Tree]:
    """Return `batch_norm` with batch statistics, by operations that are correct under vmap."""
    y = F.batch_norm(x, None, None, None, None, True, 0.0, eps)
    shape = [1, -1] + [1] * (x.ndim - 2)
    y = y * p["weight"].view(shape) + p["bias"].view(shape)
    if mode.norm == "batch" and not s:
        return y, s
    axes, n = [i for i in range(x.ndim) if i != 1], x.numel() // x.shape[1]
    x = x.detach().to(p["weight"].dtype)
    mean, var = x.mean(axes), x.var(axes, unbiased=False)
    if mode.norm == "capture":
        return y, {"mean": mean, "var": var}
    keep = 1.0 - momentum
    return y, {
        "mean": keep * s["mean"].detach() + momentum * mean,
        "var": keep * s["var"].detach() + momentum * var * (n / (n - 1)),
    }


def needs_gradient(*trees: Tree) -> bool:
    """Whether gradients with respect to a leaf of these trees may be needed."""
    return torch.is_grad_enabled() and any(
        leaf.requires_grad for one in trees for leaf in tree.leaves(one)
    )


def too_few(n: int, x: Tensor) -> str:
    """Return the error message for a batch x with n values per channel, too few for batch norm."""
    return (
        f"batch norm got {n} value per channel from a batch of shape {list(x.shape)}; it needs "
        "at least 2 to take a variance. Use a larger batch or larger images."
    )


def dropout(x: Tensor, rate: float, mode: Mode, site: int) -> Tensor:
    """Return x with a fraction `rate` of its elements set to 0, the rest divided by 1 - rate.

    Whether element j is dropped depends on (seed, site, j) alone: not on a generator, the number of
    threads, or stacking by `vmap`. Elements of feature maps are numbered as [n, h, w, c], the
    memory order of channels-last images. Outside training, x is returned unchanged. Raises
    ConfigError if the mode has no seed.
    """
    if not mode.train or rate == 0.0:
        return x
    seed, scale = site_seed(mode, site), 1.0 / (1.0 - rate)
    if x.dtype in (torch.float32, torch.float64):
        return x * kept(x.shape, rate, seed, scale, x.dtype)
    return x * kept(x.shape, rate, seed, 1.0, x.dtype) * scale  # bfloat16 would round the scale


def site_seed(mode: Mode, site: int) -> Tensor:
    """Return the seed of the dropout mask at one site of a network."""
    seed = mode.layer(site).seed
    if seed is None:
        raise ConfigError("dropout in training needs a seed; pass Mode(seed=key.tensor()).")
    return seed


def kept(shape: torch.Size, rate: float, seed: Tensor, value: float, dtype: torch.dtype) -> Tensor:
    """Return a mask that is 0 with probability `rate` and else `value`, from a hashed counter.

    The hash is two keyed rounds of the murmur finaliser on 32-bit words, which need half the memory
    traffic of 64-bit words.
    """
    n = math.prod(shape)
    threshold = min(round(rate * 2**32) - 2**31, 2**31 - 1)
    if dtype == torch.float32 and readable(seed) and kernel_build.library() is not None:
        word = mix_int(int(seed))
        mask = tensors.kept(n, (word >> 32, signed(word, 32)), threshold, value)
    else:
        high, low = _words(mix64(seed))
        counter = torch.arange(n, dtype=torch.int32, device=seed.device)
        bits = _mix32(_mix32(counter * _STRIDE32 ^ high) + low)
        mask = (bits >= threshold).to(dtype) * value
    if len(shape) == 4:
        n, c, h, w = shape
        return mask.view(n, h, w, c).permute(0, 3, 1, 2)
    return mask.view(shape)


def _words(word: Tensor) -> tuple[Tensor, Tensor]:
    """Split int64 into two int32 halves, each in range so that the cast is defined."""
    low = ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
    return (word >> 32).to(torch.int32), low.to(torch.int32)


def _mix32(word: Tensor) -> Tensor:
    # The masks turn int32's signed shift into the unsigned one.
    word = (word ^ ((word >> 16) & 0xFFFF)) * _MIX32[0]
    word = (word ^ ((word >> 13) & 0x7FFFF)) * _MIX32[1]
    return word ^ ((word >> 16) & 0xFFFF)
