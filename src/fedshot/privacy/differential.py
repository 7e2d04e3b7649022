"""Differential privacy of what the server learns from sums: bounded contributions and noise.

Client level (McMahan et al. 2018, Learning differentially private recurrent language models): a
client's parts of one exchange are clipped, all clients weigh the same, and Gaussian noise is added
once to the sum; a mean divides by the expected number of clients, not by the number that replied.
Cohorts of a fixed size hide that one client was replaced by another, which changes a sum by up to
twice the clip. Example level: the method itself bounds what one example adds to the sums, so
nothing is clipped.

The noise is added to the integers of the fixed-point sum. Rounding may raise each entry of a
contribution by up to one unit of these integers. The unit is at most 2**-60 times the largest of
N b, 32 N s and 2**13 s. Here N is the number of all clients, b the bound on an entry of a
contribution (at most the clip), and s the standard deviation of the noise. The unit is at least
2**-50 s, so that the noise covers the last bits of the data.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.ranges import Above0
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.protocol.reducers import Mean, Sum

# An epsilon above 100, or a noise multiplier below 0.1, would hide nothing.
Epsilon: TypeAlias = Annotated[float, Field(gt=0, le=100)]
LEAST_NOISE = 0.1
Noise: TypeAlias = Annotated[float, Field(ge=LEAST_NOISE)]
Delta: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
Quantile: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
Clip: TypeAlias = float | Mapping[str, float]
_ROOM = 32  # a fixed-point sum has room for so many standard deviations of noise
# Noise has less than 2**53 units: of larger ones, float64 would leave out the last bits.
_COARSE = 2**13


@dataclass(frozen=True)
class Privacy:
    """The options of differential privacy at client level and at example level.

    Args:
        epsilon: the most that the run may spend at `delta`; null: no limit.
        noise: noise multiplier: the standard deviation of the noise in every sum, divided by the
            most that one client (or example) can change the sum. null: the least with which
            `run.rounds` rounds spend at most `epsilon`; the run's config.yaml records the number.
        delta: the delta of (epsilon, delta); at most 1 divided by the number of clients (or
            examples).
    """

    epsilon: Epsilon | None = None
    noise: Noise | None = None
    delta: Delta = 1e-5

    def __post_init__(self) -> None:
        if self.epsilon is None and self.noise is None:
            raise ConfigError(
                "privacy has neither epsilon nor noise. Set privacy.epsilon, such as 8, for the "
                "least noise that keeps to it, or privacy.noise, such as 1.0."
            )


@dataclass(frozen=True)
class ClientLevel(Privacy):
    """Hide whether a client took part: contributions are clipped, and sums get noise.

    Args:
        clip: largest L2 norm of all parts that a client uploads in one exchange; or the largest
            norm of each part by name, such as {theta: 0.5, sums: 10}. A larger part is scaled down.
        quantile: adapt the clip after every exchange, so that this share of the clients have norms
            of at most the clip; `clip` is the first one. 0.5 is the median. It takes up to 16 %
            more noise in the sums, since the noisy count of these clients spends, too. null: the
            clip does not change.
        sampling: "poisson": each client is in a cohort with probability run.cohort / clients, and
            epsilon hides whether a client exists. "fixed": cohorts have run.cohort clients, and
            epsilon hides what any one client holds; at the same `noise`, sums get twice the noise.
    """

    clip: Above0 | dict[str, Above0] = 1.0
    quantile: Quantile | None = None
    sampling: Literal["poisson", "fixed"] = "poisson"

    def mechanism(self, noise: float, *, secret: bool = False) -> Mechanism:
        """Return the mechanism with this noise multiplier; `secret` as in `Mechanism`."""
        fixed = self.sampling == "fixed"
        return Mechanism(noise, self.clip, quantile=self.quantile, fixed=fixed, secret=secret)


@dataclass(frozen=True)
class ExampleLevel(Privacy):
    """Hide single examples, in one-round methods: sums over examples of bounded size get noise."""


LEVELS: dict[str, type[Privacy]] = {"client": ClientLevel, "example": ExampleLevel}
"""The values of `privacy.name`."""


@dataclass(frozen=True)
class Mechanism:
    """How contributions are bounded and how much noise a sum gets.

    Args:
        noise: noise multiplier; 0 adds none, for tests.
        clip: largest norm of a client's parts together, or of each part by name; None if nothing is
            clipped.
        sensitivity: the most that one example can change the sums, if nothing is clipped.
        quantile: share of the clients whose norms are at most the clip, which adapts; None if it
            does not.
        fixed: whether cohorts have a fixed size, so that a client is replaced and not added.
        secret: whether noise and cohorts are drawn from the operating system. Otherwise they follow
            from the seed of the run, and who knows the seed can subtract the noise.
    """

    noise: float
    clip: Clip | None = None
    sensitivity: float = 1.0
    quantile: float | None = None
    fixed: bool = False
    secret: bool = False

    def clipped(self, up: Mapping[str, Tree]) -> dict[str, Tree]:
        """Return a client's parts, scaled down to the clip if they are larger."""
        if self.clip is None:
            return dict(up)
        if isinstance(self.clip, Mapping):
            return {name: _scaled(part, self.clip[name]) for name, part in up.items()}
        return dict(_scaled(dict(up), self.clip))

    def deviation(self, part: str, parts: int) -> float:
        """Return the standard deviation of the noise in a part of an exchange.

        `parts` is the number of the exchange's parts. With a clip for each part, the parts divided
        by their clips have a norm of at most sqrt(parts) together.
        """
        if not self.noise:
            return 0.0
        noise = self.noise * (2 if self.fixed else 1)
        if isinstance(self.clip, Mapping):
            return noise * self.clip[part] * math.sqrt(parts)
        return noise * (self.sensitivity if self.clip is None else self.clip)

    def largest(self, part: str, limit: float) -> float:
        """Return the bound on an entry of a client's part: the clip, if any, at most `limit`."""
        if self.clip is None:
            return limit
        return min(limit, self.clip[part] if isinstance(self.clip, Mapping) else self.clip)

    def key(self, key: Key) -> Key:
        """Return the key to draw with: `key`, or if draws are secret a key that nobody knows."""
        return Key(secrets.randbits(128)).at(*key.path) if self.secret else key

    def normals(self, key: Key) -> Callable[[int], NDArray[np.float64]]:
        """Return a function of n that draws standard normal samples, [n]."""
        if self.secret:
            return _from_system
        return key.numpy().standard_normal


