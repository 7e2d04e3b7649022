"""Draws in float64, and derivatives by differences, to compare gradients with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=Key(seed).torch(), dtype=torch.float64)


def direction(like: Tree, seed: int) -> Tree:
    rng = Key(seed).torch()
    return tree.map(lambda w: torch.randn(w.shape, generator=rng, dtype=w.dtype), like)


def dot(a: Tree, b: Tree) -> Tensor:
    return torch.stack(
        [(x * y).sum() for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)]
    ).sum()


def slope(fn: Callable[[Tree], Tensor], at: Tree, along: Tree, h: float = 1e-6) -> Tensor:
    """Return fn'(at) along a direction, from five points; the error is of order h^4.

    They are close, because a kink of a ReLU between them is a jump of the adapted loss.
    """

    def f(s: float) -> Tensor:
        return fn(tree.map(lambda w, d: w + s * h * d, at, along)).detach()

    return (f(-2) - 8 * f(-1) + 8 * f(1) - f(2)) / (12 * h)
