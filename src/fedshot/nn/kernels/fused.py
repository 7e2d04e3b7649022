"""Batch norm, 2x2 max-pool and ReLU as one operation, for channels-last maps in float32.

    y = relu(max_pool2d(batch_norm(x), 2)), or max_pool2d(batch_norm(relu(x)), 2)

As separate operations, which each read and write the map, these take as long as the convolutions of
a Conv4. `pooled` reads a map twice in the forward pass, and twice in the backward pass. It equals
the separate operations to rounding and does not depend on the number of threads.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.tree import Tree
from fedshot.nn.kernels.folding import Folded, fold, keep, tilt, values_of
from fedshot.nn.kernels.tensors import each, empty, library
from fedshot.nn.models.layers import EPS, MOMENTUM, NO_STATISTICS, too_few
from fedshot.nn.models.mode import Mode


class Cut(NamedTuple):
    """The position of the ReLU, before the norm or after the pool, as two bounds; NaN is none."""

    least: float  # lower bound of x
    floor: float  # lower bound of a pool's maximum


RELU_LAST, RELU_FIRST = Cut(math.nan, 0.0), Cut(0.0, math.nan)


def norm_pool_relu(
    p: Tree, s: Tree, x: Tensor, bias: Tensor | None, mode: Mode, cut: Cut = RELU_LAST
) -> tuple[Tensor, Tree]:
    """Return (relu(max_pool2d(norm(x + bias), 2)), statistics), with statistics as in `batch_norm`.

    Args:
        p: scale and shift of the norm.
        s: running statistics, `{}` for none.
        x: a map that `fits`. With "given" statistics there are no gradients.
        bias: bias of the preceding convolution, not yet added to x; only for "batch" and "capture"
            with the ReLU last.
        mode: which statistics to use.
        cut: position of the ReLU.
    """
    if mode.norm == "given":
        return pooled_given(x, *at_given(p, s), cut), s
    check_enough(x)
    y, mean, var = pooled(x, p["weight"], p["bias"], EPS, cut)
    return y, after_batch(s, mean, var, bias, x, mode)


def at_given(p: Tree, s: Tree) -> tuple[Tensor, Tensor]:
    """Return the scale and shift of batch norm with given statistics, without gradients."""
    if not s:
        raise ConfigError(NO_STATISTICS)
    scale = (p["weight"] * torch.rsqrt(s["var"] + EPS)).detach()
    return scale, (p["bias"] - s["mean"] * scale).detach()


def check_enough(x: Tensor) -> None:
    """Raise ConfigError for a map with a single value per channel, which has no variance."""
    if values_of(x) < 2:
        raise ConfigError(too_few(values_of(x), x))


def after_batch(
    s: Tree, mean: Tensor, var: Tensor, bias: Tensor | None, x: Tensor, mode: Mode
) -> Tree:
    """Return the statistics after a batch x.

    `mean` and `var` are those of x; `bias`, which was left out of x, is added to the mean.
    """
    if mode.norm == "capture":
        return {"mean": mean if bias is None else mean + bias.detach(), "var": var}
    if not s:
        return s
    moved = keep((s["mean"], s["var"]), (mean, var), bias, MOMENTUM, values_of(x))
    return dict(zip(("mean", "var"), moved, strict=True))


def pooled(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, cut: Cut = RELU_LAST
) -> tuple[Tensor, Tensor, Tensor]:
    """Return max_pool2d(batch_norm(x), 2) with a ReLU, and the batch statistics.

    Args:
        x: [n, c, h, w], for which `tensors.fits` holds.
        weight: scale of the norm [c].
        bias: shift of the norm [c].
        eps: number added to the variance.
        cut: position of the ReLU, `RELU_LAST` (after the pool) or `RELU_FIRST` (before the norm).

    Returns:
        y [n, c, h // 2, w // 2], and the batch's mean [c] and biased variance [c], without
        gradients.
    """
    y, mean, var = _Pooled.apply(x, weight, bias, eps, cut)  # type: ignore[no-untyped-call]
    return y, mean, var


def pooled_given(x: Tensor, scale: Tensor, shift: Tensor, cut: Cut = RELU_LAST) -> Tensor:
    """Return relu(max_pool2d(x * scale + shift, 2)) of a map that `fits`, without gradients."""
    by = scale.detach().contiguous(), shift.detach().contiguous()
    return _forward(x.detach(), *by, cut)


class _Pooled(torch.autograd.Function):
    """y from (x, weight, bias), with mean and variance, which have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, cut: Cut) -> Any:
        by = fold(x, weight, bias, eps, cut.least)
        ctx.save_for_backward(x, weight, bias, *by)
        ctx.mark_non_differentiable(by.mean, by.var)
        ctx.cut = cut
        return _forward(x, by.scale, by.shift, cut), by.mean, by.var

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> Any:
        x, weight, bias, *sizes = ctx.saved_tensors
        found = _PooledGradient.apply(dy, x, weight, bias, ctx.cut, *sizes)  # type: ignore[no-untyped-call]
        dx, dweight, dbias = found
        return dx, dweight, dbias, None, None