def _from_system(n: int) -> NDArray[np.float64]:
    """Return n standard normal samples, each made from 128 random bits of the operating system.

    The bits give a sign and a tail probability in (0, 1/2] with full relative precision. So every
    value that the rounded noise can have is possible, also far from 0 (Mironov 2012).
    """
    from scipy.special import ndtri

    high, low = np.frombuffer(secrets.token_bytes(16 * n), np.uint64).reshape(2, n)
    tail = (high + ((low >> np.uint64(1)) + 0.5) * 2.0**-63) * 2.0**-65
    sign = np.where(low & np.uint64(1), 1.0, -1.0)
    found: NDArray[np.float64] = sign * ndtri(np.minimum(tail, 0.5))
    return found


def norm_of(part: Tree) -> float:
    """Return the L2 norm of all leaves together."""
    return math.sqrt(sum(float(leaf.double().square().sum()) for leaf in tree.leaves(part)))


def _scaled(part: Tree, clip: float) -> Tree:
    norm = norm_of(part)
    if norm <= clip:
        return part
    return tree.map(lambda leaf: leaf.double() * (clip / norm), part)


@dataclass(frozen=True)
class Noisy:
    """A reducer that adds Gaussian noise to a sum, or to the numerator of a mean.

    Args:
        of: the reducer of the sum; it still checks the replies.
        deviation: standard deviation of the noise in each entry of the sum.
        clients: the expected number of clients, by which a mean divides.
        population: the number of all clients, which fixes the unit of the sum's integers.
        largest: bound on the absolute value of an entry of a client's part, once it is clipped.
        normals: function of n that draws standard normal samples, [n].
    """

    of: Mean | Sum
    deviation: float
    clients: int
    population: int
    largest: float
    normals: Callable[[int], NDArray[np.float64]]

    def start(self, cohort: int) -> _NoisySum:
        """Begin a sum; how many clients are asked does not change its unit."""
        del cohort
        return _NoisySum(self)

    def fault(self, client: int, part: Tree, weight: float) -> str | None:
        """Return why the reducer of the sum refuses this part."""
        return self.of.fault(client, part, weight)


class _NoisySum:
    """A sum in progress, which gets its noise with the result."""

    def __init__(self, reducer: Noisy) -> None:
        self._reducer, of = reducer, reducer.of
        room = max(_ROOM, _COARSE / reducer.population)
        limit = max(reducer.largest, room * reducer.deviation)
        like = tree.map(_floating, of.like)
        self._sum: Any = replace(of, like=like, limit=limit).start(reducer.population)

    def add(self, client: int, part: Tree, weight: float) -> None:
        del weight  # all clients weigh the same
        self._sum.add(client, tree.map(_floating, part), 1.0)

    def result(self) -> Tree:
        reducer, total = self._reducer, self._sum.total
        if reducer.deviation:
            scale = reducer.deviation * 2.0**self._sum.bits
            for leaf in tree.leaves(total):
                drawn = torch.from_numpy(reducer.normals(leaf.numel())).reshape(leaf.shape)
                leaf.add_((drawn * scale).round().long())
        self._sum.weight = Fraction(reducer.clients)
        return tree.map(typed, self._sum.result(), reducer.of.like)


def _floating(leaf: Tensor) -> Tensor:
    return leaf if leaf.is_floating_point() else leaf.double()


def typed(found: Tensor, like: Tensor) -> Tensor:
    """Return floats in the dtype of `like`; they are rounded if it is an integer."""
    return (found if like.is_floating_point() else found.round()).to(like.dtype)
