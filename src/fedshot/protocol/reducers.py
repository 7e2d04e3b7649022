"""How the replies of a cohort become one value: `Mean`, `Sum`, `Gather`.

`Mean` and `Sum` stream into 64-bit whole numbers. Each contribution w * x is computed in float64,
scaled by a power of two and rounded once; from there on additions are exact, so the order of
arrival, the number of workers and the machine cannot change a bit, and the memory is one
accumulator however many clients reply.

The scale leaves room for the whole cohort: with at most C contributions of at most `limit`,
C * limit * 2**bits <= 2**62. The bound is per contribution, so whether one is refused never
depends on who came first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.nn.kernels import tensors

NOT_FINITE, TOO_LARGE = "holds a value that is not finite", "that is admitted"
"""The words by which a reply of a training that diverges is told from another one."""

# Weights are counts. A lighter contribution than this would vanish in the rounding of the sum.
LIGHTEST, MAX_WEIGHT = 2.0**-16, 2.0**20


class Accumulator(Protocol):
    """A reduction under way."""

    def add(self, client: int, part: Tree, weight: float) -> None:
        """Take in one client's part."""
        ...

    def merge(self, other: Accumulator) -> None:
        """Take in what another accumulator of the same reducer and cohort has gathered."""
        ...

    def result(self) -> Tree:
        """Return the reduced value of what was taken in."""
        ...


class Reducer(Protocol):
    """A way to reduce one named part."""

    def start(self, cohort: int) -> Accumulator:
        """Begin a reduction of at most `cohort` contributions."""
        ...

    def fault(self, client: int, part: Tree, weight: float) -> str | None:
        """Say why this part cannot be taken in; None when it can."""
        ...


@dataclass(frozen=True)
class Mean:
    """Weighted mean, sum_k w_k x_k / sum_k w_k, of parts shaped like `like`.

    Args:
        like: a tree of floats with the names, shapes and dtypes that every client must send.
        limit: the largest |w_k * x_k| that is admitted, in the units of the part. The resolution of
            the sum is about limit * cohort / 2**62.
        heaviest: the largest weight that is admitted: what an honest client can have, so that no
            client outweighs the others by claiming more.
        of_examples: whether the weight is the number of examples that the client holds, so that who
            knows that number can refuse a larger one.
    """

    like: Tree
    limit: float = 2.0**16
    max_weight: float = MAX_WEIGHT
    of_examples: bool = False

    def start(self, cohort: int) -> _FixedPoint:
        """Begin a mean. Raises TypeError when `like` holds whole numbers, which have no mean."""
        for path, leaf in tree.items(self.like):
            if not leaf.is_floating_point():
                raise TypeError(f"{path} is {tree.form(leaf)}; a Mean takes floats, use Sum")
        return _FixedPoint(self.like, _bits(self.limit, cohort), weighted=True)

    def fault(self, client: int, part: Tree, weight: float) -> str | None:
        """Say why this part cannot be averaged."""
        del client
        if not LIGHTEST <= weight <= self.max_weight:
            return (
                f"the weight is {weight:.3g}; this mean takes {LIGHTEST:.3g} to "
                f"{self.max_weight:.3g}, a count of examples or episodes"
            )
        return _fault(self.like, part, self.limit / weight)


@dataclass(frozen=True)
class Sum:
    """Plain sum of parts shaped like `like`; whole numbers and floats. Weights play no role.

    Args:
        like: a tree with the names, shapes and dtypes that every client must send.
        limit: the largest |x_k| that is admitted.
    """

    like: Tree
    limit: float = 2.0**16

    def start(self, cohort: int) -> _FixedPoint:
        """Begin a sum. Raises TypeError where `like` is of a type too narrow for sums."""
        for path, leaf in tree.items(self.like):
            if leaf.dtype not in (torch.int64, torch.float32, torch.float64):
                raise TypeError(
                    f"{path} is {tree.form(leaf)}; a Sum takes int64, float32 or float64, which "
                    "have room for it"
                )
        return _FixedPoint(self.like, _bits(self.limit, cohort), weighted=False)

    def fault(self, client: int, part: Tree, weight: float) -> str | None:
        """Say why this part cannot be summed."""
        del client, weight
        return _fault(self.like, part, self.limit)


