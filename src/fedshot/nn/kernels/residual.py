"""Batch norm and leaky ReLU between the convolutions of a residual block, each in one operation.

    norm_leaky   y = leaky(batch_norm(x))
    join         y = leaky(max_pool2d(batch_norm(x) + batch_norm(r), 2)), the end of a block

The C kernels of `residual.c` take channels-last float32 maps for which `tensors.fits` holds;
`resnet.py` has the torch operations. Results agree to rounding and do not depend on the number of
threads. The kernels are about as fast as torch, but save one map for the backward pass, not up to
three. First derivatives are closed forms; with dz the gradient with respect to x * scale + shift,
S0 and S1 the sums of dz and of dz (x - mean), M the number of values per channel,
i = 1 / sqrt(var + eps) and s = weight * i:

    dx = s dz - s S0 / M - s i^2 S1 (x - mean) / M,    dweight = i S1,    dbias = S0.

Gradients that are differentiated again are computed by torch operations.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch import Tensor

from fedshot.core.tree import Tree
from fedshot.nn.gradients import with_graph
from fedshot.nn.kernels.folding import Folded, fold, tilt, values_of
from fedshot.nn.kernels.fused import after_batch, at_given, check_enough
from fedshot.nn.kernels.tensors import each, empty, library
from fedshot.nn.models.layers import EPS
from fedshot.nn.models.mode import Mode


class Normed(NamedTuple):
    """A map, and the batch norm applied to it."""

    x: Tensor  # [n, c, h, w], for which `tensors.fits` holds
    p: Tree  # scale and shift of the norm
    s: Tree  # running statistics, {} for none


def norm_leaky(of: Normed, lean: float, mode: Mode) -> tuple[Tensor, Tree]:
    """Return (leaky(norm(x)), statistics), with statistics as in `layers.batch_norm`.

    `lean` is the slope of the leaky ReLU below 0. With "given" statistics there are no gradients.
    """
    x, p, s = of
    if mode.norm == "given":
        return _leaky(x.detach(), *at_given(p, s), lean), s
    check_enough(x)
    y, mean, var = _NormLeaky.apply(x, p["weight"], p["bias"], lean)  # type: ignore[no-untyped-call]
    return y, after_batch(s, mean, var, None, x, mode)


def join(a: Normed, b: Normed, lean: float, mode: Mode) -> tuple[Tensor, Tree, Tree]:
    """Return (leaky(max_pool2d(norm(a) + norm(b), 2)), statistics of a, of b)."""
    if mode.norm == "given":
        (s, s_shift), (t, t_shift) = at_given(a.p, a.s), at_given(b.p, b.s)
        y = _join(a.x.detach(), b.x.detach(), s, t, s_shift + t_shift, lean)
        return y, a.s, b.s
    check_enough(a.x)
    weights = (a.p["weight"], a.p["bias"], b.p["weight"], b.p["bias"])
    y, *got = _Join.apply(a.x, b.x, *weights, lean)  # type: ignore[no-untyped-call]
    mean, var, mid, spread = got
    of_a, of_b = (mean, var, None, a.x, mode), (mid, spread, None, b.x, mode)
    return y, after_batch(a.s, *of_a), after_batch(b.s, *of_b)


def _plain_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, True, 0.0, EPS)


def _plain_leaky(lean: float, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.leaky_relu(_plain_norm(x, weight, bias), lean)


def _plain_join(
    lean: float, x: Tensor, r: Tensor, weight: Tensor, bias: Tensor, weight_r: Tensor,
    bias_r: Tensor,
) -> Tensor:  # fmt: skip
    both = _plain_norm(x, weight, bias) + _plain_norm(r, weight_r, bias_r)
    return F.leaky_relu(F.max_pool2d(both, 2), lean)


class _NormLeaky(torch.autograd.Function):
    """y from (x, weight, bias), with mean and variance, which have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, lean: float) -> Any:
        by = fold(x, weight, bias, EPS)
        ctx.lean = lean
        ctx.save_for_backward(x, weight, bias, *by)
        ctx.mark_non_differentiable(by.mean, by.var)
        return _leaky(x, by.scale, by.shift, lean), by.mean, by.var

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> Any:
        x, weight, bias, *sizes = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *with_graph(partial(_plain_leaky, ctx.lean), (x, weight, bias), dy), None
        by, dy = Folded(*sizes), dy.contiguous(memory_format=torch.channels_last)
        ins = (x, by.scale, by.shift, by.mean)
        back = tilt(*_leaky_sums(*ins, dy, lean=ctx.lean), by, values_of(x))
        dx = _leaky_grad(*ins, back.slope, back.level, dy, lean=ctx.lean)
        return dx, back.by_weight, back.s0, None


