"""Integers modulo 2**bits as bytes, without gaps: bit k of number i is bit i * bits + k."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedshot.data.dataset import Ints

Bytes = NDArray[np.uint8]
_BLOCK = 1 << 16  # numbers converted at a time, in 64 bytes each; a multiple of 8, for whole bytes


def n_bytes(n: int, bits: int) -> int:
    """Return the number of bytes of n packed numbers."""
    return -(-n * bits // 8)


def pack(numbers: Ints, bits: int) -> Bytes:
    """Return numbers, int64 [n], modulo 2**bits as uint8; `bits` is 1 to 56."""
    found = np.empty(n_bytes(len(numbers), bits), np.uint8)
    for i in range(0, len(numbers), _BLOCK):
        block = numbers[i : i + _BLOCK].astype("<i8").view(np.uint8).reshape(-1, 8)
        digits = np.unpackbits(block, axis=1, count=bits, bitorder="little")
        at = i * bits // 8
        found[at : at + n_bytes(len(block), bits)] = np.packbits(digits, bitorder="little")
    return found


def unpack(packed: Bytes, n: int, bits: int) -> Ints:
    """Return the n numbers that `pack` packed, from 0 to 2**bits - 1, int64 [n]."""
    found = np.empty(n, np.int64)
    for i in range(0, n, _BLOCK):
        size, given = min(_BLOCK, n - i), packed[i * bits // 8 :]
        digits = np.unpackbits(given, count=size * bits, bitorder="little").reshape(size, bits)
        digits = np.pad(digits, ((0, 0), (0, 64 - bits)))
        found[i : i + _BLOCK] = np.packbits(digits, bitorder="little").view("<i8")
    return found
