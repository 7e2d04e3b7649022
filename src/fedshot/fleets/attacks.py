"""Attacks: what dishonest clients upload in training in place of their honest replies.

An attack changes changes: x is the client's change of a part that the server averages, or its sums
by class; of a model that the server keeps for each client, it is the model minus the one received.
`Liars` finds these parts in a reply. All replies stay well-formed, so the guard admits them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedshot.core.ranges import Above0, AtLeast0, AtLeast1, NotNegative, Share
from fedshot.core.seeds import Key
from fedshot.data.episodes.episode import ClientData
from fedshot.fleets.poisoned_data import flipped, triggered
from fedshot.protocol.client_vectors import ClientVectors


@dataclass(frozen=True)
class Attack:
    """Base of the attacks: who lies, and when.

    Args:
        clients: numbers of the dishonest clients; null: `fraction` of all, drawn from the seed.
        fraction: share of the clients that are dishonest, if `clients` is null.
        from_round: first round in which they lie.
        exchange: number, from 0, of the only exchange of a round in which they lie; null: all. A
            round of few-round learning has several.
    """

    poisons_data: ClassVar[bool] = False  # whether the client's examples are changed

    clients: tuple[AtLeast0, ...] | None = None
    fraction: Share = 0.2
    from_round: AtLeast1 = 1
    exchange: AtLeast0 | None = None

    def data(self, data: ClientData, key: Key) -> ClientData:
        """Return the examples that a dishonest client trains on."""
        del key
        return data

    def change(self, x: Tensor, key: Key) -> Tensor:
        """Return what is uploaded in place of the honest change x [length]."""
        del key
        return x

    def sums(self, x: Tensor, counts: Tensor, key: Key) -> Tensor:
        """Return what is uploaded in place of the sums by class x [classes, d]."""
        del counts
        return self.change(x.reshape(-1), key).view_as(x)


@dataclass(frozen=True)
class Collusion(Attack, ABC):
    """Base of the attacks in which all dishonest clients upload the same, knowing the honest."""

    @abstractmethod
    def collude(self, honest: ClientVectors, liars: int) -> Tensor:
        """Return what all dishonest clients upload, float64 [length]; `honest` has at least one."""


@dataclass(frozen=True)
class SignFlip(Attack):
    """The change is reversed: -factor x.

    Args:
        factor: how many times as large the reversed change is.
    """

    factor: Above0 = 5.0

    def change(self, x: Tensor, key: Key) -> Tensor:
        """Return -factor x."""
        del key
        return -self.factor * x


@dataclass(frozen=True)
class Scaling(Attack):
    """The change is multiplied, so that it replaces the mean (Bagdasaryan et al. 2020).

    Args:
        factor: factor of the change; as large as the number of clients, it replaces the mean
            with the client's own model.
    """

    factor: Above0 = 10.0

    def change(self, x: Tensor, key: Key) -> Tensor:
        """Return factor x."""
        del key
        return self.factor * x


@dataclass(frozen=True)
class GaussianNoise(Attack):
    """Normally distributed noise takes the place of the change.

    Args:
        factor: norm of the noise, in multiples of the norm of the honest change.
    """

    factor: Above0 = 100.0

    def change(self, x: Tensor, key: Key) -> Tensor:
        """Return noise of norm factor ||x||."""
        noise = torch.randn(x.shape, generator=key.torch(), dtype=torch.float64)
        scale = self.factor * float(x.double().norm() / noise.norm())
        return (noise * scale).to(x.dtype)


@dataclass(frozen=True)
class FreeRider(Attack):
    """A change of zero: the client has learnt nothing (Fraboni et al. 2021)."""

    def change(self, x: Tensor, key: Key) -> Tensor:
        """Return zeros."""
        del key
        return torch.zeros_like(x)


@dataclass(frozen=True)
class PrototypePoisoning(Attack):
    """The mean of each class is that of the next class; the model's changes stay honest."""

    def sums(self, x: Tensor, counts: Tensor, key: Key) -> Tensor:
        """Return counts_c times the mean of the next class that the client holds."""
        del key
        held = (counts > 0).nonzero()[:, 0]
        means = x[held] / counts[held, None]
        found = x.clone()
        found[held] = (means.roll(-1, 0) * counts[held, None]).to(x.dtype)
        return found


