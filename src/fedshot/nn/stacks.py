"""The stack of clients under `torch.func.vmap`, for kernels whose numbers do not depend on others.

`torch.autograd.Function` would do the same for any nesting of transforms, in half a millisecond a
call under Python's lock: more than a small net's step of Adam.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch


class Stack(NamedTuple):
    """All clients of one `vmap`."""

    level: int
    size: int

    def whole(self, leaf: Tensor) -> Tensor:
        """Return what all clients have, [size, ...]; what they share is repeated without a copy."""
        if not _functorch.is_batchedtensor(leaf):
            return leaf.expand(self.size, *leaf.shape)
        return _functorch.get_unwrapped(leaf).movedim(_functorch.maybe_get_bdim(leaf), 0)

    def each(self, whole: Tensor) -> Tensor:
        """Return a tensor [size, ...] as what each client has of it."""
        return _functorch._add_batch_dim(whole, 0, self.level)


def stacked() -> bool:
    """Whether this code runs under `torch.func.vmap` or another of its transforms."""
    return bool(torch._C._are_functorch_transforms_active())


def memory(leaf: Tensor) -> int:
    """Return where the numbers of a tensor, or of all clients of a stack, begin."""
    while _functorch.is_functorch_wrapped_tensor(leaf):
        leaf = _functorch.get_unwrapped(leaf)
    return leaf.untyped_storage().data_ptr()


def is_batched(leaf: Tensor) -> bool:
    """Whether the clients of a stack have each their own."""
    return stacked() and bool(_functorch.is_batchedtensor(leaf))


def stack() -> Stack | None:
    """Return the stack where one `vmap` is active and no other transform."""
    active = _functorch.get_interpreter_stack()
    if active is None or len(active) != 1:
        return None
    (one,) = active
    if one.key() != _functorch.TransformType.Vmap:
        return None
    return Stack(one.level(), _functorch.CVmapInterpreterPtr(one).batchSize())
