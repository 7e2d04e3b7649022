"""The mode of a forward pass: dropout and batch norm, set once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.nn.stacks import stacked

_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as a signed word
_MIX = (-4658895280553007687, -7723592293110705685)  # multipliers of splitmix64


def mix64(word: Tensor) -> Tensor:
    """Hash int64 words bijectively (the finaliser of splitmix64); integer overflow wraps."""
    # The masks turn int64's arithmetic shift into the unsigned shift of the original.
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * _MIX[0]
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * _MIX[1]
    return word ^ ((word >> 31) & 0x1FFFFFFFF)


def mix_int(word: int) -> int:
    """Compute `mix64` for a Python integer, in a tenth of the time of the tensor operations."""
    word %= 2**64
    word = (word ^ (word >> 30)) * _MIX[0] % 2**64
    word = (word ^ (word >> 27)) * _MIX[1] % 2**64
    return signed(word ^ (word >> 31))


def _mixed_int(word: int, site: int) -> int:
    return mix_int(mix_int(word) + (site + 1) * _GOLDEN)


def grid(seed: Tensor, rows: int, columns: int) -> list[list[Tensor]]:
    """Return a table of seeds: entry [i][j] is the seed of `Mode(seed=seed).layer(i).layer(j)`.

    For stacked clients, computing the seeds one by one would take a fifth of all operations in a
    training step of a small net.
    """
    if readable(seed):
        of_rows = [_mixed_int(int(seed), i) for i in range(rows)]
        return [[torch.tensor(_mixed_int(word, j)) for j in range(columns)] for word in of_rows]
    # int64 products wrap, as `signed` does.
    i, j = (torch.arange(1, n + 1, device=seed.device) * _GOLDEN for n in (rows, columns))
    words = mix64(mix64(mix64(mix64(seed) + i)[:, None]) + j)
    return [list(row.unbind()) for row in words.unbind()]


def signed(word: int, bits: int = 64) -> int:
    """Reduce a Python integer to a signed word of `bits` bits."""
    half = 1 << (bits - 1)
    return (word + half) % (2 * half) - half


def readable(seed: Tensor) -> bool:
    """Whether a seed can be read as a Python integer.

    It cannot on a GPU, or under `vmap`, where one tensor has the seeds of all stacked clients.
    """
    return seed.device.type == "cpu" and not stacked()


@dataclass(frozen=True)
class Mode:
    """The mode of one forward pass.

    `train` turns dropout on. `norm` selects the statistics of batch norm: "batch" uses those of the
    batch and returns updated running statistics; "given" uses those passed in; "capture" uses and
    returns those of the batch. `seed`, an int64 scalar, seeds dropout masks.
    """

    train: bool = False
    norm: Literal["batch", "given", "capture"] = "given"
    seed: Tensor | None = None

    def __post_init__(self) -> None:
        if self.norm not in ("batch", "given", "capture"):
            raise ConfigError(f"norm is {self.norm!r}; expected 'batch', 'given' or 'capture'.")

    def layer(self, i: int) -> Mode:
        """Return the mode with a separate seed for site `i` (a layer, or a step of a loop).

        It works under `torch.func.vmap`, too, where the seeds of stacked clients are one tensor.
        """
        if self.seed is None:
            return self
        if readable(self.seed):
            return replace(self, seed=torch.tensor(_mixed_int(int(self.seed), i)))
        return replace(self, seed=mix64(mix64(self.seed) + signed((i + 1) * _GOLDEN)))
