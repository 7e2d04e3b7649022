"""Seeds by path: every random choice has a name, and the name alone decides it.

`Key(0).at("round", 3, "client", 17)` is the same key on every machine and in every order of
work. There is no global generator anywhere in fedshot, so nothing depends on what ran before.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Key:
    """A seed and a path below it.

    >>> Key(0).at("round", 3) == Key(0).at("round").at(3)
    True
    """

    root: int
    path: tuple[str | int, ...] = ()

    def at(self, *parts: str | int) -> Key:
        """Return the key further down the path."""
        return Key(self.root, self.path + parts)

    def above(self, part: str | int) -> Key:
        """Return the key above the last `part` of the path: what all keys below it share.

        >>> Key(0).at("round", 3, "step", 1, "client", 17).above("step") == Key(0).at("round", 3)
        True
        """
        if part not in self.path:
            raise ValueError(f"there is no {part!r} in the path {self.path}")
        last = len(self.path) - 1 - self.path[::-1].index(part)
        return Key(self.root, self.path[:last])

    @property
    def seed(self) -> int:
        """A whole number in [0, 2**63), the same for the same path on every machine."""
        name = json.dumps([self.root, *self.path]).encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1

    def torch(self) -> torch.Generator:
        """Return a fresh torch generator (CPU).

        It takes half of the seed's bits: of tens of thousands of keys two draw alike. What is drawn
        as often as that is drawn by `numpy`.
        """
        return torch.Generator().manual_seed(self.seed)

    def numpy(self) -> np.random.Generator:
        """Return a fresh numpy generator."""
        return np.random.Generator(np.random.Philox(self.seed))

    def tensor(self) -> Tensor:
        """Return the seed as an int64 scalar, the form in which client work receives it."""
        return torch.tensor(self.seed, dtype=torch.int64)


@cache
def draws() -> str:
    """Return the hash of what a key draws here, to four digits after the point.

    Neither numpy nor torch promises that its next version draws the same; two hosts that have this
    in common do. Their processors may differ in the last bits of what follows a normal law.
    """
    rng, key = Key(0).at("draws").numpy(), Key(0).at("draws")
    arrays: list[np.ndarray[Any, Any]] = [
        rng.random(9), rng.random((2, 3), dtype=np.float32), rng.standard_normal(9),
        rng.integers(0, 256, 9), rng.permutation(9), rng.choice(99, 9, replace=False),
        rng.dirichlet(np.full(9, 0.3)),
        *(draw(n, generator=key.torch(), dtype=dtype).numpy()
          for draw in (torch.rand, torch.randn)
          for dtype in (torch.float32, torch.float64)
          for n in (9, 64)),  # many are drawn by the block
        torch.randperm(9, generator=key.torch()).numpy(),
    ]  # fmt: skip
    found = hashlib.blake2b(digest_size=16)
    for one in arrays:
        found.update((one.astype(np.float64).round(4) + 0.0).tobytes())  # of two zeros one
    return found.hexdigest()
