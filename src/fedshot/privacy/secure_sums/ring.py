"""Replies as elements of a ring, where masks hide them and sums are exact.

A part of a reply becomes the integers that its reducer adds (`FixedPoint`), modulo 2**64. Weight
and metrics are floats; each is an integer multiple of 2**-1074, and is added modulo 2**1280. So the
sum has the bits that it has without masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from fedshot.core.tree import Tree
from fedshot.data.dataset import Ints
from fedshot.protocol.exchange import Reply
from fedshot.protocol.reducers import (
    MAX_SUM,
    MAX_WEIGHT,
    FixedPoint,
    Mean,
    Reducer,
    Sum,
)

SCALAR_BYTES = 160  # 2**1280 exceeds 2 * 2**1074 * 2**148 * 2**32: metric times weight, clients
_MODULUS = 1 << 8 * SCALAR_BYTES
_UNIT = 2**1074  # the smallest float is 1 / _UNIT
_NO_NUMBERS = torch.zeros(0, dtype=torch.int64)


@dataclass
class Element:
    """Ring element: `vector`, integers modulo 2**64, int64 [n], and `scalars` modulo 2**1280."""

    vector: Ints
    scalars: list[int]

    @classmethod
    def zero(cls, numbers: int, scalars: int) -> Element:
        """Return a zero: `numbers` integers modulo 2**64 and `scalars` integers modulo 2**1280."""
        return cls(np.zeros(numbers, np.int64), [0] * scalars)

    @property
    def nbytes(self) -> int:
        """Size in bytes of a mask for this element."""
        return self.vector.nbytes + SCALAR_BYTES * len(self.scalars)

    def add(self, other: Element, sign: int = 1) -> None:
        """Add an element (`sign` 1) or subtract it (-1), in place."""
        if sign > 0:
            self.vector += other.vector
        else:
            self.vector -= other.vector
        self.scalars = [
            (a + sign * b) % _MODULUS for a, b in zip(self.scalars, other.scalars, strict=True)
        ]

    def add_mask(self, stream: bytes, sign: int) -> None:
        """Add (`sign` 1) or subtract (-1) a mask of `nbytes` pseudo-random bytes, in place."""
        n = self.vector.nbytes
        own = np.frombuffer(stream, np.dtype("<i8"), len(self.vector)).astype(np.int64, copy=False)
        scalars = [stream[i : i + SCALAR_BYTES] for i in range(n, len(stream), SCALAR_BYTES)]
        self.add(Element(own, [int.from_bytes(one, "little") for one in scalars]), sign)


def to_bytes(scalar: int) -> torch.Tensor:
    """Return a scalar of an element as uint8 [160]."""
    return torch.tensor(list(scalar.to_bytes(SCALAR_BYTES, "little")), dtype=torch.uint8)


def from_bytes(scalar: torch.Tensor) -> int:
    """Return the scalar that `to_bytes` wrote."""
    return int.from_bytes(bytes(scalar.tolist()), "little")


def encode(reduce: Mapping[str, Reducer], cohort: int, reply: Reply) -> Element:
    """Return a reply as an element: its parts, its weight, and its metrics times its weight.

    Args:
        reduce: a `Mean` or `Sum` for each part of the reply. Its `fault` must have accepted the
            part.
        cohort: number of clients whose replies may be added.
        reply: the reply, on the CPU.
    """
    sums, weight = _sums(reduce, cohort), float(reply.weight)
    for name, part in sums.items():
        part.add(0, reply.up[name], weight)
    metrics = [weight * float(reply.metrics[name]) for name in sorted(reply.metrics)]
    vector = torch.cat([part.integers() for part in sums.values()] or [_NO_NUMBERS])
    return Element(vector.numpy(), [_integer(value) for value in (weight, *metrics)])


def n_integers(reduce: Mapping[str, Reducer]) -> int:
    """Return the number of integers modulo 2**64 that a reply's parts become."""
    return sum(len(part.integers()) for part in _sums(reduce, 1).values())


def decode(
    reduce: Mapping[str, Reducer], cohort: int, metrics: Sequence[str], total: Element, clients: int
) -> tuple[dict[str, Tree], float, dict[str, float]]:
    """Return the reduced parts, the sum of the weights, and the means of the metrics.

    Args:
        reduce: as in `encode`.
        cohort: as in `encode`.
        metrics: names of the metrics, sorted.
        total: the sum of the clients' elements.
        clients: number of clients in the sum.

    Raises ValueError if `total` is larger than a sum of valid replies can be.
    """
    weight, *values = (Fraction(_signed(scalar), _UNIT) for scalar in total.scalars)
    large = (total.vector > MAX_SUM) | (total.vector < -MAX_SUM)
    if not 0 < weight <= clients * MAX_WEIGHT or large.any():
        raise ValueError("the sum is larger than valid replies allow")
    parts, end = {}, 0
    for name, part in _sums(reduce, cohort).items():
        first, end = end, end + len(part.integers())
        part.replace(torch.from_numpy(total.vector[first:end]), weight)
        parts[name] = part.result()
    means = {name: float(v) / float(weight) for name, v in zip(metrics, values, strict=True)}
    return parts, float(weight), means


def _sums(reduce: Mapping[str, Reducer], cohort: int) -> dict[str, FixedPoint]:
    """Begin the sum of each part, sorted by name."""
    found = {}
    for name in sorted(reduce):
        reducer = reduce[name]
        assert isinstance(reducer, Mean | Sum), "secure sums refuse other reducers"
        found[name] = reducer.start(cohort)
    return found


def _integer(value: float) -> int:
    over, under = value.as_integer_ratio()
    return over * (_UNIT // under) % _MODULUS


def _signed(scalar: int) -> int:
    return scalar - _MODULUS if scalar >= _MODULUS // 2 else scalar