class _Join(torch.autograd.Function):
    """y from (x, r, weights and biases of both), with means and variances without gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, r: Tensor, weight: Tensor, bias: Tensor, weight_r: Tensor,
        bias_r: Tensor, lean: float,
    ) -> Any:  # fmt: skip
        a, b = fold(x, weight, bias, EPS), fold(r, weight_r, bias_r, EPS)
        ctx.lean = lean
        ctx.save_for_backward(x, r, weight, bias, weight_r, bias_r, *a, *b)
        statistics = (a.mean, a.var, b.mean, b.var)
        ctx.mark_non_differentiable(*statistics)
        return _join(x, r, a.scale, b.scale, a.shift + b.shift, lean), *statistics

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> Any:
        x, r, weight, bias, weight_r, bias_r, *sizes = ctx.saved_tensors
        if torch.is_grad_enabled():
            points = (x, r, weight, bias, weight_r, bias_r)
            return *with_graph(partial(_plain_join, ctx.lean), points, dy), None
        a, b = Folded(*sizes[:5]), Folded(*sizes[5:])
        dy = dy.contiguous(memory_format=torch.channels_last)
        ins = (x, r, a.scale, b.scale, a.shift + b.shift, a.mean, b.mean)
        dz, dzx, dzr = _join_sums(*ins, dy, lean=ctx.lean)
        to_a, to_b = tilt(dz, dzx, a, values_of(x)), tilt(dz, dzr, b, values_of(r))
        tilts = (to_a.slope, to_a.level, to_b.slope, to_b.level)
        dx, dr = _join_grad(*ins, *tilts, dy, lean=ctx.lean)
        return dx, dr, to_a.by_weight, to_a.s0, to_b.by_weight, to_b.s0, None


def _leaky(x: Tensor, scale: Tensor, shift: Tensor, lean: float) -> Tensor:
    n, c, h, w = x.shape
    y = empty(n, h, w, c)
    each(n, library().fedshot_leaky, [x, scale, shift], [h * w, c], [y], [lean])
    return y.permute(0, 3, 1, 2)


def _leaky_sums(x: Tensor, *others: Tensor, lean: float) -> tuple[Tensor, Tensor]:
    """Return the sums of dz and of dz * (x - mean) over each image, float64 [n, c].

    `others` are scale, shift, mean and dy.
    """
    n, c, h, w = x.shape
    dz, dzx = empty(2, n, c, dtype=torch.float64).unbind(0)
    each(n, library().fedshot_leaky_sums, [x, *others], [h * w, c], [dz, dzx], [lean])
    return dz, dzx


def _leaky_grad(x: Tensor, *others: Tensor, lean: float) -> Tensor:
    """Return dx; `others` are scale, shift, mean, slope, level and dy."""
    n, c, h, w = x.shape
    dx = empty(n, h, w, c)
    each(n, library().fedshot_leaky_grad, [x, *others], [h * w, c], [dx], [lean])
    return dx.permute(0, 3, 1, 2)


def _join(x: Tensor, r: Tensor, s: Tensor, t: Tensor, shift: Tensor, lean: float) -> Tensor:
    n, c, h, w = x.shape
    y = empty(n, h // 2, w // 2, c)
    each(n, library().fedshot_join, [x, r, s, t, shift], [h, w, c], [y], [lean])
    return y.permute(0, 3, 1, 2)


def _join_sums(x: Tensor, *others: Tensor, lean: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of dz, dz * (x - mean) and dz * (r - mean) over each image, float64 [n, c].

    `others` are r, s, t, shift, both means and dy.
    """
    n, c, h, w = x.shape
    dz, dzx, dzr = empty(3, n, c, dtype=torch.float64).unbind(0)
    each(n, library().fedshot_join_sums, [x, *others], [h, w, c], [dz, dzx, dzr], [lean])
    return dz, dzx, dzr


def _join_grad(x: Tensor, *others: Tensor, lean: float) -> tuple[Tensor, Tensor]:
    """Return dx and dr; `others` are r, s, t, shift, means, slope and level of both, and dy."""
    n, c, h, w = x.shape
    dx, dr = empty(n, h, w, c), empty(n, h, w, c)
    each(n, library().fedshot_join_grad, [x, *others], [h, w, c], [dx, dr], [lean])
    return dx.permute(0, 3, 1, 2), dr.permute(0, 3, 1, 2)
