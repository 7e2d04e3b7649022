"""The privacy loss of noisy sums: epsilon at a given delta, after a number of rounds.

Two data sets are neighbours if one has a client (or an example) more than the other. A round
releases k sums about one cohort, each with noise multiplier z: the standard deviation of the noise
divided by the most that one client can change the sum (L2). Together the sums are one Gaussian
mechanism of multiplier z / sqrt(k), even if each depends on those before it (Dong et al. 2022,
Gaussian differential privacy, corollary 3.3). A client is in the cohort with probability q,
independently of others, and this amplifies the privacy of the round as a whole. Counting every
release as if it had a cohort of its own would give too small an epsilon.

If cohorts have a fixed size, drawn without replacement, neighbours differ in one client's data, and
z is the deviation divided by the most that this changes a sum. The bound on the Renyi divergences
is that of Wang et al. 2019 (Subsampled Renyi differential privacy and analytical moments
accountant), which is looser than that of the loss distributions. Epsilon is at most what cohorts of
all clients spend.

The accountant is that of dp-accounting: privacy loss distributions, rounded up, or where all
clients take part the exact value for Gaussian mechanisms (Balle and Wang 2018).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fedshot.core.extras import require

_INTERVAL = 1e-3  # of a privacy loss distribution; a smaller one changes the fourth digit


@dataclass(frozen=True)
class Accountant:
    """Counts the privacy loss of a run.

    Args:
        noise: noise multiplier of each released sum, above 0.
        delta: the delta at which epsilon is stated.
        releases: number of sums that are released about each cohort.
        probability: probability that a client is in a cohort.
        fixed_of: the number of all clients, if cohorts have a fixed size; None if each client is
            in a cohort independently of others.
    """

    noise: float
    delta: float
    releases: int = 1
    probability: float = 1.0
    fixed_of: int | None = None

    def epsilon(self, rounds: int) -> float:
        """Return epsilon at `delta` after this number of rounds."""
        require("privacy", "privacy")
        if rounds == 0:
            return 0.0
        noise = self.noise / math.sqrt(self.releases)
        if self.probability < 1 and self.fixed_of is None:
            found = _round(noise, self.probability).self_compose(rounds)
            return float(found.get_epsilon_for_delta(self.delta))
        from dp_accounting import get_epsilon_gaussian

        of_all = float(get_epsilon_gaussian(noise / math.sqrt(rounds), self.delta))
        if self.fixed_of is None:
            return of_all
        cohort = round(self.probability * self.fixed_of)
        return min(of_all, _without_replacement(noise, self.fixed_of, cohort, rounds, self.delta))

    def rounds_within(self, epsilon: float, most: int) -> int:
        """Return the largest number of rounds, up to `most`, that spend at most `epsilon`."""
        low, high = 0, most + 1  # low rounds fit, and high rounds do not or are too many
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon(middle) <= epsilon else (low, middle)
        return low

    def calibrated(self, epsilon: float, rounds: int) -> Accountant:
        """Return a copy with the least noise, to 0.1 %, whose `rounds` spend at most `epsilon`."""
        from scipy.optimize import brentq

        def excess(exponent: float) -> float:
            return replace(self, noise=2.0**exponent).epsilon(rounds) - epsilon

        low = high = math.log2(self.noise)
        while excess(high) > 0:
            low, high = high, high + 1
        while low == high or excess(low) < 0:
            low, high = low - 1, low
        found = 2.0 ** brentq(excess, low, high, xtol=1e-3)
        digits = 3 - math.floor(math.log10(found))
        while True:
            noise = math.ceil(found * 10**digits) / 10**digits
            made = replace(self, noise=noise)
            if made.epsilon(rounds) <= epsilon:
                return made
            found = noise * 1.0005


@lru_cache(64)
def _round(noise: float, probability: float) -> Any:
    """Return the privacy loss distribution of a round."""
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=probability, value_discretization_interval=_INTERVAL
    )


@lru_cache(64)
def _without_replacement(
    noise: float, clients: int, cohort: int, rounds: int, delta: float
) -> float:
    """Return epsilon of rounds that each draw a cohort of a fixed size."""
    import dp_accounting as dp

    event = dp.SampledWithoutReplacementDpEvent(clients, cohort, dp.GaussianDpEvent(noise))
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    return float(accountant.compose(event, rounds).get_epsilon(delta))
