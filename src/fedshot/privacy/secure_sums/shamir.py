"""Shamir's secret sharing: any t of n shares give the secret, t - 1 of them tell nothing of it.

Source: Shamir 1979, "How to share a secret", in the field of integers modulo a prime. The functions
of pycryptodome, in GF(2^128), take 100 times as long: minutes to recover 1,000 secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

PRIME = 2**130 - 5  # above every secret of 16 bytes
SECRET_BYTES, SHARE_BYTES = 16, 17


def split(
    secret: int,
    points: Collection[int],
    threshold: int,
    random_bytes: Callable[[int], bytes],
    prime: int = PRIME,
) -> dict[int, int]:
    """Return the share f(x) of each point x, with f(0) = `secret`.

    f is a random polynomial of degree `threshold` - 1. The points are different and in [1, prime).
    """
    coefficients = [secret]
    # Twice the bits of the prime: the remainder is uniform up to 2**-130.
    coefficients += [
        int.from_bytes(random_bytes(2 * SHARE_BYTES)) % prime for _ in range(threshold - 1)
    ]

    def at(x: int) -> int:
        y = 0
        for a in reversed(coefficients):
            y = (y * x + a) % prime
        return y

    return {x: at(x) for x in points}


def combine(shares: Mapping[int, int], prime: int = PRIME) -> int:
    """Return the secret f(0) from at least `threshold` shares, by Lagrange's formula."""
    secret = 0
    for x, y in shares.items():
        over, under = 1, 1
        for other in shares:
            if other != x:
                over = over * other % prime
                under = under * (other - x) % prime
        secret += y * over * pow(under, -1, prime)
    return secret % prime
