"""Linear maps that compute equal rows only once, because texts repeat their frequent words.

The rows x [n, L, d] are float32 on the CPU. A linear map is computed for the distinct rows only;
the gradient of its weight needs the distinct rows and the sums of gradients over equal rows.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fedshot.nn.kernels.tensors import library, shared

_WORTH = 0.75  # largest share of distinct rows for which this is faster


class Repeats(NamedTuple):
    """The distinct rows of texts [n, L, d].

    `rows` are the u distinct rows, [u, d]. `which` [n * L] has each row's index in `rows`.
    """

    rows: Tensor
    which: Tensor

    def spread(self, of_rows: Tensor) -> Tensor:
        """Return the values [n * L, k] of all rows, from those of the distinct rows, [u, k]."""
        return of_rows.index_select(0, self.which)

    def gather(self, x: Tensor) -> Tensor:
        """Return [u, k]: for each distinct row, the sum of x [n * L, k] over its occurrences."""
        if x.dtype != torch.float32 or x.dim() != 2 or len(x) != len(self.which):
            raise ValueError(
                f"rows are {x.dtype} {list(x.shape)}; expected float32 [{len(self.which)}, .]"
            )
        x = x.contiguous()
        sums = x.new_zeros(len(self.rows), x.shape[1])
        ins = [x.data_ptr(), self.which.data_ptr()]
        shared(x.shape[1], library().fedshot_add_rows, ins, x.shape, [sums.data_ptr()])
        return sums


def repeats(x: Tensor) -> Repeats | None:
    """Return the distinct rows of x [n, L, d].

    Returns None if too few rows repeat, or if the kernel cannot read x.
    """
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
