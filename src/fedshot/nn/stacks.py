"""The tensors of all clients under `torch.func.vmap`, for kernels that take them in one call.

A `torch.autograd.Function` could do this too, even under nested transforms. But each of its calls
holds Python's global lock for half a millisecond, longer than a step of Adam for a small net.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch


class Stack(NamedTuple):
    """One active `vmap` over clients: its level among functorch's transforms, and its size."""

    level: int
    size: int

    def whole(self, leaf: Tensor) -> Tensor:
        """Return one tensor [size, ...] with the values that `leaf` has for all clients.

        A tensor that the clients share is expanded without a copy.
        """
        if not _functorch.is_batchedtensor(leaf):
            return leaf.expand(self.size, *leaf.shape)
        return _functorch.get_unwrapped(leaf).movedim(_functorch.maybe_get_bdim(leaf), 0)

    def each(self, whole: Tensor) -> Tensor:
        """Turn a tensor [size, ...] into a `vmap` tensor, of which each client sees its row."""
        return _functorch._add_batch_dim(whole, 0, self.level)


def stacked() -> bool:
    """Whether this code runs under `torch.func.vmap` or another functorch transform."""
    return bool(torch._C._are_functorch_transforms_active())


def plain(leaf: Tensor) -> Tensor:
    """Return the tensor below all functorch wrappers."""
    while _functorch.is_functorch_wrapped_tensor(leaf):
        leaf = _functorch.get_unwrapped(leaf)
    return leaf


def memory(leaf: Tensor) -> int:
    """Return the address of a tensor's storage, below all functorch wrappers."""
    return plain(leaf).untyped_storage().data_ptr()


def is_batched(leaf: Tensor) -> bool:
    """Whether each stacked client has its own value of this tensor."""
    return stacked() and bool(_functorch.is_batchedtensor(leaf))


def stack() -> Stack | None:
    """Return the stack if exactly one `vmap` and no other transform is active; else None."""
    active = _functorch.get_interpreter_stack()
    if active is None or len(active) != 1:
        return None
    (only,) = active
    if only.key() != _functorch.TransformType.Vmap:
        return None
    return Stack(only.level(), _functorch.CVmapInterpreterPtr(only).batchSize())