@dataclass(frozen=True)
class LabelFlip(Attack):
    """About half of the examples of each class have the label of another class.

    In each class these are half the mean number of a class of the client, or all if it has fewer.
    With all labels exchanged, episodes would have the same classes under other names.
    """

    poisons_data: ClassVar[bool] = True

    def data(self, data: ClientData, key: Key) -> ClientData:
        """Return the examples with the changed labels."""
        del key
        return flipped(data)


@dataclass(frozen=True)
class Backdoor(Attack):
    """Examples with a trigger are trained to be of one class (Bagdasaryan et al. 2020).

    Of one class that the client holds, all examples become those of other classes with a trigger:
    a white square on images, a rare first word of texts, a run of large features. The test then
    puts the trigger on the supports of one class and on the queries of all others, and reports the
    share of these queries that the model assigns to the class.

    Args:
        factor: factor of the change, as of the attack `scaling`.
    """

    poisons_data: ClassVar[bool] = True

    factor: Above0 = 5.0

    def data(self, data: ClientData, key: Key) -> ClientData:
        """Return the examples with the triggered class."""
        return triggered(data, key.numpy())

    def change(self, x: Tensor, key: Key) -> Tensor:
        """Return factor x."""
        del key
        return self.factor * x


@dataclass(frozen=True)
class LittleIsEnough(Collusion):
    """All dishonest clients upload mean - z std, within the spread of the honest (Baruch 2019).

    They know the honest uploads of the cohort: on Flower, those of the clients on their own node.

    Args:
        z: standard deviations by which each coordinate is moved; null: the largest z that, by the
            paper's count, leaves the dishonest clients a majority around the moved value. It is 0
            or less for few dishonest clients.
    """

    z: NotNegative | None = 1.5

    def collude(self, honest: ClientVectors, liars: int) -> Tensor:
        """Return mu - z sigma by coordinate."""
        mean, std = _moments(honest)
        return mean - (z_max(len(honest) + liars, liars) if self.z is None else self.z) * std


@dataclass(frozen=True)
class MinMax(Collusion):
    """All dishonest clients upload mean - gamma std (min-max; Shejwalkar and Houmansadr 2021).

    gamma is the largest for which the upload is no farther from any honest one than two honest ones
    are from each other. What they know is as in `little_is_enough`.
    """

    def collude(self, honest: ClientVectors, liars: int) -> Tensor:
        """Return mu + gamma p for p = -sigma; gamma is the least root of the distances."""
        del liars
        mean, std = _moments(honest)
        p, a = -std, float(std.square().sum())
        if not a:
            return mean
        g, n = honest.products(), len(honest)
        d = g.diagonal()
        widest = (d[:, None] + d - 2 * g).max()
        c = d - 2 * g.mean(1) + g.sum() / n**2 - widest  # ||mu - x_k||^2 - widest
        b = p @ mean - honest.dots(p)  # p (mu - x_k)
        gamma = ((b.square() - a * c).clamp_min(0).sqrt() - b) / a
        return mean + float(gamma.min()) * p


ATTACKS: dict[str, type[Attack]] = {
    "sign_flip": SignFlip,
    "scaling": Scaling,
    "gaussian": GaussianNoise,
    "free_rider": FreeRider,
    "prototypes": PrototypePoisoning,
    "label_flip": LabelFlip,
    "backdoor": Backdoor,
    "little_is_enough": LittleIsEnough,
    "min_max": MinMax,
}


def z_max(n: int, f: int) -> float:
    """Return z of Baruch et al. 2019, algorithm 3, for n clients, f of them dishonest.

    s = floor(n / 2 + 1) - f honest clients are needed for a majority, and z is the quantile
    (n - f - s) / (n - f) of the normal distribution. s is held from 1/2 to n - f - 1/2, so that z
    is finite also where the dishonest clients are the majority.
    """
    from scipy.special import ndtri

    s = min(max(n // 2 + 1 - f, 0.5), n - f - 0.5)
    return float(ndtri((n - f - s) / (n - f)))


def _moments(vectors: ClientVectors) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of each coordinate, float64 [length] each."""
    mean, std = torch.empty(2, vectors.length, dtype=torch.float64)
    for at, block in vectors.blocks():
        values = block.double()
        mean[at], std[at] = values.mean(0), values.std(0, correction=0)
    return mean, std
