"""Reducers, which combine a part of all replies of a cohort: `Mean`, `Sum`, `Gather`.

A part is one named tree of a reply.

`Mean` and `Sum` accumulate 64-bit integers. Each contribution w * x is computed in float64, scaled
by a power of two and rounded once; the additions are exact. So the result does not depend on the
order of arrival, the number of workers or the machine, and memory does not grow with the number of
clients.

The scale leaves room for the whole cohort: with at most C contributions of at most `limit`,
C * limit * 2**bits <= 2**62. The bound is per contribution, so whether a reply is rejected does not
depend on the order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.nn.kernels import tensors

NOT_FINITE, TOO_LARGE = "holds a value that is not finite", "more than the limit of"
"""Phrases in a fault's reason which show that training diverges."""

# Weights are counts. A smaller weight would vanish in the rounding of the sum.
LIGHTEST, MAX_WEIGHT = 2.0**-16, 2.0**20


class Accumulator(Protocol):
    """A reduction in progress: the parts of the replies received so far, combined."""

    def add(self, client: int, part: Tree, weight: float) -> None:
        """Add the part of one client's reply."""
        ...

    def result(self) -> Tree:
        """Return the reduced value."""
        ...


class Reducer(Protocol):
    """How to combine one part of the clients' replies."""

    def start(self, cohort: int) -> Accumulator:
        """Begin a reduction of the parts of at most `cohort` clients."""
        ...

    def fault(self, client: int, part: Tree, weight: float) -> str | None:
        """Return why this part of a reply must be rejected; None if it is valid."""
        ...


MIN_RANGE = 2.0**-62
"""A range of a `Grid` is above this, so that its steps have a reciprocal."""


@dataclass(frozen=True)
class Grid:
    """Integers of a public range, to which clients round a part before a secure sum adds it.

    A leaf's step is its range divided by `most`. The integer of an entry is w * x in steps, rounded
    to nearest, or at random without bias if there is a generator, and at most `most`.

    Args:
        most: largest integer.
        ranges: largest |w * x|, by path; leaves without a range are not rounded.
    """

    most: int
    ranges: Mapping[str, float]

    def bits(self, cohort: int) -> int:
        """Return the fewest bits m for which any sum of `cohort` clients has a value mod 2**m."""
        return (2 * self.most * cohort).bit_length()

    def step(self, path: str) -> float:
        """Return the step of a leaf that has a range."""
        return self.ranges[path] / self.most

    def integers(
        self, path: str, leaf: Tensor, weight: float, rng: np.random.Generator | None = None
    ) -> Tensor:
        """Return the integers of a leaf that has a range, as float64."""
        steps = leaf.detach().cpu().double() * (weight / self.step(path))
        if rng is None:
            steps = steps.round()
        else:
            steps = (steps + torch.from_numpy(rng.random(steps.shape))).floor()
        return steps.clamp(-self.most, self.most)

    def rounded(
        self, path: str, leaf: Tensor, weight: float, rng: np.random.Generator | None = None
    ) -> Tensor:
        """Return a leaf with the values that its integers stand for."""
        if path not in self.ranges:
            return leaf
        found = self.integers(path, leaf, weight, rng)
        return (found * self.step(path) / weight).to(leaf.dtype)


@dataclass(frozen=True)
class Mean:
    """Weighted mean, sum_k w_k x_k / sum_k w_k, of parts shaped like `like`.

    Args:
        like: a tree of floats with the names, shapes and dtypes that every client must send.
        limit: largest |w_k * x_k| that is accepted, in the units of the part. The resolution of the
            sum is about limit * cohort / 2**62.
        max_weight: largest weight that is accepted: the most that a correct client can have.
        of_examples: whether the weight is the client's number of examples. A server
            that knows this number rejects a larger one.
        of_statistics: whether these are changes of running statistics. An old one is not added in
            asynchronous rounds; the server's statistics move towards the client's.
        by_class: whether rows belong to the classes of an episode, so that an error of compression
            must not be carried to the next.
        grid: the integers to which clients round the part; None if they do not round it.
    """

    like: Tree
    limit: float = 2.0**16
    max_weight: float = MAX_WEIGHT
    of_examples: bool = False
    of_statistics: bool = False
    by_class: bool = False
    grid: Grid | None = None

    def start(self, cohort: int) -> FixedPoint:
        """Begin a mean. Raises TypeError if `like` holds integers."""
        for path, leaf in tree.items(self.like):
            if not leaf.is_floating_point():
                raise TypeError(f"{path} is {tree.form(leaf)}; a Mean takes floats, use Sum")
        return FixedPoint(self.like, _bits(self.limit, cohort), weighted=True, grid=self.grid)

    def fault(self, client: int, part: Tree, weight: float) -> str | None:
        """Return why this part of a reply cannot be averaged; None if it can."""
        del client
        if not LIGHTEST <= weight <= self.max_weight:
            return (
                f"the weight is {weight:.3g}; expected {LIGHTEST:.3g} to {self.max_weight:.3g}, "
                "a number of examples or episodes"
            )
        return _fault(self.like, part, self.limit / weight)


