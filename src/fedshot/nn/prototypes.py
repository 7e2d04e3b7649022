"""Prototypes: class means, and classification by distances to them."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshot.nn.masking import mask_logits

_TINY = 1e-8  # lower bound of a squared norm, so that a zero row has a finite gradient


def members(y: Tensor, way: int) -> Tensor:
    """Return a bool mask [way, n] that marks the labels y [n] of each class.

    Labels outside [0, way) belong to no class, so the label -1 leaves an example out.
    """
    return y[None, :] == torch.arange(way, device=y.device)[:, None]


def class_means(h: Tensor, y: Tensor, way: int) -> Tensor:
    """Return the mean feature of each class, [way, d]; zeros for a class without examples.

    `h` is [n, d], `y` int64 [n], with labels as in `members`.
    """
    member = members(y, way).to(h.dtype)
    count = member.sum(1, keepdim=True).clamp_min(1.0)
    return (member @ h) / count


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return ||a_i - b_j||^2, [n, m], from a [n, d] and b [m, d].

    They are computed from the differences, because |a|^2 - 2ab + |b|^2 loses all digits (and the
    sign) for close points. This needs memory for n * m * d numbers.
    """
    return (a[:, None, :] - b[None, :, :]).square().sum(-1)


def prototype_logits(h: Tensor, means: Tensor) -> Tensor:
    """Return minus the squared distances to the means, [n, way]: Snell et al. 2017, eq. (2)."""
    return -squared_distances(h, means)


def nearest_prototypes(support: Tensor, y: Tensor, query: Tensor, way: int) -> Tensor:
    """Return the logits [n, way] of query features [n, d]: minus squared distances to class means.

    The means are those of the support features, whose labels are y. A class without support
    examples is never predicted.
    """
    return mask_logits(
        prototype_logits(query, class_means(support, y, way)), members(y, way).any(1)
    )


def cosine_logits(h: Tensor, means: Tensor, scale: float | Tensor) -> Tensor:
    """Return scale times the cosine between rows of h [n, d] and means [way, d]."""
    return scale * (unit_rows(h) @ unit_rows(means).T)


def unit_rows(rows: Tensor) -> Tensor:
    """Return the rows scaled to length 1; rows shorter than 1e-4 are divided by 1e-4 instead."""
    return rows * rows.square().sum(-1, keepdim=True).clamp_min(_TINY).rsqrt()
