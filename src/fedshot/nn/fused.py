"""Batch norm, 2x2 max-pool and ReLU as one operation, for channels-last maps in float32.

    y = relu(max_pool2d(batch_norm(x), 2))

What stands between two convolutions of a Conv4 takes as long as they do when each operation goes
through memory by itself. `pooled` reads a map twice forwards, and twice backwards. It equals the
separate operations to rounding, and is itself a function of the values alone: of no number of
threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fedshot.errors import ConfigError
from fedshot.nn.compiled import library
from fedshot.nn.layers import EPS, NO_STATISTICS, too_few
from fedshot.nn.mode import Mode
from fedshot.tree import Tree

_MOST_CHANNELS = 1024  # the kernels keep one row of sums on the stack


def fits(x: Tensor) -> bool:
    """Whether the kernels take this map: plain float32 on a CPU, channels last, not under vmap."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.shape[1] <= _MOST_CHANNELS
        and min(x.shape[-2:]) >= 2
        and x.permute(0, 2, 3, 1).is_contiguous()
        and not torch._C._are_functorch_transforms_active()
        and library() is not None
    )


def norm_pool_relu(
    p: Tree, s: Tree, x: Tensor, bias: Tensor | None, mode: Mode
) -> tuple[Tensor, Tree]:
    """Return (relu(max_pool2d(norm(x + bias), 2)), statistics), as `batch_norm` has them.

    Args:
        p: scale and shift of the norm.
        s: running statistics, `{}` for none.
        x: a map that `fits`. Under "given" statistics nobody may differentiate by anything.
        bias: of the convolution that made x, not yet added; for "batch" and "capture".
        mode: which statistics to use.
    """
    if mode.norm == "given":
        if not s:
            raise ConfigError(NO_STATISTICS)
        scale = p["weight"] * torch.rsqrt(s["var"] + EPS)
        return pooled_given(x, scale, p["bias"] - s["mean"] * scale), s
    n = x.numel() // x.shape[1]
    if n < 2:
        raise ConfigError(too_few(n, x))
    y, mean, var = pooled(x, p["weight"], p["bias"], EPS)
    mean = mean if bias is None else mean + bias.detach()
    if mode.norm == "capture":
        return y, {"mean": mean, "var": var}
    if not s:
        return y, s
    keep, unbiased = 1.0 - mode.momentum, var * (n / (n - 1))
    return y, {
        "mean": keep * s["mean"].detach() + mode.momentum * mean,
        "var": keep * s["var"].detach() + mode.momentum * unbiased,
    }


