"""The l1 penalty, and an encoding of sparse trees.

A packed tree consists of a bit for each entry of its tensors, set if the entry is not zero, and of
the nonzero entries. In float32 the bits take 1/32 of the tree's size. Packing is lossless.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.nn.optim import Optimizer, OptState


class Packed(NamedTuple):
    """A tree without its zeros; to unpack it, the receiver must know the tree's structure."""

    mask: Tensor  # uint8 [ceil(n / 8)], bit i % 8 of byte i // 8 for entry i
    values: Tensor  # the nonzero entries, in the order of the leaves


def l1_norm(params: Tree, *, norms: bool) -> Tensor:
    """Return the sum of |w|, a scalar whose gradient is 0 where w is 0.

    `norms` tells whether to include the weights of batch norm.
    """
    return torch.stack([w.abs().sum() for w in penalised(params, norms=norms)]).sum()


def penalised(params: Tree, *, norms: bool) -> list[Tensor]:
    """Return the leaves that the penalty includes; `norms` as in `l1_norm`."""
    return [w for path, w in tree.items(params) if norms or not _of_norm(path)]


def _of_norm(path: str) -> bool:
    return path.split("/")[-2:][0].startswith("norm")


@dataclass(frozen=True)
class SoftThreshold:
    """An optimiser that ends each step with w <- sign(w) max(|w| - lr * weight, 0).

    With SGD this is the proximal gradient method for loss + weight * ||w||_1 (ISTA; Beck &
    Teboulle 2009, eq. (1.4)). Unlike a subgradient, it sets weights to exactly 0. `norms` tells
    whether to include the weights of batch norm.
    """

    optimizer: Optimizer
    weight: float
    norms: bool = False

    def init(self, params: Tree) -> OptState:
        """Return the state before the first step."""
        return self.optimizer.init(params)

    def update(
        self, grads: Tree, state: OptState, params: Tree, *, reuse: bool = False
    ) -> tuple[Tree, OptState]:
        """Return (parameters, state) after one step."""
        params, state = self.optimizer.update(grads, state, params, reuse=reuse)
        least = self.optimizer.lr * self.weight
        chosen = {id(w) for w in penalised(params, norms=self.norms)}

        def shrink(w: Tensor) -> Tensor:
            return w.sign() * (w.abs() - least).clamp_min(0) if id(w) in chosen else w

        return tree.map(shrink, params), state


def share_below(params: Tree, bound: float) -> Tensor:
    """Return the fraction of weights with |w| < bound, or of zeros if the bound is 0; a scalar."""
    every = [w.abs() < bound if bound else w == 0 for w in tree.leaves(params)]
    n = sum(w.numel() for w in every)
    return torch.stack([w.sum() for w in every]).sum() / n


def pack(content: Tree) -> Packed:
    """Return the nonzero values of a tree and their positions. All leaves have the same dtype.

    It does not work under `vmap`, because the size of the result depends on the values.
    """
    flat = tree.flat(content)
    there = flat != 0
    padded = torch.zeros(8 * _bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
    padded[: flat.numel()] = there
    mask = (padded.view(-1, 8) << torch.arange(8, device=flat.device)).sum(1).to(torch.uint8)
    return Packed(mask, flat[there])


def unpack(packed: Packed, like: Tree) -> Tree:
    """Return the tree that was packed; `like` has its structure, shapes and dtype."""
    n = sum(leaf.numel() for leaf in tree.leaves(like))
    there = _bits(packed.mask)[:n]
    place = there.cumsum(0).clamp_min(1) - 1
    padded = torch.cat([packed.values, packed.values.new_zeros(1)])
    flat = torch.where(there, padded[place.clamp_max(len(padded) - 1)], 0.0)
    return tree.shaped(flat, like)


def packing_flaw(packed: Tree, like: Tree) -> str | None:
    """Return why `packed` cannot be unpacked into a tree like `like`; None if it can."""
    leaves = tree.leaves(like)
    n, dtype = sum(leaf.numel() for leaf in leaves), leaves[0].dtype
    if not isinstance(packed, Packed):
        return f"expected a packed tree, got {type(packed).__name__}"
    wanted = (torch.uint8, (_bytes(n),), dtype, 1)
    if (packed.mask.dtype, tuple(packed.mask.shape), packed.values.dtype, packed.values.ndim) != (
        wanted
    ):
        return (
            f"mask is {tree.form(packed.mask)} and values {tree.form(packed.values)}, expected "
            f"uint8[{_bytes(n)}] and one row of {str(dtype).removeprefix('torch.')}"
        )
    bits = _bits(packed.mask)
    if int(bits.sum()) != len(packed.values) or bool(bits[n:].any()):
        marked = int(bits.sum())
        return f"the mask marks {marked} of {n} numbers, but there are {len(packed.values)} values"
    return None


def _bytes(n: int) -> int:
    return math.ceil(n / 8)


def _bits(mask: Tensor) -> Tensor:
    return ((mask[:, None] >> torch.arange(8, device=mask.device)) & 1).bool().view(-1)
