"""Batch norm, 2x2 max-pool and ReLU as one operation, for channels-last float32 feature maps.

    y = relu(max_pool2d(batch_norm(x), 2)), or max_pool2d(batch_norm(relu(x)), 2)

As separate operations, each of which reads and writes the feature map, these take as long as the
convolutions of a Conv4. `pooled` reads a feature map twice in the forward pass, and twice in the
backward pass. Its result equals that of the separate operations up to rounding, and does not depend
on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.tree import Tree
from fedshot.nn.kernels.tensors import NO_THIRD, checked, doubles, each, empty, library
from fedshot.nn.models.layers import EPS, MOMENTUM, NO_STATISTICS, too_few
from fedshot.nn.models.mode import Mode


class Cut(NamedTuple):
    """The position of the ReLU: before the norm, if `least` is 0, or after the pool, if `floor` is.

    The other bound is NaN, which means no bound.
    """

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
        x: feature maps, for which `tensors.fits` holds. If `mode.norm` is "given", there are no
            gradients.
        bias: bias of the preceding convolution, if it is not yet added to x. This is allowed only
            if `mode.norm` is "batch" or "capture" and the ReLU is last.
        mode: `mode.norm` says which statistics to use.
        cut: position of the ReLU; with `RELU_FIRST` it is applied to x, not to the result.

    Raises ConfigError if there are fewer than two values per channel, or no given statistics.
    """
    if mode.norm == "given":
        return pooled_given(x, *at_given(p, s), cut), s
    if _values(x) < 2:
        raise ConfigError(too_few(_values(x), x))
    y, mean, var = pooled(x, p["weight"], p["bias"], EPS, cut)
    return y, after_batch(s, mean, var, bias, x, mode)


def at_given(p: Tree, s: Tree) -> tuple[Tensor, Tensor]:
    """Return the scale and shift [c] of batch norm with the statistics `s`, without gradients.

    Raises ConfigError if `s` is `{}`.
    """
    if not s:
        raise ConfigError(NO_STATISTICS)
    scale = (p["weight"] * torch.rsqrt(s["var"] + EPS)).detach()
    return scale, (p["bias"] - s["mean"] * scale).detach()


def after_batch(
    s: Tree, mean: Tensor, var: Tensor, bias: Tensor | None, x: Tensor, mode: Mode
) -> Tree:
    """Return the statistics after a batch x: its own if `mode.norm` is "capture", else s, updated.

    `mean` and `var` are those of x; `bias`, which was left out of x, is added to the mean.
    """
    if mode.norm == "capture":
        return {"mean": mean if bias is None else mean + bias.detach(), "var": var}
    if not s:
        return s
    vectors = [s["mean"], s["var"], mean, var, *([] if bias is None else [bias])]
    vectors = [t.contiguous() for t in vectors]
    c = len(mean)
    for vector in vectors:
        checked(vector, c)
    moved, at = empty(2, c), [t.data_ptr() for t in vectors] + [0] * (bias is None)
    library().fedshot_keep(*at, c, _values(x), MOMENTUM, moved.data_ptr())
    return dict(zip(("mean", "var"), moved, strict=True))


def pooled(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, cut: Cut = RELU_LAST
) -> tuple[Tensor, Tensor, Tensor]:
    """Return max_pool2d(batch_norm(x), 2) with a ReLU where `cut` says, and the batch statistics.

    Args:
        x: [n, c, h, w], for which `tensors.fits` holds.
        weight: scale of the norm [c].
        bias: shift of the norm [c].
        eps: constant added to the variance.
        cut: position of the ReLU, `RELU_LAST` (after the pool) or `RELU_FIRST` (before the norm).

    Returns:
        y [n, c, h // 2, w // 2], and the batch's mean [c] and biased variance [c], without
        gradients.
    """
    y, mean, var = _Pooled.apply(x, weight, bias, eps, cut)  # type: ignore[no-untyped-call]
    return y, mean, var


def pooled_given(x: Tensor, scale: Tensor, shift: Tensor, cut: Cut = RELU_LAST) -> Tensor:
    """Return relu(max_pool2d(x * scale + shift, 2)), without gradients.

    `tensors.fits` must hold for x.
    """
    by = scale.detach().contiguous(), shift.detach().contiguous()
    return _pool(x.detach(), *by, cut)