@dataclass(frozen=True)
class Gather:
    """Every client's part by client id, in the order of the ids.

    Costs memory for each sender, and rules out secure sums.

    Args:
        like: the tree that every client must send; `fn(client)` where it differs from client to
            client; None to take any tree.
        limit: the largest |x| that is admitted; None admits what is not finite, too, for a caller
            that judges values itself.
        put_away: given (client, part) as a part comes in; what it returns is held in the part's
            place. With a function that writes to the disk, memory does not grow with the senders.
        flaw: says what else is wrong with a part; None for nothing.
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
        """Say why this part cannot be kept."""
        del weight
        like = self.like(client) if callable(self.like) else self.like
        found = _fault(part if like is None else like, part, self.limit)
        return found or (self.flaw(part) if self.flaw else None)


def _bits(limit: float, cohort: int) -> int:
    return 62 - math.ceil(math.log2(limit)) - math.ceil(math.log2(max(cohort, 1)))


def is_plain(leaf: Tensor) -> bool:
    """Whether a tensor holds its values densely, so that they can be looked at."""
    dense = leaf.layout == torch.strided and not leaf.is_neg()
    return dense and not leaf.is_meta and not leaf.is_quantized


def _fault(like: Tree, part: Tree, limit: float | None) -> str | None:
    where = tree.difference(like, part)
    if where:
        return where
    if limit is not None and _small(tree.leaves(part), limit):
        return None  # nearly every part; what is wrong with the others is told below
    for path, leaf in tree.items(part):
        if not is_plain(leaf) or leaf.is_complex():
            return f"{path} is {leaf.layout} {tree.form(leaf)}, expected plain real numbers"
        if leaf.numel() == 0 or limit is None:
            continue
        largest = _largest(leaf.detach())
        if not math.isfinite(largest):
            return f"{path} {NOT_FINITE}"
        if largest > limit:
            return f"{path} holds {largest:.3g}, above the {limit:.3g} {TOO_LARGE}"
    return None


def _small(leaves: list[Tensor], limit: float) -> bool:
    """Whether no |x| is above the limit, where that can be told of all leaves at once."""
    if not all(map(is_plain, leaves)) or not tensors.plain_floats(*leaves):
        return False
    largest = tensors.largest([leaf.detach() for leaf in leaves])
    return math.isfinite(largest) and largest <= limit


def _largest(leaf: Tensor) -> float:
    """Return the largest |x|; inf or NaN where one is not finite."""
    low, high = (float(v) for v in torch.aminmax(leaf))
    return max(-low, high) if math.isfinite(low) and math.isfinite(high) else math.nan


class _FixedPoint:
    """A running sum in whole numbers, and the exact sum of the weights."""

    def __init__(self, like: Tree, bits: int, *, weighted: bool) -> None:
        self.like, self.bits, self.weighted = like, bits, weighted
        self.total = tree.map(lambda leaf: torch.zeros(leaf.shape, dtype=torch.int64), like)
        self.weight = Fraction(0)

    def add(self, client: int, part: Tree, weight: float) -> None:
        del client
        scale = (weight if self.weighted else 1.0) * 2.0**self.bits

        quick: list[tuple[Tensor, Tensor]] = []

        def take(total: Tensor, leaf: Tensor) -> None:
            if tensors.plain_floats(leaf):
                quick.append((total, leaf.detach()))
            elif leaf.is_floating_point():
                total += (leaf.detach().double() * scale).round_().long()
            else:
                total += leaf

        tree.map(take, self.total, part)
        if quick:  # the same bits, five times sooner
            tensors.take(quick, scale)
        self.weight += Fraction(weight)

    def merge(self, other: Accumulator) -> None:
        if not isinstance(other, _FixedPoint) or (other.bits, other.weighted) != (
            self.bits,
            self.weighted,
        ):
            raise ValueError("only sums of the same reducer and cohort can be merged")
        tree.map(lambda mine, theirs: mine.add_(theirs), self.total, other.total)
        self.weight += other.weight

    def result(self) -> Tree:
        by = float(self.weight) if self.weighted else 1.0
        if by == 0.0:
            raise ValueError("the mean of no contributions is not defined")

        def finish(total: Tensor, like: Tensor) -> Tensor:
            if not like.is_floating_point():
                return total.to(like.dtype)
            return (total.double() * 2.0**-self.bits / by).to(like.dtype)

        return tree.map(finish, self.total, self.like)


class _Gathered:
    """Parts by sender."""

    def __init__(self, put_away: Callable[[int, Tree], Tree] | None) -> None:
        self.parts: dict[int, Tree] = {}
        self._put_away = put_away

    def add(self, client: int, part: Tree, weight: float) -> None:
        del weight
        self.parts[client] = self._put_away(client, part) if self._put_away else part

    def merge(self, other: Accumulator) -> None:
        if not isinstance(other, _Gathered):
            raise ValueError("only collections can be merged with a collection")
        self.parts.update(other.parts)

    def result(self) -> dict[int, Tree]:
        return dict(sorted(self.parts.items()))
