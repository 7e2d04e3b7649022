"""The first block of a Conv4 as one operation.

    y = relu(max_pool2d(batch_norm(conv2d(x, filters)), 2))

It takes channels-last images of one or three channels. The feature map conv2d(x, filters), the
largest tensor of the net, is not stored: its batch statistics follow from the mean and covariance
of the image patches, by the equations in `stem.c`. The gradient and its own gradient do not need it
either. The result equals that of the separate operations up to rounding, and does not depend on the
number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedshot.core.tree import Tree
from fedshot.nn.kernels import fused
from fedshot.nn.kernels import tensors as kernels
from fedshot.nn.kernels.tensors import checked, doubles, empty, library, shared
from fedshot.nn.models.layers import EPS, contiguous
from fedshot.nn.models.mode import Mode

_CHANNELS = (1, 3)  # supported by stem.c
_FILTERS = range(32, 257, 32)
_LONGEST = 512  # most pixels in a row of an image
_GROUP = 8  # images whose gradients are summed together, as in stem.c


def fits(x: Tensor, filters: Tensor) -> bool:
    """Whether the kernels support these images and filters, and the gradients that are needed.

    The kernels have no gradient with respect to images, and no third derivatives.
    """
    return (
        x.shape[1] in _CHANNELS
        and filters.shape[0] in _FILTERS
        and filters.shape[1:] == (x.shape[1], 3, 3)
        and (filters.dtype, filters.device) == (x.dtype, x.device)
        and min(x.shape[-2:]) >= 2
        and x.shape[-1] <= _LONGEST
        and not (x.requires_grad and torch.is_grad_enabled())
        and kernels.readable(x)
    )


def stem(conv_p: Tree, norm_p: Tree, s: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
    """Return (relu(max_pool2d(norm(conv(x)), 2)), statistics), with statistics as in `batch_norm`.

    Args:
        conv_p: filters [f, c, 3, 3] and their bias [f].
        norm_p: scale and shift of the norm.
        s: running statistics, `{}` for none.
        x: images for which `fits` is true.
        mode: which statistics to use; with "given" statistics the result has no gradients.
    """
    filters = contiguous(conv_p["weight"])
    if mode.norm == "given":
        scale, shift = fused.at_given(norm_p, s)
        shift = shift + conv_p["bias"].detach() * scale
        return _given(x, filters.detach() * scale[:, None, None, None], shift), s
    y, mean, var = _Stem.apply(x, filters, norm_p["weight"], norm_p["bias"])  # type: ignore[no-untyped-call]
    # Batch statistics cancel the bias of the convolution: only the running mean includes it.
    return y, fused.after_batch(s, mean, var, conv_p["bias"], x, mode)


class _Stem(torch.autograd.Function):
    """Computes y = relu(max_pool2d(batch_norm(conv2d(x, filters)), 2)), and the batch statistics.

    `weight` and `bias` are those of the norm; the statistics are the mean and the biased variance
    of the convolution's output. Only y has a gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor, weight: Tensor, bias: Tensor) -> Any:
        (n, c, h, w), f = x.shape, len(filters)
        checked(weight, f)
        checked(bias, f)
        rimmed, parts = _room_for_rims(x), doubles(n, 45 * c * c + 9 * c)
        _shared("patches", n, [x], [h, w, c], [rimmed, parts], numbers=x.numel())
        sizes = [doubles(9 * c, 9 * c), doubles(9 * c), doubles(9 * c, f)]
        sizes += [doubles(f), doubles(f)]
        mean, var, shift, folded = empty(f), empty(f), empty(f), empty(9 * c, f)
        _call(
            "stem_norm", [parts, filters, weight, bias], [n, h, w, c, f, EPS],
            [*sizes, mean, var, folded, shift],
        )  # fmt: skip
        y = empty(n, h // 2, w // 2, f)
        won = empty(n, h // 2, w // 2, f, dtype=torch.uint8)
        _shared("stem", n, [rimmed, folded, shift], [h, w, c, f], [y, won], numbers=y.numel())
        ctx.save_for_backward(filters, weight, rimmed, won, *sizes)
        ctx.mark_non_differentiable(mean, var)
        return y.permute(0, 3, 1, 2), mean, var

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> Any:
        return None, *_StemGradient.apply(dy, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class _StemGradient(torch.autograd.Function):
    """The gradient of `_Stem`: (dfilters, dweight, dbias) from (dy, filters, weight).

    It can be differentiated again. W are the filters, m and S the mean and covariance of the image
    patches, and i = 1 / sqrt(var + eps). A and S0 are the sums of dy p and of dy over the maxima of
    the pools, at the patches p:

        S1 = W (A - S0 m),    dW = weight i (A - S0 m - i^2 S1 S W),
        dweight = i S1,       dbias = S0

    `backward` gets u, a and b, the gradients with respect to dW, dweight and dbias, and
    differentiates <u, dW> + a dweight + b dbias. The derivative with respect to dy at a maximum is
    that with respect to A, times p, plus that with respect to S0.
    """

    @staticmethod
    def forward(
        ctx: Any, dy: Tensor, filters: Tensor, weight: Tensor, rimmed: Tensor, won: Tensor,
        *sizes: Tensor,
    ) -> Any:  # fmt: skip
        n, h, w, c, f = *_shape(rimmed), len(filters)
        groups, dy = -(-n // _GROUP), dy.contiguous(memory_format=torch.channels_last)
        parts = doubles(groups, 9 * c + 1, f)
        grads = [torch.empty_like(filters), torch.empty_like(weight), torch.empty_like(weight)]
        _shared(
            "stem_sums", groups, [rimmed, won, dy], [n, h, w, c, f], [parts], numbers=dy.numel()
        )
        _call("stem_grad", [parts, filters, weight, *sizes[1:]], [groups, c, f], grads)
        ctx.save_for_backward(filters, weight, rimmed, won, *sizes, parts[0])
        return tuple(grads)

    @staticmethod
    def backward(ctx: Any, u: Tensor, a: Tensor, b: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(kernels.NO_THIRD)
        filters, weight, rimmed, won, cov, m, by_cov, mu, i, sums = ctx.saved_tensors
        (n, h, w, c), f = _shape(rimmed), len(filters)
        at, u = _by_place(filters), _by_place(u)
        by_patch, s0 = sums[:-1], sums[-1]
        s1, um = (at * by_patch).sum(0) - mu * s0, m @ u
        u_sums, u_cov = (u * by_patch).sum(0) - s0 * um, (u * by_cov).sum(0)
        scale, cubed = weight * i, weight * i**3
        of_s1 = a * i - cubed * u_cov
        of_i = weight * u_sums - 3 * cubed / i * s1 * u_cov + a * s1
        of_sums = torch.cat([scale * u + of_s1 * at, (b - scale * um - of_s1 * mu)[None]]).float()
        of_at = of_s1 * (by_patch - m[:, None] * s0) - cubed * s1 * (cov @ u) - i**3 * of_i * by_cov
        gdy = empty(n, h // 2, w // 2, f)
        ins = [rimmed, of_sums[:-1], of_sums[-1], won]
        _shared("stem_known", n, ins, [h, w, c, f], [gdy], numbers=gdy.numel())
        of_filters = of_at.float().view(3, 3, c, f).permute(3, 2, 0, 1).contiguous()
        of_weight = (i * (u_sums - i * i * s1 * u_cov)).float()
        return gdy.permute(0, 3, 1, 2), of_filters, of_weight, *[None] * 7


def _by_place(filters: Tensor) -> Tensor:
    """Return filters [f, c, 3, 3] as float64 [9 c, f], in the order of a patch."""
    return filters.permute(2, 3, 1, 0).reshape(-1, len(filters)).double()


def _given(x: Tensor, filters: Tensor, shift: Tensor) -> Tensor:
    """Return relu(max_pool2d(conv2d(x, filters) + shift, 2)), without gradients.

    `filters` and `shift` include the batch norm with given statistics.
    """
    (n, c, h, w), f = x.shape, len(filters)
    checked(shift, f)
    rimmed, y = _room_for_rims(x), empty(n, h // 2, w // 2, f)
    _shared("rim", n, [x], [h, w, c], [rimmed], numbers=x.numel())
    folded = filters.permute(2, 3, 1, 0).contiguous()
    _shared("stem", n, [rimmed, folded, shift], [h, w, c, f], [y, None], numbers=y.numel())
    return y.permute(0, 3, 1, 2)


def _room_for_rims(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return empty(n, h + 2, w + 2, c)


def _shape(rimmed: Tensor) -> tuple[int, int, int, int]:
    """Return (n, h, w, c) of the images whose rims `_room_for_rims` made room for."""
    n, h, w, c = rimmed.shape
    return n, h - 2, w - 2, c


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _call(name: str, ins: Sequence[Tensor], rest: Sequence[float], outs: Sequence[Tensor]) -> None:
    """Call the kernel `fedshot_<name>` in this thread; `rest` are its numeric arguments."""
    getattr(library(), f"fedshot_{name}")(*_addresses(ins), *rest, *_addresses(outs))


def _shared(
    name: str, n: int, ins: Sequence[Tensor], sizes: Sequence[int], outs: Sequence[Tensor | None],
    *, numbers: int,
) -> None:  # fmt: skip
    """Run the kernel `fedshot_<name>` over n images, or n groups of images, in several threads.

    `sizes` are its integer arguments. The number of threads depends on `numbers`, the number of
    tensor elements.
    """
    kernel = getattr(library(), f"fedshot_{name}")
    shared(n, kernel, _addresses(ins), sizes, _addresses(outs), numbers=numbers)
