"""Rows of a product that come more than once, computed once: most words of a text are frequent.

The rows x [n, L, d] are float32 on the CPU. Whatever is linear in them needs only the different
ones, and so does the gradient by its weight, of the sums of the gradients of equal rows.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fedshot.nn.kernels.tensors import library, shared

_WORTH = 0.75  # of the rows, at most, are different where it pays


class Repeats(NamedTuple):
    """The different rows [u, d], and of each of the n L rows which of them it is."""

    rows: Tensor
    which: Tensor

    def spread(self, of_rows: Tensor) -> Tensor:
        """Return [n L, .] of what was computed of the different rows, [u, .]."""
        return of_rows.index_select(0, self.which)

    def gather(self, x: Tensor) -> Tensor:
        """Return the sums [u, .] over equal rows of x [n L, .]."""
        if x.dtype != torch.float32 or x.dim() != 2 or len(x) != len(self.which):
            raise ValueError(f"{x.dtype} {list(x.shape)} are not rows for {len(self.which)}")
        x = x.contiguous()
        sums = x.new_zeros(len(self.rows), x.shape[1])
        ins = [x.data_ptr(), self.which.data_ptr()]
        shared(x.shape[1], library().fedshot_add_rows, ins, x.shape, [sums.data_ptr()])
        return sums


def repeats(x: Tensor) -> Repeats | None:
    """Return what repeats among the rows; None where too little does."""
    n, words, width = x.shape
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.stride(2) != 1:
        return None
    slots = 1 << (2 * n * words).bit_length()
    which, first = torch.empty(2, n * words, dtype=torch.int64, device="cpu")
    table = torch.full((slots,), -1, dtype=torch.int64, device="cpu")
    found = ctypes.c_int64()
    library().fedshot_same_rows(
        x.data_ptr(), n, words, width, x.stride(0), x.stride(1), slots,
        which.data_ptr(), first.data_ptr(), table.data_ptr(), ctypes.addressof(found),
    )  # fmt: skip
    if found.value > _WORTH * n * words:
        return None
    first = first[: found.value]
    return Repeats(x[first // words, first % words], which)