def pooled(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise by the batch's own statistics, pool, and cut at zero.

    Args:
        x: [n, c, h, w], one that `fits`.
        weight: scale [c].
        bias: shift [c].
        eps: added to the variance.

    Returns:
        y [n, c, h // 2, w // 2]; the batch's mean [c] and variance [c] (divided by n h w), which
        carry no gradient.
    """
    y, mean, var = _Pooled.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return y, mean, var


def pooled_given(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return relu(max_pool2d(x * scale + shift, 2)) of a map that `fits`; carries no gradient."""
    return _forward(x.detach(), scale.detach().contiguous(), shift.detach().contiguous())


class _Pooled(torch.autograd.Function):
    """y of (x, weight, bias); mean and variance come along without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
        mean, var = _moments(x)
        inverse = torch.rsqrt(var + eps)
        scale = weight * inverse
        shift = bias - mean * scale
        ctx.save_for_backward(x, weight, bias, mean, inverse, scale, shift)
        ctx.mark_non_differentiable(mean, var)
        return _forward(x, scale, shift), mean, var

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> Any:
        x, weight, bias, *sizes = ctx.saved_tensors
        found = _PooledGradient.apply(dy, x, weight, bias, *sizes)  # type: ignore[no-untyped-call]
        dx, dweight, dbias = found
        return dx, dweight, dbias, None


class _PooledGradient(torch.autograd.Function):
    """dx, dweight and dbias of (dy, x, weight), so that they can be differentiated once more.

    With dz what reaches the winner of a pool, S0 and S1 its sums with 1 and x - mean, M the number
    of values in a channel, i the inverse root of the variance and s = weight * i:

        dx = s dz - s S0 / M - s i^2 S1 (x - mean) / M,    dweight = i S1,    dbias = S0.

    `backward` differentiates <u, dx> + a dweight + b dbias, where the mean and i depend on x too.
    """

    @staticmethod
    def forward(
        ctx: Any, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor,
        inverse: Tensor, scale: Tensor, shift: Tensor,
    ) -> Any:  # fmt: skip
        dy = dy.contiguous(memory_format=torch.channels_last)
        s0, s1 = _sums(x, scale, shift, mean, dy)
        m = x.numel() // x.shape[1]
        slope = -scale * inverse * inverse * s1 / m
        dx = _grad(x, scale, shift, mean, slope, -scale * s0 / m, dy)
        ctx.save_for_backward(dy, x, weight, bias, mean, inverse, scale, shift, s0, s1)
        return dx, s1 * inverse, s0

    @staticmethod
    def backward(ctx: Any, u: Tensor, a: Tensor, b: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("third derivatives are not there; set FEDSHOT_KERNELS=off for them")
        dy, x, weight, _, mean, i, scale, shift, s0, s1 = ctx.saved_tensors
        u = u.contiguous(memory_format=torch.channels_last)
        m = x.numel() // x.shape[1]
        u0, u1, uz = _twice_sums(x, scale, shift, mean, dy, u)
        inner = uz - s0 * u0 / m - i * i * s1 * u1 / m
        of_i = weight * inner - 2 * scale * i * s1 * u1 / m + a * s1
        at_z = a * i - scale * i * i * u1 / m
        at_u = -scale * i * i * s1 / m
        gx, gdy = _twice_grad(
            x, scale, shift, mean,
            slope=-of_i * i**3 / m, at_z=at_z, at_u=at_u,
            level=-(at_z * s0 + at_u * u0) / m, base=b - scale * u0 / m, dy=dy, u=u,
        )  # fmt: skip
        return gdy, gx, i * inner, None, None, None, None, None


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    n, c, h, w = x.shape
    parts = torch.empty(2, n, c, dtype=torch.float64)
    mean, var = torch.empty(c), torch.empty(c)
    _each(n, _kernels().fedshot_moments, [x], [h * w, c], [parts[0], parts[1]])
    _kernels().fedshot_merge(
        parts[0].data_ptr(), parts[1].data_ptr(), n, h * w, c, mean.data_ptr(), var.data_ptr()
    )
    return mean, var


def _forward(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    n, c, h, w = x.shape
    y = torch.empty(n, h // 2, w // 2, c)
    _each(n, _kernels().fedshot_pool, [x, scale, shift], [h, w, c], [y])
    return y.permute(0, 3, 1, 2)


def _sums(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor]:
    n, c, h, w = x.shape
    parts = torch.empty(2, n, c, dtype=torch.float64)
    sizes, outs = [h, w, c], [parts[0], parts[1]]
    _each(n, _kernels().fedshot_sums, [x, scale, shift, mean, dy], sizes, outs)
    dz, dzx = parts.sum(1).float()
    return dz, dzx


def _grad(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, slope: Tensor, level: Tensor, dy: Tensor
) -> Tensor:
    n, c, h, w = x.shape
    dx = torch.empty(n, h, w, c)
    ins = [x, scale, shift, mean, slope, level, dy]
    _each(n, _kernels().fedshot_grad, ins, [h, w, c], [dx])
    return dx.permute(0, 3, 1, 2)


def _twice_sums(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, dy: Tensor, u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    n, c, h, w = x.shape
    parts = torch.empty(3, n, c, dtype=torch.float64)
    ins = [x, scale, shift, mean, dy, u]
    _each(n, _kernels().fedshot_twice_sums, ins, [h, w, c], list(parts))
    u0, u1, uz = parts.sum(1).float()
    return u0, u1, uz


def _twice_grad(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, *, slope: Tensor, at_z: Tensor,
    at_u: Tensor, level: Tensor, base: Tensor, dy: Tensor, u: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n, c, h, w = x.shape
    gx, gdy = torch.empty(n, h, w, c), torch.empty(n, h // 2, w // 2, c)
    ins = [x, scale, shift, mean, slope, at_z, at_u, level, base, dy, u]
    _each(n, _kernels().fedshot_twice_grad, ins, [h, w, c], [gx, gdy])
    return gx.permute(0, 3, 1, 2), gdy.permute(0, 3, 1, 2)


def _kernels() -> ctypes.CDLL:
    found = library()
    assert found is not None
    return found


def _each(
    n: int, kernel: Callable[..., None], ins: list[Tensor], sizes: list[int], outs: list[Tensor]
) -> None:
    """Run a kernel over n images, shared among as many threads as torch uses."""
    before, after = [t.data_ptr() for t in ins], [t.data_ptr() for t in outs]
    threads = min(torch.get_num_threads(), n)
    if threads == 1:
        kernel(*before, 0, n, *sizes, *after)
        return
    cuts = [n * i // threads for i in range(threads + 1)]
    shares = [
        _pool(threads).submit(kernel, *before, first, last, *sizes, *after)
        for first, last in pairwise(cuts)
    ]
    for share in shares:
        share.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="fedshot-kernel")
