"""Confidence from logits: temperature scaling, calibration error and thresholds.

Logits are divided by the temperature T that minimises the cross-entropy on validation episodes (Guo
et al. 2017, On Calibration of Modern Neural Networks); the loss is convex in 1 / T, so it has one
minimum. A threshold rejects examples of unknown classes. It applies to the largest probability or
the largest logit, whichever separates known from unknown better on validation data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fedshot.core.records import Finite, Share
from fedshot.nn.losses import cross_entropy

Signal: TypeAlias = Literal["probability", "logit"]
End: TypeAlias = Literal["", "cold", "hot"]
Interval: TypeAlias = tuple[Share, Share]
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # shares of unknown examples that may be accepted
BINS = 15
_COLDEST, _HOTTEST = 1e-3, 1e4  # temperatures
_NEAR = 0.01  # log temperatures this close to the hot end of the range count as that end
_RESAMPLED = 1000  # number of bootstrap samples for an interval


@dataclass(frozen=True)
class Unknown:
    """A threshold for rejecting unknown examples; its errors are measured on other episodes."""

    asked: Share  # requested share of unknown examples that are accepted
    threshold: Finite  # minimum probability or logit of an accepted example
    false_accept: Share  # measured share of unknown examples that are accepted
    false_reject: Share  # measured share of known examples that are rejected
    interval: Interval | None = None  # 95 % bootstrap interval of `false_accept`


@dataclass(frozen=True)
class LabelledLogits:
    """The logits of the queries of all episodes, with their labels."""

    logits: Tensor  # [n, way]
    y: Tensor  # int64 [n]; -1 for a class outside the episode
    measures: Tensor  # bool [n]: False in the half for fitting, True in the half for measuring
    episode: Tensor  # int64 [n]: number of the episode


def signals(logits: Tensor, temperature: float) -> dict[Signal, Tensor]:
    """Return the largest probability and largest logit of each example, float64 [n].

    Either signal may separate known from unknown examples.
    """
    logits = logits.double()
    probability = torch.softmax(logits / temperature, 1).max(1).values
    return {"probability": probability, "logit": logits.max(1).values}


def temperature(logits: Tensor, y: Tensor) -> tuple[float, End]:
    """Return (temperature with the smallest cross-entropy, end of the search range or "").

    The temperature is 1 if there is none: at the end "cold" all predictions are correct, so the
    loss has no minimum; at "hot" they are no better than chance.
    """
    logits = logits.double()
    others = logits.scatter(1, y[:, None], -math.inf).max(1).values
    if bool((logits.gather(1, y[:, None])[:, 0] > others).all()):
        return 1.0, "cold"

    def loss(log_t: float) -> float:
        return float(cross_entropy(logits / math.exp(log_t), y))

    low, high = math.log(_COLDEST), math.log(_HOTTEST)
    options = {"xatol": 1e-6}
    best = minimize_scalar(loss, bounds=(low, high), method="bounded", options=options).x
    if high - best < _NEAR:
        return 1.0, "hot"
    return math.exp(best), ""


def expected_calibration_error(p: Tensor, y: Tensor) -> float:
    """Return the mean of |accuracy - confidence| over 15 equal bins, weighted by bin size.

    `p` [n, way] are probabilities; `y` int64 [n] are the labels.
    """
    bins, gap = _gaps(p, y)
    total = torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, gap)
    return float(total.abs().sum() / len(y))


def _gaps(p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return each prediction's bin, and its correctness (0 or 1) minus its confidence, both [n]."""
    confidence, predicted = p.max(dim=1)
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    return bins, (predicted == y).double() - confidence.double()


def error_interval(p: Tensor, y: Tensor, episode: Tensor) -> Interval:
    """Return the 95 % interval of the expected calibration error, by bootstrap over episodes.

    Episodes are resampled, not queries, because the queries of an episode share a support set. The
    error is a sum of absolute values, so its estimate from few episodes is too high on average;
    resampling adds to this bias. `p` [n, way] are probabilities; `y` and `episode` are int64 [n].
    """
    bins, gap = _gaps(p, y)
    ids, number = torch.unique(episode, return_inverse=True)
    sums = torch.zeros(len(ids), BINS, dtype=torch.float64)
    sums.index_put_((number, bins), gap, accumulate=True)
    sizes = torch.bincount(number, minlength=len(ids)).double()
    times = _resampled(len(ids))
    return _interval((times @ sums).abs().sum(1) / (times @ sizes))


def share_interval(hit: Tensor, episode: Tensor) -> Interval:
    """Return the 95 % interval of the share of True values in `hit`, by bootstrap over episodes.

    If all values are equal, the interval is the exact binomial interval over episodes instead.
    """
    ids, number = torch.unique(episode, return_inverse=True)
    sizes = torch.bincount(number, minlength=len(ids)).double()
    hits = torch.bincount(number, weights=hit.double(), minlength=len(ids))
    if not bool(hit.any()):
        return 0.0, 1 - 0.025 ** (1 / len(ids))
    if bool(hit.all()):
        return 0.025 ** (1 / len(ids)), 1.0
    times = _resampled(len(ids))
    return _interval((times @ hits) / (times @ sizes))


def _resampled(n: int) -> Tensor:
    """Return how often each of n episodes is drawn, float64 [bootstraps, n], with a fixed seed."""
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), _RESAMPLED)
    return torch.from_numpy(drawn).double()


def _interval(values: Tensor) -> Interval:
    low, high = np.quantile(values.numpy(), (0.025, 0.975))
    return float(low), float(high)


def thresholds(labelled: LabelledLogits, temperature: float) -> dict[str, Any]:
    """Return fields of `Calibration`: the better signal of confidence, its AUROC and thresholds.

    The signal is the one that better separates examples of known and unknown classes. Returns `{}`
    if there are no examples of unknown classes.
    """
    known, half = (labelled.y >= 0).numpy(), labelled.measures.numpy()
    if known.all():
        return {}
    found = signals(labelled.logits, temperature)

    def area(signal: Signal, part: np.ndarray[Any, Any]) -> float:
        return float(roc_auc_score(known[part], found[signal].numpy()[part]))

    best = max(found, key=lambda signal: area(signal, ~half))
    unknown = thresholds_of(found[best].numpy(), known, half, labelled.episode.numpy())
    return {"signal": best, "auroc": area(best, half), "unknown": unknown}


def thresholds_of(
    signal: np.ndarray[Any, Any],
    known: np.ndarray[Any, Any],
    half: np.ndarray[Any, Any],
    episode: np.ndarray[Any, Any],
) -> tuple[Unknown, ...]:
    """Return a threshold of `signal` [n] for each of `SHARES`.

    The masks `known` and `half` mark the examples of known classes and the half for measuring. The
    thresholds are fitted to unknown examples of the other half. Their error rates are measured on
    the examples in `half`.
    """
    fit, others, own = signal[~known & ~half], signal[~known & half], signal[known & half]
    episodes = torch.from_numpy(episode[~known & half])
    found = []
    for share in SHARES:
        # The next larger number is used, because a signal equal to the threshold is accepted.
        threshold = float(np.nextafter(np.quantile(fit, 1 - share, method="higher"), np.inf))
        accepted = others >= threshold
        interval = share_interval(torch.from_numpy(accepted), episodes)
        rejected = float((own < threshold).mean())
        found.append(Unknown(share, threshold, float(accepted.mean()), rejected, interval))
    return tuple(found)