class _PooledGradient(torch.autograd.Function):
    """dx, dweight and dbias from (dy, x, weight), as a function that can be differentiated.

    With dz the gradient that reaches the maximum of a pool, S0 and S1 the sums of dz and of
    dz (x - mean), M the number of values per channel, i = 1 / sqrt(var + eps) and s = weight * i:

        dx = s dz - s S0 / M - s i^2 S1 (x - mean) / M,    dweight = i S1,    dbias = S0.

    `backward` differentiates <u, dx> + a dweight + b dbias, where mean and i depend on x, too. With
    the ReLU first, x is its output, and the gradients of values that it set to 0 are 0.
    """

    @staticmethod
    def forward(
        ctx: Any, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, cut: Cut, *sizes: Tensor
    ) -> Any:
        by, dy = Folded(*sizes), dy.contiguous(memory_format=torch.channels_last)
        back = tilt(*_sums(x, by.scale, by.shift, by.mean, dy, cut), by, values_of(x))
        dx = _grad(x, by.scale, by.shift, by.mean, back.slope, back.level, dy, cut)
        ctx.cut = cut
        ctx.save_for_backward(dy, x, weight, bias, *by, back.s0, back.s1)
        return dx, back.by_weight, back.s0

    @staticmethod
    def backward(ctx: Any, u: Tensor, a: Tensor, b: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("the kernels have no third derivatives; set FEDSHOT_KERNELS=off")
        dy, x, weight, _, mean, _, i, scale, shift, s0, s1 = ctx.saved_tensors
        m, floor = values_of(x), ctx.cut.floor
        raised = x <= 0 if ctx.cut is RELU_FIRST else None
        if raised is not None:
            x, u = x.masked_fill(raised, 0.0), u.masked_fill(raised, 0.0)
        x, u = (t.contiguous(memory_format=torch.channels_last) for t in (x, u))
        u0, u1, uz = _twice_sums(x, scale, shift, mean, dy, u, floor)
        inner = uz - s0 * u0 / m - i * i * s1 * u1 / m
        of_i = weight * inner - 2 * scale * i * s1 * u1 / m + a * s1
        at_z = a * i - scale * i * i * u1 / m
        at_u = -scale * i * i * s1 / m
        gx, gdy = _twice_grad(
            x, scale, shift, mean,
            slope=-of_i * i**3 / m, at_z=at_z, at_u=at_u,
            level=-(at_z * s0 + at_u * u0) / m, base=b - scale * u0 / m, dy=dy, u=u, floor=floor,
        )  # fmt: skip
        gx = gx if raised is None else gx.masked_fill(raised, 0.0)
        return gdy, gx, i * inner, *[None] * 7


def _forward(x: Tensor, scale: Tensor, shift: Tensor, cut: Cut) -> Tensor:
    """Return max_pool2d(x * scale + shift, 2) with the ReLU; a 2x2 window with a NaN gives NaN."""
    n, c, h, w = x.shape
    y = empty(n, h // 2, w // 2, c)
    each(n, library().fedshot_pool, [x, scale, shift], [h, w, c], [y], cut)
    return y.permute(0, 3, 1, 2)


def _sums(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, dy: Tensor, cut: Cut
) -> tuple[Tensor, Tensor]:
    """Return the sums of dz and of dz * (x - mean) over each image, float64 [n, c].

    dz is the gradient with respect to x * scale + shift: dy at the maximum of each 2x2 window, and
    0 elsewhere.
    """
    n, c, h, w = x.shape
    dz, dzx = empty(2, n, c, dtype=torch.float64).unbind(0)
    each(n, library().fedshot_sums, [x, scale, shift, mean, dy], [h, w, c], [dz, dzx], cut)
    return dz, dzx


def _grad(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, slope: Tensor, level: Tensor, dy: Tensor,
    cut: Cut,
) -> Tensor:  # fmt: skip
    """Return scale * dz + slope * (x - mean) + level, and 0 where a first ReLU set x to 0."""
    n, c, h, w = x.shape
    dx = empty(n, h, w, c)
    ins = [x, scale, shift, mean, slope, level, dy]
    each(n, library().fedshot_grad, ins, [h, w, c], [dx], cut)
    return dx.permute(0, 3, 1, 2)


def _twice_sums(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, dy: Tensor, u: Tensor, floor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums [c] of u, u * (x - mean) and u * dz; a first ReLU is already applied to x."""
    n, c, h, w = x.shape
    parts = empty(3, n, c, dtype=torch.float64)
    ins = [x, scale, shift, mean, dy, u]
    each(n, library().fedshot_twice_sums, ins, [h, w, c], list(parts), [floor])
    u0, u1, uz = parts.sum(1).float()
    return u0, u1, uz


def _twice_grad(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, *, slope: Tensor, at_z: Tensor,
    at_u: Tensor, level: Tensor, base: Tensor, dy: Tensor, u: Tensor, floor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x and dy; a first ReLU is already applied to x.

    The coefficients are [c]; `fused.c` has the terms.
    """
    n, c, h, w = x.shape
    gx, gdy = empty(n, h, w, c), empty(n, h // 2, w // 2, c)
    ins = [x, scale, shift, mean, slope, at_z, at_u, level, base, dy, u]
    each(n, library().fedshot_twice_grad, ins, [h, w, c], [gx, gdy], [floor])
    return gx.permute(0, 3, 1, 2), gdy.permute(0, 3, 1, 2)
