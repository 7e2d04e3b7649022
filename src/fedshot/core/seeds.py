"""Random seeds derived from a path: every random choice is a function of its key alone.

`Key(0).at("round", 3, "client", 17)` is the same key on every machine and in every order of
execution. fedshot uses no global generator, so no result depends on what ran before.
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
    """A root seed and a path below it.

    >>> Key(0).at("round", 3) == Key(0).at("round").at(3)
    True
    """

    root: int
    path: tuple[str | int, ...] = ()

    def at(self, *parts: str | int) -> Key:
        """Return the key whose path is this key's path followed by `parts`."""
        return Key(self.root, self.path + parts)

    def above(self, part: str | int) -> Key:
        """Return the key whose path ends before the last `part`.

        >>> Key(0).at("round", 3, "step", 1, "client", 17).above("step") == Key(0).at("round", 3)
        True
        """
        if part not in self.path:
            raise ValueError(f"there is no {part!r} in the path {self.path}")
        last = len(self.path) - 1 - self.path[::-1].index(part)
        return Key(self.root, self.path[:last])

    @property
    def seed(self) -> int:
        """An integer in [0, 2**63) that depends only on root and path."""
        name = json.dumps([self.root, *self.path]).encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1

    def torch(self) -> torch.Generator:
        """Return a fresh torch generator (CPU).

        It uses only half of the seed's bits, so among tens of thousands of keys two may give the
        same stream. Use `numpy` for choices made that often.
        """
        return torch.Generator().manual_seed(self.seed)

    def numpy(self) -> np.random.Generator:
        """Return a fresh numpy generator."""
        return np.random.Generator(np.random.Philox(self.seed))

    def tensor(self) -> Tensor:
        """Return the seed as an int64 scalar tensor, as clients receive it."""
        return torch.tensor(self.seed, dtype=torch.int64)


@cache
def draws() -> str:
    """Return a hash of random numbers drawn on this machine, rounded to four decimals.

    Neither numpy nor torch promises to draw the same numbers in every version. Two machines with
    equal hashes draw the same numbers, except for the last bits of normally distributed ones.
    """
    rng, key = Key(0).at("draws").numpy(), Key(0).at("draws")
    arrays: list[np.ndarray[Any, Any]] = [
        rng.random(9), rng.random((2, 3), dtype=np.float32), rng.standard_normal(9),
        rng.integers(0, 256, 9), rng.permutation(9), rng.choice(99, 9, replace=False),
        rng.dirichlet(np.full(9, 0.3)),
        *(draw(n, generator=key.torch(), dtype=dtype).numpy()
          for draw in (torch.rand, torch.randn)
          for dtype in (torch.float32, torch.float64)
          for n in (9, 64)),  # torch draws larger sizes in blocks
        torch.randperm(9, generator=key.torch()).numpy(),
    ]  # fmt: skip
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update((array.astype(np.float64).round(4) + 0.0).tobytes())  # -0.0 becomes 0.0
    return found.hexdigest()
