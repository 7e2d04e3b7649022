"""Products of several pairs of matrices at once: where `products.c` is faster than torch.

On AMD's processors with AVX-512 the library that torch's own builds multiply with, MKL, uses half
of a register. On a Zen 4, the one where this was measured and which adds up the halves one after
the other anyway, it has 0.75 to 0.8 of the speed of `products.c` for the tiles of 64 channels, 0.75
to 0.95 for those of 160. Of 256 and more nothing is left of that: the factors do not stay in the
cache, and laying them out takes as long as it saves.
"""

from __future__ import annotations

import ctypes
from functools import cache

from torch import Tensor

from fedshot.core import kernel_build
from fedshot.nn.kernels.tensors import empty, library

_WIDEST = 192  # channels


def ours(*channels: int) -> bool:
    """Return whether products of so many rows and columns are made by `products.c`."""
    return max(channels) <= _WIDEST and faster()


def packed(b: Tensor) -> Tensor:
    """Return the right factors of products, b [pairs, n, columns], laid out as `products.c` reads.

    float32 on the CPU, without gaps between pairs; n and columns are multiples of 16.
    """
    (pairs, n, columns), out = b.shape, empty(*b.shape)
    sizes = (n, columns, b.stride(1), b.stride(2))
    library().fedshot_products_pack(b.data_ptr(), 0, pairs, *sizes, out.data_ptr())
    return out


@cache
def faster() -> bool:
    """Return whether there is `products.c`, and this a processor on which it is the faster."""
    if kernel_build.library() is None:
        return False
    found = ctypes.c_int32()
    library().fedshot_products_wanted(ctypes.addressof(found))
    return bool(found.value)
