"""Which clients of a cohort mask with each other, and how many of them recover a secret.

In a cohort of n clients, each has all others as neighbours, or k = 2 ceil(5 log2 n) of them if
that is fewer, so from 62 clients on. In this graph of Bell et al. 2020, section 3, the clients
stand on a circle in random order, and each masks with its k / 2 nearest clients on each side.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from fractions import Fraction

from fedshot.core.seeds import Key

MIN_CLIENTS = 3
"""Fewest clients of a secure sum; of two, each could subtract its own upload from the sum."""

LARGEST_COMPLETE = 61
"""Most clients of a cohort in which each is a neighbour of all others."""


def needed(threshold: float, n: int) -> int:
    """Return `threshold` times n clients, rounded up, and at least `MIN_CLIENTS`."""
    return max(MIN_CLIENTS, math.ceil(Fraction(str(threshold)) * n))


def degree(n: int) -> int:
    """Return the number of neighbours of each client in a cohort of n clients."""
    return min(n - 1, 2 * math.ceil(5 * math.log2(n)))


def neighbourhoods(clients: Collection[int], key: Key) -> dict[int, tuple[int, ...]]:
    """Return the neighbours of each client, sorted; `key` draws the order of the circle."""
    n, k = len(clients), degree(len(clients))
    if k == n - 1:
        return {c: tuple(other for other in sorted(clients) if other != c) for c in clients}
    order = key.at("circle").numpy().permutation(sorted(clients)).tolist()
    steps = [step for step in range(-k // 2, k // 2 + 1) if step]
    return {c: tuple(sorted(order[(i + step) % n] for step in steps)) for i, c in enumerate(order)}
