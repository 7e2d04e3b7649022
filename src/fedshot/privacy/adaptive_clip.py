"""A clip that follows a quantile of the clients' norms.

Source: Andrew et al. 2021, Differentially private learning with adaptive clipping, algorithm 1.
Symbols: C the clip; gamma the quantile; b_i whether the norm of client i is at most C; m the
expected number of clients in a cohort; z the noise multiplier of an exchange. The server learns the
sum of the clipped parts, with noise multiplier z_s, and the sum of b_i - 1/2, with z_b:

    z^-2 = z_s^-2 + z_b^-2;   b = 1/2 + (sum_i (b_i - 1/2) + noise) / m;
    C <- C exp(-eta (b - gamma))

Both are one Gaussian mechanism of multiplier z, so an exchange costs what it costs with a fixed
clip. As in the paper, eta is 0.2 and z_b is m / 10, so that the noise in b has deviation 1/20,
or 1/10 if cohorts have a fixed size.
Departure from the paper: z_b is at least 2 z, so that with few clients the count takes at most a
quarter of the budget. With a clip for each part, each has a count of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedshot.core.tree import Tree
from fedshot.privacy.differential import Clip, Mechanism, norm_of

COUNT = "below the clip"  # the part of the counts
_RATE = 0.2  # eta
_LEAST = 2.0**-40  # of the clip, if clients send zeros


def split(noise: float, clients: int) -> tuple[float, float]:
    """Return the noise multipliers (z_s, z_b) of the sums and of the counts.

    Args:
        noise: the multiplier of both together, z; 0 adds none, for tests.
        clients: the expected number of clients in a cohort, m.
    """
    if not noise:
        return 0.0, 0.0
    of_count = max(clients / 10, 2 * noise)
    return (noise**-2 - of_count**-2) ** -0.5, of_count


@dataclass(frozen=True)
class AdaptiveClip:
    """The clips of a run, as they are now.

    A clip has the name of its part, if each part has one, or else of the client function.

    Args:
        first: the mechanism with the initial clip or clips, and an exchange's noise multiplier.
        clients: the expected number of clients in a cohort, m.
        clips: the clips that have changed, by name; `update` writes them.
    """

    first: Mechanism
    clients: int
    clips: dict[str, float]

    def mechanism(self, work: str) -> Mechanism:
        """Return the mechanism of the next exchange that runs the client function `work`."""
        noise, _ = split(self.first.noise, self.clients)
        clip = self.first.clip
        if isinstance(clip, Mapping):
            return replace(self.first, noise=noise, clip={**clip, **self.clips})
        return replace(self.first, noise=noise, clip=self.clips.get(work, clip))

    def below(self, work: str, up: Mapping[str, Tree]) -> dict[str, Tensor]:
        """Return b_i - 1/2 of a client's upload, a scalar for each clip, by the clip's name."""
        clip = self.mechanism(work).clip
        parts = up if isinstance(clip, Mapping) else {work: dict(up)}
        return {
            name: torch.tensor((norm_of(part) <= _of(clip, name)) - 0.5, dtype=torch.float64)
            for name, part in parts.items()
        }

    def deviation(self, clips: int) -> float:
        """Return the standard deviation of the noise in each sum of b_i - 1/2.

        `clips` is the number of clips of an exchange, each of which has such a sum.
        """
        _, noise = split(self.first.noise, self.clients)
        return noise * math.sqrt(clips) * (1 if self.first.fixed else 0.5)

    def update(self, work: str, counts: Mapping[str, Tensor]) -> None:
        """Update the clips of an exchange; `counts` has, by clip, the noisy sum of b_i - 1/2."""
        clip, quantile = self.mechanism(work).clip, self.first.quantile
        assert quantile is not None
        for name, count in counts.items():
            b = 0.5 + float(count) / self.clients
            self.clips[name] = max(_of(clip, name) * math.exp(-_RATE * (b - quantile)), _LEAST)


def _of(clip: Clip | None, name: str) -> float:
    assert clip is not None
    return clip[name] if isinstance(clip, Mapping) else clip
