"""Attacks: what dishonest clients upload in training in place of their honest replies.

An attack replaces the client's honest x in a part of its reply. If the server averages the part, x
is the change that the client uploads, or its sums by class. If the server keeps a model for each
client, x is the client's model minus the one received.
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
        clients: ids of the dishonest clients; null: `fraction` of all, drawn from the seed.
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
        """Return what is uploaded in place of the sums x [classes, d] of `counts` examples."""
        del counts
        return self.change(x.reshape(-1), key).view_as(x)


@dataclass(frozen=True)
class Collusion(Attack, ABC):
    """Base of the attacks in which all dishonest clients upload the same.

    They know the honest clients' uploads.
    """

    @abstractmethod
    def collude(self, honest: ClientVectors, liars: int) -> Tensor:
        """Return what all `liars` dishonest clients upload, float64 [length].

        `honest` has the uploads of the honest clients, at least one.
        """


@dataclass(frozen=True)
class SignFlip(Attack):
    """The change is reversed: -factor x.

    Args:
        factor: how many times as large the reversed change is.
    """

    factor: Above0 = 5.0

    def change(self, x: Tensor, key: Key) -> Tensor:
        """Return -`factor` * x."""
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
        """Return `factor` * x."""
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
        """Return normally distributed noise with norm `factor` * ||x||."""
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
        """Return, for each class c, counts[c] times the mean of the client's next class."""
        del key
        held = (counts > 0).nonzero()[:, 0]
        means = x[held] / counts[held, None]
        found = x.clone()
        found[held] = (means.roll(-1, 0) * counts[held, None]).to(x.dtype)
        return found


@dataclass(frozen=True)
class LabelFlip(Attack):
    """About half of the examples of each class have the label of another class.

    The number of changed labels in a class is half the client's mean number of examples per class,
    or all if the class has fewer. With all labels exchanged, episodes would have the same classes
    under other names.
    """

    poisons_data: ClassVar[bool] = True

    def data(self, data: ClientData, key: Key) -> ClientData:
        """Return the examples with the changed labels."""
        del key
        return flipped(data)


@dataclass(frozen=True)
class Backdoor(Scaling):
    """Examples with a trigger are trained to be of one class (Bagdasaryan et al. 2020).

    Examples of the client's other classes, with a trigger, replace all examples of one class. The
    trigger is a white square on images, a rare first word of texts, or a run of large features. The
    test then puts the trigger on the supports of one class and on the queries of all others, and
    reports the share of these queries that the model assigns to the class.

    Args:
        factor: factor of the change, as of the attack `scaling`.
    """

    poisons_data: ClassVar[bool] = True

    factor: Above0 = 5.0

    def data(self, data: ClientData, key: Key) -> ClientData:
        """Return the examples; those of one class are replaced by examples with the trigger."""
        return triggered(data, key.numpy())


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
        """Return mean - z std of the honest uploads, by coordinate."""
        mean, std = _moments(honest)
        return mean - (z_max(len(honest) + liars, liars) if self.z is None else self.z) * std


@dataclass(frozen=True)
class MinMax(Collusion):
    """All dishonest clients upload mean - gamma std (min-max; Shejwalkar and Houmansadr 2021).

    gamma is the largest value for which the upload is no farther from any honest one than two
    honest ones are from each other. They know the same uploads as in `little_is_enough`.
    """

    def collude(self, honest: ClientVectors, liars: int) -> Tensor:
        """Return mean + gamma p, with p = -std.

        gamma is the least solution >= 0, over the honest x_k, of ||mean + gamma p - x_k|| = the
        largest distance between two honest uploads.
        """
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
    (n - f - s) / (n - f) of the normal distribution. s is clamped to [1/2, n - f - 1/2], so that
    z is finite even if the dishonest clients are the majority.
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