@dataclass(frozen=True)
class Sum:
    """Unweighted sum of parts shaped like `like`; integers and floats.

    Args:
        like: a tree with the names, shapes and dtypes that every client must send.
        limit: largest |x_k| that is accepted.
        grid: as in `Mean`, with w = 1.
    """

    like: Tree
    limit: float = 2.0**16
    grid: Grid | None = None

    def start(self, cohort: int) -> FixedPoint:
        """Begin a sum. Raises TypeError for a dtype too narrow for sums."""
        for path, leaf in tree.items(self.like):
            if leaf.dtype not in (torch.int64, torch.float32, torch.float64):
                raise TypeError(
                    f"{path} is {tree.form(leaf)}; a Sum takes int64, float32 or float64, which "
                    "are wide enough"
                )
        return FixedPoint(self.like, _bits(self.limit, cohort), weighted=False, grid=self.grid)

    def fault(self, client: int, part: Tree, weight: float) -> str | None:
        """Return why this part of a reply cannot be summed; None if it can."""
        del client, weight
        return _fault(self.like, part, self.limit)


@dataclass(frozen=True)
class Gather:
    """Collects a part of every client's reply, in a dictionary in the order of the client ids.

    Its memory grows with the number of clients, and it is incompatible with secure sums.

    Args:
        like: a tree with the names, shapes and dtypes that every client must send; `fn(client)` if
            it differs by client; None to accept any tree.
        limit: largest |x| that is accepted; None also accepts values that are not finite, for a
            caller that checks them itself.
        put_away: called with (client, part) when a part arrives; its result replaces the part. A
            function that writes to disk keeps memory constant.
        flaw: function that returns a further reason to reject a part, or None.
    """

    like: Tree | Callable[[int], Tree] | None = None
    limit: float | None = 2.0**32
    put_away: Callable[[int, Tree], Tree] | None = None
    flaw: Callable[[Tree], str | None] | None = None

    def start(self, cohort: int) -> _Gathered:
        """Begin a collection."""
        del cohort
        return _Gathered(self.put_away)

    def fault(self, client: int, part: Tree, weight: float) -> str | None:
        """Return why this part of a reply cannot be kept; None if it can."""
        del weight
        like = self.like(client) if callable(self.like) else self.like
        found = _fault(part if like is None else like, part, self.limit)
        return found or (self.flaw(part) if self.flaw else None)


MAX_SUM = 2**62


def _bits(limit: float, cohort: int) -> int:
    return 62 - math.ceil(math.log2(limit)) - math.ceil(math.log2(max(cohort, 1)))


def is_plain(leaf: Tensor) -> bool:
    """Whether a tensor is dense: not sparse, quantised, meta or a lazy negation."""
    dense = leaf.layout == torch.strided and not leaf.is_neg()
    return dense and not leaf.is_meta and not leaf.is_quantized


def _fault(like: Tree, part: Tree, limit: float | None) -> str | None:
    where = tree.difference(like, part)
    if where:
        return where
    if limit is not None and _small(tree.leaves(part), limit):
        return None  # the common case; the loop below finds the reason in the other cases
    for path, leaf in tree.items(part):
        if not is_plain(leaf) or leaf.is_complex():
            return f"{path} is {leaf.layout} {tree.form(leaf)}, expected plain real numbers"
        if leaf.numel() == 0 or limit is None:
            continue
        largest = _largest(leaf.detach())
        if not math.isfinite(largest):
            return f"{path} {NOT_FINITE}"
        if largest > limit:
            return f"{path} holds {largest:.3g}, {TOO_LARGE} {limit:.3g}"
    return None


