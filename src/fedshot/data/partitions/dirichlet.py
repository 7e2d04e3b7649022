"""Shares drawn from a Dirichlet distribution, and counts that follow such shares."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedshot.data.dataset import Ints

_EVEN = 1e12  # above this alpha shares are equal to six digits, and gamma draws near overflow


def shares(clients: int, alpha: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return q ~ Dir(alpha 1_K) for K clients, float64 [K], which sums to 1."""
    q = rng.dirichlet(np.full(clients, min(alpha, _EVEN)))
    if not np.isfinite(q).all() or q.sum() <= 0:  # alpha so small that all draws underflow
        q = np.zeros(clients)
        q[rng.integers(clients)] = 1.0
    return q


def counts(q: npt.NDArray[np.float64], n: int) -> Ints:
    """Divide `n` in the proportions `q` by the largest-remainder method; return counts, int64 [K].

    Each share of `n` is rounded down, and the rest goes to the largest fractions, one each. All
    clients are treated alike: if the distribution of `q` is symmetric, all clients have the same
    expected count.
    """
    # 1e-9: a product that misses an integer only by rounding is that integer.
    whole = np.floor(q * n + 1e-9).astype(np.int64)
    left = n - int(whole.sum())
    whole[np.argsort(whole - q * n, kind="stable")[:left]] += 1
    return whole
