"""Batched matrix products, on processors where `products.c` is faster than torch.

These are x86 processors with AVX-512. On AMD's, MKL, which torch's builds use for matrix products,
uses only half of each register: on a Zen 4 it reaches 0.75 to 0.8 of the speed of `products.c` for
tiles of 64 channels, and 0.75 to 0.95 for 160. On Intel's the gain is that of `tiles.c`, whose
blocks stay in the cache (see `winograd.py`). From 256 channels there is none: the factors do not
fit into the cache, and packing them takes as long as it saves.
"""

from __future__ import annotations

import ctypes
from functools import cache

from torch import Tensor

from fedshot.core import kernel_build
from fedshot.nn.kernels.tensors import empty, library

_WIDEST = 192  # most channels for which `products.c` is used


def ours(*channels: int) -> bool:
    """Return whether `products.c`, not torch, computes products with these numbers of channels."""
    return max(channels) <= _WIDEST and faster()


def packed(b: Tensor) -> Tensor:
    """Return the right factors b [products, n, columns] in the packed layout of `products.c`.

    They are float32 on the CPU, without gaps between matrices; n and columns are multiples of 16.
    """
    (pairs, n, columns), out = b.shape, empty(*b.shape)
    sizes = (n, columns, b.stride(1), b.stride(2))
    library().fedshot_products_pack(b.data_ptr(), 0, pairs, *sizes, out.data_ptr())
    return out


@cache
def faster() -> bool:
    """Return whether the kernels are available and `products.c` is faster on this processor."""
    if kernel_build.library() is None:
        return False
    found = ctypes.c_int32()
    library().fedshot_products_wanted(ctypes.addressof(found))
    return bool(found.value)
