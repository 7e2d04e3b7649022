"""Shamir's secret sharing, against all secrets and polynomials of a small field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations, product

import pytest

from fedshot.privacy.secure_sums.shamir import PRIME, SECRET_BYTES, SHARE_BYTES, combine, split


def given(*coefficients: int) -> Callable[[int], bytes]:
    """Return a source of random bytes that draws these coefficients."""
    left: Iterator[int] = iter(coefficients)
    return lambda n: next(left).to_bytes(n)


def test_shares_are_values_of_the_polynomial() -> None:
    assert split(3, (1, 2, 4), 3, given(5, 2), prime=11) == {
        x: (3 + 5 * x + 2 * x * x) % 11 for x in (1, 2, 4)
    }


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_any_t_shares_give_the_secret_and_fewer_nothing(threshold: int) -> None:
    prime, points = 5, (1, 2, 3, 4)
    seen: dict[tuple[int, ...], dict[int, Counter[tuple[int, ...]]]] = {}
    for secret in range(prime):
        for coefficients in product(range(prime), repeat=threshold - 1):
            shares = split(secret, points, threshold, given(*coefficients), prime)
            for held in combinations(points, threshold):
                assert combine({x: shares[x] for x in held}, prime) == secret
            for held in combinations(points, threshold - 1):
                counts = seen.setdefault(held, {}).setdefault(secret, Counter())
                counts[tuple(shares[x] for x in held)] += 1
    for by_secret in seen.values():
        assert all(counts == by_secret[0] for counts in by_secret.values())


def test_the_prime_has_room_for_a_secret_and_a_share_for_the_prime() -> None:
    assert 2 ** (8 * SECRET_BYTES) < PRIME < 2 ** (8 * SHARE_BYTES)
    assert pow(3, PRIME - 1, PRIME) == 1
    secret = 2 ** (8 * SECRET_BYTES) - 1
    shares = split(secret, (1, 7, 1000), 2, lambda n: b"\xff" * n)
    assert combine({x: shares[x] for x in (7, 1000)}) == secret
