"""The per-channel numbers of batch norm, computed in C: batch norm is x * scale + shift.

One call replaces a dozen operations on short vectors, which took as long as Adam for a Conv4. Maps
x are [n, c, h, w]; see `tensors` for the layout.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedshot.nn.kernels.tensors import check_vector, each, empty, library


class Folded(NamedTuple):
    """Batch norm of a map as x * scale + shift; all are float32 [c]."""

    mean: Tensor
    var: Tensor  # biased
    inverse: Tensor  # 1 / sqrt(var + eps)
    scale: Tensor  # weight * inverse
    shift: Tensor  # bias - mean * scale


class Tilted(NamedTuple):
    """The backward pass of batch norm, all float32 [c]: dx = scale dz + slope (x - mean) + level.

    dz is the gradient with respect to x * scale + shift.
    """

    s0: Tensor  # the sum of dz, which is the gradient of the bias
    s1: Tensor  # the sum of dz * (x - mean)
    slope: Tensor
    level: Tensor
    by_weight: Tensor


def fold(x: Tensor, weight: Tensor, bias: Tensor, eps: float, least: float = math.nan) -> Folded:
    """Return batch norm of max(x, least) by batch statistics; `least` NaN leaves x as it is."""
    n, c, h, w = x.shape
    weight, bias = weight.contiguous(), bias.contiguous()
    check_vector(weight, c)
    check_vector(bias, c)
    parts, out = empty(2, n, c, dtype=torch.float64), empty(5, c)
    each(n, library().fedshot_moments, [x], [h * w, c], parts.unbind(0), [least])
    at = (parts.data_ptr(), weight.data_ptr(), bias.data_ptr())
    library().fedshot_fold(*at, n, h * w, c, eps, out.data_ptr())
    return Folded(*out.unbind(0))


def tilt(dz: Tensor, dzx: Tensor, by: Folded, values: int) -> Tilted:
    """Return the numbers for the backward pass from the sums of dz and dz * (x - mean).

    The sums, over each image, are float64 [n, c]; `values` is the number of values per channel.
    """
    n, c = dz.shape
    out = empty(5, c)
    at = [t.data_ptr() for t in (dz, dzx, by.inverse, by.scale)]
    library().fedshot_tilt(*at, n, values, c, out.data_ptr())
    return Tilted(*out.unbind(0))


def values_of(x: Tensor) -> int:
    """Return the number of values per channel."""
    return x.numel() // x.shape[1]


def keep(
    kept: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], bias: Tensor | None, momentum: float,
    values: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return running mean and variance [c], updated by those of a batch.

    Args:
        kept: running mean and variance.
        new: mean and biased variance of the batch.
        bias: vector that is added to the batch mean, or None.
        momentum: weight of the batch.
        values: number of values per channel, at least 2.
    """
    vectors = [t.contiguous() for t in (*kept, *new, *([] if bias is None else [bias]))]
    c = len(vectors[0])
    for vector in vectors:
        check_vector(vector, c)
    out = empty(2, c)
    at = [t.data_ptr() for t in vectors] + [0] * (bias is None)
    library().fedshot_keep(*at, c, values, momentum, out.data_ptr())
    mean, var = out.unbind(0)
    return mean, var
