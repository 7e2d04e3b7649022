"""Products of several pairs of matrices at once, by torch or, where it is faster, by `products.c`.

On AMD's processors with AVX-512 the library that torch's own builds multiply with, MKL, uses half
of a register. On a Zen 4, the one where this was measured and which adds up the halves one after
the other anyway, it has 0.75 to 0.8 of the speed of `products.c` for the tiles of 64 channels, 0.75
to 0.95 for those of 160. Of 256 and more nothing is left of that: the factors do not stay in the
cache, and laying them out takes as long as it saves.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from fedshot import compiled
from fedshot.nn.kernels import empty, library

_WIDEST = 192  # channels


class Factors:
    """The right factors of many products: b [pairs, n, columns], without gaps between pairs.

    float32 on the CPU, as all here; n and columns are multiples of 16.
    """

    def __init__(self, b: Tensor) -> None:
        self._b, self._packed = b, None
        pairs, n, columns = b.shape
        if _ours(n, columns):
            self._packed = empty(pairs, n, columns)
            sizes = (n, columns, b.stride(1), b.stride(2))
            library().fedshot_products_pack(b.data_ptr(), 0, pairs, *sizes, self._packed.data_ptr())

    def multiply(self, a: Tensor, out: Tensor) -> None:
        """Write a b to out [pairs, rows, columns]; a is [pairs, rows, n], rows without gaps."""
        if self._packed is None:
            torch.bmm(a, self._b, out=out)
            return
        pairs, n, columns = self._b.shape
        sizes = (a.shape[1], n, columns, a.stride(0), out.stride(0))
        library().fedshot_products(
            a.data_ptr(), self._packed.data_ptr(), 0, pairs, *sizes, out.data_ptr()
        )


def sum_products(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """Write a^T b to out [pairs, rows, columns], or add it.

    a is [pairs, n, rows], b [pairs, n, columns], rows without gaps; out has none at all.
    """
    pairs, n, columns = b.shape
    rows = a.shape[2]
    if not _ours(rows, columns):
        torch.baddbmm(out, a.transpose(1, 2), b, beta=float(add), out=out)
        return
    sizes = (rows, n, columns, a.stride(0), b.stride(0), int(add))
    library().fedshot_products_over(a.data_ptr(), b.data_ptr(), 0, pairs, *sizes, out.data_ptr())


def _ours(n: int, columns: int) -> bool:
    return max(n, columns) <= _WIDEST and faster()


@cache
def faster() -> bool:
    """Return whether there is `products.c`, and this a processor on which it is the faster."""
    if compiled.library() is None:
        return False
    found = ctypes.c_int32()
    library().fedshot_products_wanted(ctypes.addressof(found))
    return bool(found.value)