class _Pooled(torch.autograd.Function):
    """Computes y = max_pool2d(batch_norm(x), 2) with a ReLU, and the batch's mean and variance.

    `pooled` describes arguments and results; only y has a gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, cut: Cut) -> Any:
        by = _fold(x, weight.contiguous(), bias.contiguous(), eps, cut.least)
        ctx.save_for_backward(x, weight, *by)
        ctx.mark_non_differentiable(by.mean, by.var)
        ctx.cut = cut
        return _pool(x, by.scale, by.shift, cut), by.mean, by.var

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> Any:
        x, weight, *sizes = ctx.saved_tensors
        found = _PooledGradient.apply(dy, x, weight, ctx.cut, *sizes)  # type: ignore[no-untyped-call]
        return *found, None, None


class _PooledGradient(torch.autograd.Function):
    """The gradient of `_Pooled`: (dx, dweight, dbias) from (dy, x, weight).

    It can be differentiated again. The gradient dz with respect to the output of batch norm is the
    element of dy at the maximum of each pool, and 0 elsewhere. With S0 and S1 the sums of dz and of
    dz (x - mean) per channel, M the number of values per channel, i = 1 / sqrt(var + eps) and
    s = weight * i:

        dx = s dz - s S0 / M - s i^2 S1 (x - mean) / M,    dweight = i S1,    dbias = S0.

    With `RELU_LAST`, dz is 0 also where the ReLU after the pool gives 0. With `RELU_FIRST`, the
    formulas hold for max(x, 0), the output of the ReLU before batch norm, in place of x; dx is 0
    where the ReLU gives 0.

    `backward` gets u, a and b, the gradients with respect to dx, dweight and dbias. It
    differentiates <u, dx> + a dweight + b dbias, where mean and i depend on x, too.
    """

    @staticmethod
    def forward(ctx: Any, dy: Tensor, x: Tensor, weight: Tensor, cut: Cut, *sizes: Tensor) -> Any:
        by, dy = _Folded(*sizes), dy.contiguous(memory_format=torch.channels_last)
        (n, c, h, w), at = x.shape, (x, by.scale, by.shift, by.mean)
        parts, out, dx = doubles(2, n, c), empty(5, c), empty(n, h, w, c)
        _run("sums", [*at, dy], list(parts), cut)
        sums = [t.data_ptr() for t in (*parts, by.inverse, by.scale)]
        library().fedshot_tilt(*sums, n, _values(x), c, out.data_ptr())
        s0, s1, slope, level, by_weight = out
        _run("grad", [*at, slope, level, dy], [dx], cut)
        ctx.cut = cut
        ctx.save_for_backward(dy, x, weight, *by, s0, s1)
        return dx.permute(0, 3, 1, 2), by_weight, s0

    @staticmethod
    def backward(ctx: Any, u: Tensor, a: Tensor, b: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_THIRD)
        dy, x, weight, mean, _, i, scale, shift, s0, s1 = ctx.saved_tensors
        (n, c, h, w), m, floor = x.shape, _values(x), ctx.cut.floor
        raised = x <= 0 if ctx.cut is RELU_FIRST else None
        if raised is not None:
            x, u = x.masked_fill(raised, 0.0), u.masked_fill(raised, 0.0)
        x, u = (t.contiguous(memory_format=torch.channels_last) for t in (x, u))
        parts = doubles(3, n, c)
        _run("twice_sums", [x, scale, shift, mean, dy, u], list(parts), [floor])
        u0, u1, uz = parts.sum(1).float()
        inner = uz - s0 * u0 / m - i * i * s1 * u1 / m
        of_i = weight * inner - 2 * scale * i * s1 * u1 / m + a * s1
        at_z = a * i - scale * i * i * u1 / m
        at_u = -scale * i * i * s1 / m
        slope, base = -of_i * i**3 / m, b - scale * u0 / m
        level = -(at_z * s0 + at_u * u0) / m
        gx, gdy = empty(n, h, w, c), empty(n, h // 2, w // 2, c)
        ins = [x, scale, shift, mean, slope, at_z, at_u, level, base, dy, u]
        _run("twice_grad", ins, [gx, gdy], [floor])
        gx, gdy = gx.permute(0, 3, 1, 2), gdy.permute(0, 3, 1, 2)
        gx = gx if raised is None else gx.masked_fill(raised, 0.0)
        return gdy, gx, i * inner, *[None] * 6


class _Folded(NamedTuple):
    """Batch norm of a feature map as x * scale + shift; all fields are float32 [c]."""

    mean: Tensor
    var: Tensor  # biased
    inverse: Tensor  # 1 / sqrt(var + eps)
    scale: Tensor  # weight * inverse
    shift: Tensor  # bias - mean * scale


def _fold(x: Tensor, weight: Tensor, bias: Tensor, eps: float, least: float) -> _Folded:
    """Return batch norm of max(x, least), or of x if `least` is NaN, with its batch statistics."""
    n, c, h, w = x.shape
    checked(weight, c)
    checked(bias, c)
    parts, out = doubles(2, n, c), empty(5, c)
    _run("moments", [x], list(parts), [least])
    at = (parts.data_ptr(), weight.data_ptr(), bias.data_ptr())
    library().fedshot_fold(*at, n, h * w, c, eps, out.data_ptr())
    return _Folded(*out)


def _pool(x: Tensor, scale: Tensor, shift: Tensor, cut: Cut) -> Tensor:
    """Return max_pool2d(x * scale + shift, 2), with a ReLU where `cut` says.

    A 2x2 window with a NaN gives NaN.
    """
    n, c, h, w = x.shape
    y = empty(n, h // 2, w // 2, c)
    _run("pool", [x, scale, shift], [y], cut)
    return y.permute(0, 3, 1, 2)


def _run(name: str, ins: list[Tensor], outs: list[Tensor], rule: Sequence[float]) -> None:
    """Run the function `fedshot_<name>` of `fused.c` over the images of the feature maps ins[0].

    `rule` holds the bounds of `Cut` that the function takes.
    """
    _, c, h, w = ins[0].shape
    each(len(ins[0]), getattr(library(), f"fedshot_{name}"), ins, [h, w, c], outs, rule)


def _values(x: Tensor) -> int:
    """Return the number of values per channel of the feature maps x."""
    return x.numel() // x.shape[1]
