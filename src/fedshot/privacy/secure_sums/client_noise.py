"""Noise by the clients: each adds its share before it masks, and the server adds none.

A client clips its parts, rounds them to the integers of the sum, and adds normal noise rounded to
integers. If a secure sum has the fewest clients that it accepts, the noise of all but one of them
has the variance that the accountant assumes. So epsilon also holds against each of these clients,
who knows its own noise. More clients add more noise.

Two sets of uploads are neighbours if one client's contributions are zeros in one of them. Cohorts
are public: the server knows who takes part, so privacy is not amplified by sampling.

Why this is the Gaussian mechanism. The probabilities of a normal variable of deviation s, rounded
to integers, have the Fourier series sum_m F(t + 2 pi m), F(t) = exp(-(s t)^2 / 2) sinc(t / 2). For
the sum of n such variables it is the n-th power of this series. For one normal variable of
deviation s sqrt(n), plus n - 1 uniform ones of width 1, rounded as a whole, it is the series of
F^n. The two differ only in products of different m, so no probability differs by more than
4 n exp(-(pi s)^2 / 2). The second variable is computed from the result of a Gaussian mechanism.
Here s is at least 2^18, so the difference is negligible; a normal sample in float64 has 20 bits
below a unit. Kairouz et al. 2021, "The distributed discrete Gaussian mechanism for federated
learning with secure aggregation", show a similar result for discrete normal noise.

Range. The assumed deviation is 2**30 to 2**32 units, and at least 0.1 times the largest entry of
a contribution. So 2**24 contributions add up to less than 0.16 times 2**62 units, and there is room
for noise of 2**29 deviations. The noise of a sum has at most 1.6 times the assumed deviation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.dataset import Ints
from fedshot.privacy.differential import Mechanism, Noisy, typed
from fedshot.privacy.private_clients import PrivateClients
from fedshot.privacy.secure_sums.neighbourhoods import needed
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Exchange, Outcome, Reply
from fedshot.protocol.reducers import Mean, Sum

MAX_POPULATION = 2**24  # of more clients, the noise of a sum could be less than 2**30 units
_LEAST_UNITS = 2.0**30  # of the deviation of a sum's noise; at most four times as many


@dataclass(frozen=True)
class ClientNoise:
    """How a client bounds its contribution, and what noise it adds.

    Args:
        mechanism: the clip, and the noise that a sum must have.
        threshold: share of a cohort that must be left in a secure sum.
        population: the number of all clients, which fixes the unit of the sum's integers.
        cohort: the most clients that an exchange asks.

    Raises:
        ConfigError: more than `MAX_POPULATION` clients.
    """

    mechanism: Mechanism
    threshold: float
    population: int
    cohort: int

    def __post_init__(self) -> None:
        if self.population > MAX_POPULATION:
            raise ConfigError(
                f"privacy and run.secure_sums are set, and there are {self.population:,} clients; "
                f"the integers of a sum have room for {MAX_POPULATION:,}. Set run.secure_sums to "
                "false, or privacy to none."
            )

    def sums(self, reduce: Mapping[str, Mean | Sum]) -> dict[str, Sum]:
        """Return the reducers of the contributions: sums in float64, of clients that weigh 1.

        `reduce` has the method's reducer of each part.
        """
        found = {}
        for name, reducer in reduce.items():
            deviation = self.mechanism.deviation(name, len(reduce))
            largest = self.mechanism.largest(name, reducer.limit)
            limit = max(largest, deviation * _LEAST_UNITS / self.population)
            found[name] = Sum(tree.map(_float64, reducer.like), limit)
        return found

    def contribution(self, reply: Reply) -> Reply:
        """Return what a client adds to the sums, before the noise: its clipped parts, weight 1."""
        up = {name: tree.map(Tensor.double, part)
              for name, part in self.mechanism.clipped(reply.up).items()}  # fmt: skip
        return reply._replace(up=up, weight=1.0, metrics={})

    def seen(self, cohort: int, left: int) -> float:
        """Return the noise multiplier of a sum of `left` clients, as one of them sees it.

        A client knows the noise of its own, which does not count. Shares are sized for a cohort of
        `cohort` clients. From 62 clients on, a client knows its neighbours only, and a server may
        have left all others out.
        """
        return self.mechanism.noise * math.sqrt((left - 1) / (needed(self.threshold, cohort) - 1))

    def share(self, sums: Mapping[str, Sum], cohort: int, key: Key) -> Ints:
        """Return a client's noise, int64 [n], in the order of the integers of an `Element`.

        Args:
            sums: what the method `sums` returned.
            cohort: number of clients that were asked.
            key: seeds the noise, unless the mechanism draws it from the operating system.
        """
        sizes = {name: sum(map(Tensor.numel, tree.leaves(one.like))) for name, one in sums.items()}
        # Rounding moves a contribution by at most sqrt(n) / 2 units, of at least 2**30 in a
        # deviation; if one client replaces another, two contributions are rounded.
        rounded = 2 if self.mechanism.fixed else 1
        moved = rounded * math.sqrt(sum(sizes.values())) / 2
        rounding = self.mechanism.noise * moved / _LEAST_UNITS
        part_of_all = (1 + rounding) / math.sqrt(needed(self.threshold, cohort) - 1)
        found = [np.zeros(0, np.int64)]
        for name in sorted(sums):
            units = 2.0 ** sums[name].start(self.population).bits
            deviation = self.mechanism.deviation(name, len(sums)) * units * part_of_all
            normals = self.mechanism.normals(key.at("client noise", name))(sizes[name])
            found.append(np.rint(deviation * normals).astype(np.int64))
        return np.concatenate(found)


class NoisyClients(PrivateClients):
    """The population during a round of a private run whose clients add the noise.

    A cohort has a fixed size. Sums are divided and rounded as in `PrivateClients`.
    """

    def sample(self, key: Key) -> tuple[int, ...]:
        """Sample this round's cohort, as `Clients.sample` does."""
        return self._cohorts.setdefault(key, Clients.sample(self, key))

    def _reduce(self, exchange: Exchange) -> Outcome:
        noisy = self._noisy(exchange, self._mechanism)
        outcome = self._combine(self._fleet, exchange)
        parts = {name: _finished(noisy[name], total) for name, total in outcome.parts.items()}
        return replace(outcome, parts=parts)


def _finished(reducer: Noisy, total: Tree) -> Tree:
    by = reducer.clients if isinstance(reducer.of, Mean) else 1
    return tree.map(lambda found, like: typed(found / by, like), total, reducer.of.like)


def _float64(leaf: Tensor) -> Tensor:
    return torch.empty(leaf.shape, dtype=torch.float64, device="meta")
