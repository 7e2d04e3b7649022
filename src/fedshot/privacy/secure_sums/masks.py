"""Derives masks from seeds; used by the clients and by the server of a secure sum."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from fedshot.privacy.secure_sums.ciphers import agree, derive, private_key, stream
from fedshot.protocol.exchange import Exchange


def context_of(exchange: Exchange) -> str:
    """Return a text that identifies an exchange within its run."""
    return json.dumps([exchange.version, exchange.key.root, exchange.key.path])


def pair_key(pair_seed: bytes, context: str) -> Any:
    """Return the private key from which a client derives its masks with neighbours."""
    return private_key(pair_seed, "pair key", context)


def pair_mask(private: Any, public: bytes, context: str, pair: tuple[int, int], n: int) -> bytes:
    """Return the mask of n bytes that a client has in common with a neighbour.

    Args:
        private: the `pair_key` of one of the two.
        public: the public key of the other.
        context: the exchange.
        pair: both clients, in either order.
        n: number of bytes.
    """
    return stream(derive(agree(private, public), "pair mask", context, *sorted(pair)), n)


def self_mask(self_seed: bytes, context: str, n: int) -> bytes:
    """Return a client's own mask, n bytes; others can derive it only if they recover its seed."""
    return stream(derive(self_seed, "self mask", context), n)


def sign(client: int, other: int) -> int:
    """Return 1 if `client` adds the mask that it has in common with `other`, -1 if it subtracts."""
    return 1 if client < other else -1


def point(client: int) -> int:
    """Return the point x of a client: its share of a secret is f(x), as in `shamir.split`.

    Raises ValueError for a negative client: f(0) is the secret itself.
    """
    if client < 0:
        raise ValueError(f"client {client} is negative")
    return client + 1


def rows(*texts: bytes) -> Tensor:
    """Return byte strings of equal length as uint8 [strings, length]."""
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8).view(len(texts), -1)


def text(row: Tensor) -> bytes:
    """Return a row of `rows` as a byte string."""
    return row.numpy().tobytes()
