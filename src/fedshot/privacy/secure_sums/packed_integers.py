"""Integers modulo 2**bits as bytes, without gaps: bit k of number i is bit i * bits + k."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedshot.data.dataset import Ints

Bytes = NDArray[np.uint8]
_EIGHT = 8  # so many numbers of b bits fill b bytes


def n_bytes(n: int, bits: int) -> int:
    """Return the number of bytes of n packed numbers."""
    return -(-n * bits // 8)


def pack(numbers: Ints, bits: int) -> Bytes:
    """Return numbers, int64 [n], modulo 2**bits as uint8; `bits` is 1 to 56."""
    groups = np.zeros((-(-len(numbers) // _EIGHT), _EIGHT), np.int64)
    groups.reshape(-1)[: len(numbers)] = numbers & ((1 << bits) - 1)
    found = np.zeros((len(groups), bits), np.uint8)
    for i, byte, up in _overlaps(bits):
        shifted = groups[:, i] << up if up >= 0 else groups[:, i] >> -up
        found[:, byte] |= shifted.astype(np.uint8)
    return found.reshape(-1)[: n_bytes(len(numbers), bits)]


def unpack(packed: Bytes, n: int, bits: int) -> Ints:
    """Return the n numbers that `pack` packed, from 0 to 2**bits - 1, int64 [n]."""
    groups = np.zeros((-(-n // _EIGHT), bits), np.uint8)
    groups.reshape(-1)[: len(packed)] = packed
    found = np.zeros((len(groups), _EIGHT), np.int64)
    for i, byte, up in _overlaps(bits):
        part = groups[:, byte].astype(np.int64)
        found[:, i] |= part >> up if up >= 0 else part << -up
    return found.reshape(-1)[:n] & ((1 << bits) - 1)


def _overlaps(bits: int) -> Iterator[tuple[int, int, int]]:
    """Yield, for the numbers and bytes of a group that share bits, both indices and a shift.

    Bit k of the number is bit k + shift of the byte.
    """
    for i in range(_EIGHT):
        first = i * bits
        for byte in range(first // 8, (first + bits - 1) // 8 + 1):
            yield i, byte, first - 8 * byte