def all_finite(leaves: list[Tensor]) -> bool:
    """Whether all values of dense tensors on the CPU are finite."""
    floats = [leaf for leaf in leaves if leaf.is_floating_point()]
    return _small(floats, math.inf) or all(bool(leaf.isfinite().all()) for leaf in floats)


def _small(leaves: list[Tensor], limit: float) -> bool:
    """Whether no |x| exceeds the limit; False also if the kernel does not support the leaves."""
    if not all(map(is_plain, leaves)) or not tensors.plain_floats(*leaves):
        return False
    largest = tensors.largest([leaf.detach() for leaf in leaves])
    return math.isfinite(largest) and largest <= limit


def _largest(leaf: Tensor) -> float:
    """Return the largest |x|; inf or NaN if a value is not finite."""
    low, high = (float(v) for v in torch.aminmax(leaf))
    return max(-low, high) if math.isfinite(low) and math.isfinite(high) else math.nan


class FixedPoint:
    """A running sum in fixed point (int64, scaled by 2**bits), and the exact sum of the weights.

    No valid sum exceeds `MAX_SUM` in absolute value. Leaves with a range in `grid` are summed as
    the integers of the grid; `in_grid` says which leaves these are.
    """

    def __init__(self, like: Tree, bits: int, *, weighted: bool, grid: Grid | None = None) -> None:
        self.like, self.bits, self.weighted = like, bits, weighted
        self._grid = Grid(1, {}) if grid is None else grid
        self._paths = [path for path, _ in tree.items(like)]
        self.in_grid = [path in self._grid.ranges for path in self._paths]
        self.total = tree.map(lambda leaf: torch.zeros(leaf.shape, dtype=torch.int64), like)
        self.weight = Fraction(0)

    def add(self, client: int, part: Tree, weight: float) -> None:
        """Add one client's part."""
        del client
        by = weight if self.weighted else 1.0
        scale = by * 2.0**self.bits

        quick: list[tuple[Tensor, Tensor]] = []
        totals, found = tree.leaves(self.total), tree.leaves(part)
        for path, in_grid, total, leaf in zip(
            self._paths, self.in_grid, totals, found, strict=True
        ):
            if in_grid:
                total.add_(self._grid.integers(path, leaf, by).long())
            elif tensors.plain_floats(leaf):
                quick.append((total, leaf.detach()))
            elif leaf.is_floating_point():
                total.add_((leaf.detach().double() * scale).round_().long())
            else:
                total.add_(leaf)
        if quick:  # the same bits, five times faster
            tensors.take(quick, scale)
        self.weight += Fraction(weight)

    def integers(self) -> Tensor:
        """Return the sum in fixed point, int64 [n]: its leaves, flattened and concatenated."""
        return torch.cat([torch.zeros(0, dtype=torch.int64),
                          *(leaf.reshape(-1) for leaf in tree.leaves(self.total))])  # fmt: skip

    def replace(self, integers: Tensor, weight: Fraction) -> None:
        """Set the sum, in the form that the method `integers` returns, and the sum of weights."""
        self.total, self.weight = tree.shaped(integers, self.total), weight

    def result(self) -> Tree:
        """Return the sum, or the mean. Raises ValueError for the mean of no contributions."""
        by = float(self.weight) if self.weighted else 1.0
        if by == 0.0:
            raise ValueError("the mean of no contributions is not defined")

        found = []
        for path, in_grid, total, like in zip(
            self._paths, self.in_grid, tree.leaves(self.total), tree.leaves(self.like), strict=True
        ):
            step = self._grid.step(path) if in_grid else 2.0**-self.bits
            whole = not like.is_floating_point()
            found.append((total if whole else total.double() * step / by).to(like.dtype))
        return tree.unflatten(self.like, found)


class _Gathered:
    """The parts received so far, by client."""

    def __init__(self, put_away: Callable[[int, Tree], Tree] | None) -> None:
        self.parts: dict[int, Tree] = {}
        self._put_away = put_away

    def add(self, client: int, part: Tree, weight: float) -> None:
        del weight
        self.parts[client] = self._put_away(client, part) if self._put_away else part

    def result(self) -> dict[int, Tree]:
        return dict(sorted(self.parts.items()))
