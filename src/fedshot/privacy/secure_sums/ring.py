"""Replies as elements of a ring, where masks hide them and sums are exact.

A part of a reply becomes the integers that its reducer adds (`FixedPoint`), modulo 2**64. Weight
and metrics are floats; each is an integer multiple of 2**-1074, and is added modulo 2**1280. So the
sum has the bits that it has without masks.

Integers of a `Grid` are small. They are masked as the others, and sent modulo the least power of
two that holds their sum: a mask modulo 2**64 is one modulo 2**m, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.data.dataset import Ints
from fedshot.privacy.secure_sums.packed_integers import n_bytes, pack, unpack
from fedshot.protocol.exchange import Reply
from fedshot.protocol.reducers import (
    MAX_SUM,
    MAX_WEIGHT,
    FixedPoint,
    Grid,
    Mean,
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


@dataclass(frozen=True)
class Layout:
    """How the integers of an element are sent.

    Args:
        short: whether an integer is one of a grid, bool [n].
        most: largest integer of the grid that a client adds.
        bits: integers of the grid are sent modulo 2**bits, the others modulo 2**64.
    """

    short: NDArray[np.bool_]
    most: int
    bits: int

    @classmethod
    def of(cls, reduce: Mapping[str, Mean | Sum], cohort: int) -> Layout:
        """Return the layout for the parts of replies that `reduce` combines, as in `encode`."""
        each, grids = [np.zeros(0, bool)], list[Grid]()
        for _, reducer in sorted(reduce.items()):
            grid = reducer.grid or Grid(1, {})
            each += [
                np.full(leaf.numel(), path in grid.ranges)
                for path, leaf in tree.items(reducer.like)
            ]
            grids += [grid] if reducer.grid else []
        most, bits = max(((g.most, g.bits(cohort)) for g in grids), default=(0, 1))
        return cls(np.concatenate(each), most, bits)

    def like(self) -> dict[str, torch.Tensor]:
        """Return tensors of the form of those that `sent` returns."""
        n = int(self.short.sum())
        return {
            "vector": torch.empty(len(self.short) - n, dtype=torch.int64, device="meta"),
            "packed": torch.empty(n_bytes(n, self.bits), dtype=torch.uint8, device="meta"),
        }

    def sent(self, vector: Ints) -> dict[str, torch.Tensor]:
        """Return integers, int64 [n], as they are sent."""
        return {
            "vector": torch.from_numpy(vector[~self.short]),
            "packed": torch.from_numpy(pack(vector[self.short], self.bits)),
        }

    def received(self, sent: Mapping[str, torch.Tensor]) -> Ints:
        """Return the integers that `sent` returned; those of a grid modulo 2**bits."""
        found = np.empty(len(self.short), np.int64)
        found[~self.short] = sent["vector"].numpy()
        found[self.short] = unpack(sent["packed"].numpy(), int(self.short.sum()), self.bits)
        return found

    def summed(self, vector: Ints, clients: int) -> Ints:
        """Return the sum of `clients` elements, from its integers modulo 2**bits and 2**64.

        Raises ValueError if it is larger than a sum of valid replies can be.
        """
        half = 1 << (self.bits - 1)
        signed = ((vector & (2 * half - 1)) ^ half) - half
        found = np.where(self.short, signed, vector)
        most = np.where(self.short, self.most * clients, MAX_SUM)
        if ((found > most) | (found < -most)).any():
            raise ValueError("the sum is larger than valid replies allow")
        return found


def to_bytes(scalar: int) -> torch.Tensor:
    """Return a scalar of an element as uint8 [160]."""
    return torch.tensor(list(scalar.to_bytes(SCALAR_BYTES, "little")), dtype=torch.uint8)


def from_bytes(scalar: torch.Tensor) -> int:
    """Return the scalar that `to_bytes` wrote."""
    return int.from_bytes(bytes(scalar.tolist()), "little")


def encode(reduce: Mapping[str, Mean | Sum], cohort: int, reply: Reply) -> Element:
    """Return a reply as an element: its parts, its weight, and its metrics times its weight.

    Args:
        reduce: the reducer of each part of the reply. Its `fault` must have accepted the part.
        cohort: number of clients whose replies may be added.
        reply: the reply, on the CPU.
    """
    sums, weight = _sums(reduce, cohort), float(reply.weight)
    for name, part in sums.items():
        part.add(0, reply.up[name], weight)
    metrics = [weight * float(reply.metrics[name]) for name in sorted(reply.metrics)]
    vector = torch.cat([part.integers() for part in sums.values()] or [_NO_NUMBERS])
    return Element(vector.numpy(), [_integer(value) for value in (weight, *metrics)])


def decode(
    reduce: Mapping[str, Mean | Sum],
    cohort: int,
    metrics: Sequence[str],
    total: Element,
    clients: int,
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
    if not 0 < weight <= clients * MAX_WEIGHT:
        raise ValueError("the sum is larger than valid replies allow")
    vector = Layout.of(reduce, cohort).summed(total.vector, clients)
    parts, end = {}, 0
    for name, part in _sums(reduce, cohort).items():
        first, end = end, end + len(part.integers())
        part.replace(torch.from_numpy(vector[first:end]), weight)
        parts[name] = part.result()
    means = {name: float(v) / float(weight) for name, v in zip(metrics, values, strict=True)}
    return parts, float(weight), means


def _sums(reduce: Mapping[str, Mean | Sum], cohort: int) -> dict[str, FixedPoint]:
    """Begin the sum of each part, sorted by name."""
    return {name: reducer.start(cohort) for name, reducer in sorted(reduce.items())}


def _integer(value: float) -> int:
    over, under = value.as_integer_ratio()
    return over * (_UNIT // under) % _MODULUS


def _signed(scalar: int) -> int:
    return scalar - _MODULUS if scalar >= _MODULUS // 2 else scalar
