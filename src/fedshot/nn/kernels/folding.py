"""Batch norm of a map as x * scale + shift, per channel, and the way back, by the C kernels.

What is computed per channel takes a call each, not a dozen operations on short vectors: those of a
Conv4 took as long as its Adam. Maps and vectors are as `kernels` has them, and x is [n, c, h, w].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedshot.nn.kernels.tensors import NAN, check_vector, each, empty, library


class Folded(NamedTuple):
    """What a map is normalised by, all float32 [c]."""

    mean: Tensor
    var: Tensor  # divided by all values
    inverse: Tensor  # 1 / sqrt(var + eps)
    scale: Tensor  # weight * inverse
    shift: Tensor  # bias - mean * scale


class Tilted(NamedTuple):
    """The way back through a norm, all float32 [c]: dx = scale * dz + slope * (x - mean) + level.

    dz is what reaches x * scale + shift.
    """

    s0: Tensor  # the sum of dz, which is the derivative by the bias
    s1: Tensor  # the sum of dz * (x - mean)
    slope: Tensor
    level: Tensor
    by_weight: Tensor


def fold(x: Tensor, weight: Tensor, bias: Tensor, eps: float, least: float = NAN) -> Folded:
    """Return the norm of x, raised to `least`, by its own statistics, with scale and shift [c]."""
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
    """Return the way back from the sums over each image, float64 [n, c], of dz and dz (x - mean).

    `values` are those of a channel in all images.
    """
    n, c = dz.shape
    out = empty(5, c)
    at = [t.data_ptr() for t in (dz, dzx, by.inverse, by.scale)]
    library().fedshot_tilt(*at, n, values, c, out.data_ptr())
    return Tilted(*out.unbind(0))


def values_of(x: Tensor) -> int:
    """Return how many values a channel of maps or rows has."""
    return x.numel() // x.shape[1]


def keep(
    kept: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], bias: Tensor | None, momentum: float,
    values: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return running mean and variance [c], moved towards those of a batch by `momentum`.

    Args:
        kept: mean and variance so far.
        new: those of the batch, the variance divided by all `values` of a channel.
        bias: added to the batch's mean; None for none.
        momentum: the share of the batch.
        values: of a channel, at least 2.
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
