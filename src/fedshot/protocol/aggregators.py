"""Aggregators, which combine the clients' vectors so that a few dishonest ones move it but little.

All but `mean` and `clipped` count every client once, since a client states its own weight. Every
aggregator also returns how much of each client's vector counted, from 0 to 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.ranges import Above0, BelowHalf
from fedshot.protocol.client_vectors import ClientVectors

_STEPS, _TOLERANCE = 1000, 1e-12  # of Weiszfeld's iteration; change of the shares at its end


@dataclass(frozen=True)
class Aggregator(ABC):
    """Base of the aggregators. Symbols: n vectors x_k, of which at most f are dishonest."""

    exact: ClassVar[bool] = False  # whether the mean of the protocol is used

    def check(self, cohort: int) -> None:  # noqa: B027  (most take any)
        """Raise ConfigError if the aggregator is not defined for a cohort of this size."""

    @abstractmethod
    def combine(self, vectors: ClientVectors) -> tuple[Tensor, Tensor]:
        """Return the combined vector, float64 [length], and how much of each vector counts, [n].

        The second tensor has a value from 0 to 1 for each vector.
        """


@dataclass(frozen=True)
class PlainMean(Aggregator):
    """The weighted mean: a dishonest client moves it as far as the limit on replies allows."""

    exact: ClassVar[bool] = True

    def combine(self, vectors: ClientVectors) -> tuple[Tensor, Tensor]:
        """Return sum_k w_k x_k / sum_k w_k, and 1 for each vector, [n], since all count in full."""
        weights = vectors.weights
        return vectors.mix(weights / weights.sum()), torch.ones_like(weights)


@dataclass(frozen=True)
class NormClipped(Aggregator):
    """The weighted mean of vectors whose norms are clipped (Sun et al. 2019).

    Args:
        norm: largest norm of a vector; null: the median norm of the cohort.
    """

    norm: Above0 | None = None

    def combine(self, vectors: ClientVectors) -> tuple[Tensor, Tensor]:
        """Return sum_k w_k c_k x_k / sum_k w_k, and the factors c_k = min(1, b / ||x_k||), [n].

        The bound b is `norm`, or the median norm if that is None.
        """
        weights, norms = vectors.weights, vectors.norms
        bound = self.norm if self.norm is not None else float(norms.quantile(0.5))
        kept = torch.where(norms > bound, bound / norms, 1.0)
        return vectors.mix(weights / weights.sum() * kept), kept


@dataclass(frozen=True)
class CoordinateMedian(Aggregator):
    """The median of each coordinate (Yin et al. 2018): it holds while f < n / 2."""

    def combine(self, vectors: ClientVectors) -> tuple[Tensor, Tensor]:
        """Return the median of each coordinate, and how much of each vector counts, [n].

        The median of an even number of values is the mean of the two middle ones. The second tensor
        has, for each vector, the share of coordinates in which its value is a middle one.
        """
        n = len(vectors)
        return _by_coordinate(vectors, (n - 1) // 2)


@dataclass(frozen=True)
class TrimmedMean(Aggregator):
    """The mean of each coordinate without its largest and smallest values (Yin et al. 2018).

    Args:
        fraction: largest share of dishonest clients in a cohort; it gives f, and as many values are
            left out at each end.
    """

    fraction: BelowHalf = 0.2

    def combine(self, vectors: ClientVectors) -> tuple[Tensor, Tensor]:
        """Return the mean of each coordinate without its f largest and f smallest values.

        Also returns how much of each vector counts, [n]: the share of coordinates in which its
        value is not left out.
        """
        return _by_coordinate(vectors, _among(vectors, self.fraction))


@dataclass(frozen=True)
class MultiKrum(Aggregator):
    """The mean of the n - f vectors nearest to their neighbours (Blanchard et al. 2017).

    The score of a vector is the sum of its n - f - 2 smallest squared distances to others. A cohort
    needs n >= 2 f + 3. Where replies are lost n is smaller and f stays; then at least f distances
    count, so that f equal vectors of dishonest clients are not the nearest.

    Args:
        fraction: largest share of dishonest clients in a cohort; it gives f.
    """

    single: ClassVar[bool] = False  # whether one vector is chosen

    fraction: BelowHalf = 0.2

    def check(self, cohort: int) -> None:
        """Raise ConfigError if the cohort has fewer than 2 f + 3 clients."""
        f = most_dishonest(self.fraction, cohort)
        if cohort < 2 * f + 3:
            raise ConfigError(
                f"aggregate.fraction is {self.fraction:g} with a cohort of {cohort}; Krum needs "
                f"{2 * f + 3} clients for {f} dishonest ones. Lower aggregate.fraction, or raise "
                "run.cohort (in asynchronous rounds run.clock.wait_for)."
            )

    def combine(self, vectors: ClientVectors) -> tuple[Tensor, Tensor]:
        """Return the mean of the vectors with the lowest scores, and which vectors these are.

        Of equal scores, the first counts as the lowest. The second tensor, [n], is 1 for the chosen
        vectors and 0 for the others.
        """
        n = len(vectors)
        f = _among(vectors, self.fraction)
        squares = _squared_distances(vectors.products())
        squares.fill_diagonal_(math.inf)  # a vector is no neighbour of itself
        near = squares.sort(1).values[:, : min(max(1, f, n - f - 2), n - 1)]
        best = near.sum(1).argsort(stable=True)[: 1 if self.single else n - f]
        kept = torch.zeros(n, dtype=torch.float64)
        kept[best] = 1.0
        return vectors.mix(kept / kept.sum()), kept


@dataclass(frozen=True)
class Krum(MultiKrum):
    """The vector nearest to its neighbours (Blanchard et al. 2017); see `multi_krum`."""

    single: ClassVar[bool] = True


@dataclass(frozen=True)
class GeometricMedian(Aggregator):
    """The point with the least sum of distances to all vectors (Pillutla et al. 2022).

    It holds while f < n / 2. Near n / 2 the iteration converges slowly, and ends after 1000 steps.
    """

    def combine(self, vectors: ClientVectors) -> tuple[Tensor, Tensor]:
        """Return sum_k a_k x_k, and a_k / max_j a_j of each vector, [n].

        Weiszfeld's iteration makes a_k proportional to 1 / (distance of x_k from the result). The
        distances follow from the vectors' inner products, so the vectors are read twice.
        """
        g = vectors.products()
        shares = torch.full((len(vectors),), 1 / len(vectors), dtype=torch.float64)
        scale = _spread(_squared_distances(g))
        for _ in range(_STEPS if scale else 0):
            squares = g.diagonal() - 2 * (g @ shares) + shares @ g @ shares
            new = 1 / squares.clamp_min(0).sqrt().clamp_min(_TOLERANCE * scale)
            before, shares = shares, new / new.sum()
            if float((shares - before).abs().max()) < _TOLERANCE:
                break
        return vectors.mix(shares), shares / shares.max()


AGGREGATORS: dict[str, type[Aggregator]] = {
    "mean": PlainMean,
    "clipped": NormClipped,
    "median": CoordinateMedian,
    "trimmed": TrimmedMean,
    "krum": Krum,
    "multi_krum": MultiKrum,
    "geometric_median": GeometricMedian,
}


def most_dishonest(fraction: float, n: int) -> int:
    """Return f, the largest number of dishonest clients among n: rounded, and below n / 2."""
    return min(math.floor(fraction * n + 0.5), (n - 1) // 2)


def _among(vectors: ClientVectors, fraction: float) -> int:
    """Return f for the replies `vectors`: that of the full cohort, but below half of them."""
    return min(most_dishonest(fraction, vectors.cohort), (len(vectors) - 1) // 2)


def _by_coordinate(vectors: ClientVectors, cut: int) -> tuple[Tensor, Tensor]:
    """Return the mean of each coordinate without its `cut` largest and smallest values.

    Also returns how much of each vector counts, [n]: the share of coordinates in which its value is
    not left out.
    """
    n = len(vectors)
    found = torch.empty(vectors.length, dtype=torch.float64)
    kept = torch.zeros(n, dtype=torch.float64)
    for at, block in vectors.blocks():
        ordered = np.sort(block.T.contiguous().numpy(), axis=1)  # torch sorts more slowly
        middle = torch.from_numpy(ordered)[:, cut : n - cut]
        found[at] = middle.double().mean(1)
        kept += ((block >= middle[:, 0]) & (block <= middle[:, -1])).double().sum(1)
    return found, kept / max(1, vectors.length)


def _spread(squares: Tensor) -> float:
    """Return the smallest of the vectors' median distances to all vectors, a scale of distances.

    If it is 0, returns the smallest distance above 0. `squares` [n, n] are the squared distances.
    Less than half of the clients cannot enlarge the result.
    """
    found = float(squares.median(1).values.min())
    if not found and squares.any():
        found = float(squares[squares > 0].min())
    return math.sqrt(found)


def _squared_distances(g: Tensor) -> Tensor:
    """Return ||x_i - x_j||^2 [n, n] from the inner products g [n, n]."""
    d = g.diagonal()
    return (d[:, None] + d - 2 * g).clamp_min(0)
