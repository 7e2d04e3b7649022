"""From logits to confidence: a temperature, its error, and what is none of the classes.

Logits are divided by a temperature T, found by minimising the cross-entropy of episodes of the
validation classes (Guo et al. 2017); the loss is convex in 1 / T, so a golden section finds it.
What is none of the classes is turned away by a threshold on the largest probability, or on the
largest logit, which for prototypes is the distance to the nearest: whichever tells better, as
measured on examples of classes that the logits know nothing of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fedshot.nn.losses import cross_entropy

Signal: TypeAlias = Literal["probability", "logit"]
End: TypeAlias = Literal["", "cold", "hot"]
Interval: TypeAlias = tuple[float, float]
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # of unknown examples that may be accepted
BINS = 15
_COLDEST, _HOTTEST = 1e-3, 1e4  # temperatures
_NEAR = 0.01  # of an end, in nats of the temperature
_RESAMPLED = 1000  # bootstraps of an interval
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Unknown:
    """A threshold for "none of these", and what it does to episodes that it was not made from.

    Args:
        asked: share of unknown examples that may be accepted.
        threshold: probability, or logit, from which an answer is accepted.
        false_accept: share of unknown examples that were.
        false_reject: share of examples of the classes that were turned away.
        interval: 95 % of bootstraps of `false_accept` over episodes; None for older measurements.
    """

    asked: float
    threshold: float
    false_accept: float
    false_reject: float
    interval: Interval | None = None


@dataclass(frozen=True)
class Marked:
    """Logits [n, way] of queries, the right classes, -1 for none of them, half and episode."""

    logits: Tensor
    y: Tensor
    measures: Tensor  # bool: not used to fit
    episode: Tensor  # int64


def signals(logits: Tensor, heat: float) -> dict[Signal, Tensor]:
    """Return what may tell examples of the classes from others, float64 [n] each."""
    logits = logits.double()
    probability = torch.softmax(logits / heat, 1).max(1).values
    return {"probability": probability, "logit": logits.max(1).values}


def temperature(logits: Tensor, y: Tensor) -> tuple[float, End]:
    """Return (the temperature of the least cross-entropy, the end of the range that it lies at).

    There it is 1: "cold", where all answers are right, the loss falls for ever; "hot", where they
    are no better than chance, every temperature is too low. Neither says how sure to be.
    """
    logits = logits.double()

    def loss(log_t: float) -> float:
        return float(cross_entropy(logits / math.exp(log_t), y))

    low, high = math.log(_COLDEST), math.log(_HOTTEST)
    best = golden_section(loss, low, high)
    if best - low < _NEAR:
        return 1.0, "cold"
    if high - best < _NEAR:
        return 1.0, "hot"
    return math.exp(best), ""


def golden_section(f: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one valley is lowest, to 1e-6."""
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    fa, fb = f(a), f(b)
    while high - low > 1e-6:
        if fa <= fb:
            high, b, fb = b, a, fa
            a = high - _GOLDEN * (high - low)
            fa = f(a)
        else:
            low, a, fa = a, b, fb
            b = low + _GOLDEN * (high - low)
            fb = f(b)
    return (low + high) / 2


def expected_calibration_error(p: Tensor, y: Tensor) -> float:
    """Return the mean over 15 equal bins of |accuracy - confidence|, weighted by their sizes."""
    place, gap = _gaps(p, y)
    total = torch.zeros(BINS, dtype=torch.float64).index_add(0, place, gap)
    return float(total.abs().sum() / len(y))


def _gaps(p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bin of every answer, and whether it is right less its confidence."""
    confidence, said = p.max(dim=1)
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    return place, (said == y).double() - confidence.double()


def error_interval(p: Tensor, y: Tensor, episode: Tensor) -> Interval:
    """Return the 95 % interval of the expected calibration error, by bootstrap over episodes.

    Queries of an episode share a support, so episodes are drawn, not queries. The error is a sum of
    absolute values, so that few episodes overstate it, and its bootstraps more so.
    """
    place, gap = _gaps(p, y)
    ids, where = torch.unique(episode, return_inverse=True)
    sums = torch.zeros(len(ids), BINS, dtype=torch.float64)
    sums.index_put_((where, place), gap, accumulate=True)
    sizes = torch.bincount(where, minlength=len(ids)).double()
    times = _times(len(ids))
    return _middle((times @ sums).abs().sum(1) / (times @ sizes))


def share_interval(hit: Tensor, episode: Tensor) -> Interval:
    """Return the 95 % interval of a share of queries, by bootstrap over episodes.

    Where none or all of them hit, which no bootstrap varies, the exact binomial one over episodes.
    """
    ids, where = torch.unique(episode, return_inverse=True)
    sizes = torch.bincount(where, minlength=len(ids)).double()
    hits = torch.bincount(where, weights=hit.double(), minlength=len(ids))
    if not bool(hit.any()):
        return 0.0, 1 - 0.025 ** (1 / len(ids))
    if bool(hit.all()):
        return 0.025 ** (1 / len(ids)), 1.0
    times = _times(len(ids))
    return _middle((times @ hits) / (times @ sizes))


def _times(n: int) -> Tensor:
    """Return how often each of n episodes is drawn, float64 [bootstraps, n]; always the same."""
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), _RESAMPLED)
    return torch.from_numpy(drawn).double()


def _middle(values: Tensor) -> Interval:
    low, high = np.quantile(values.numpy(), (0.025, 0.975))
    return float(low), float(high)


def thresholds(marked: Marked, heat: float) -> dict[str, Any]:
    """Return the signal that tells better, how well, and its thresholds."""
    known, half = (marked.y >= 0).numpy(), marked.measures.numpy()
    if known.all():
        return {}
    found = signals(marked.logits, heat)

    def area(signal: Signal, part: np.ndarray[Any, Any]) -> float:
        return float(roc_auc_score(known[part], found[signal].numpy()[part]))

    best = max(found, key=lambda signal: area(signal, ~half))
    lines = lines_of(found[best].numpy(), known, half, marked.episode.numpy())
    return {"signal": best, "auroc": area(best, half), "unknown": lines}


def lines_of(
    sure: np.ndarray[Any, Any],
    known: np.ndarray[Any, Any],
    half: np.ndarray[Any, Any],
    episode: np.ndarray[Any, Any],
) -> tuple[Unknown, ...]:
    """Return the thresholds of a signal `sure` [n] for all shares; `half` does not fit them."""
    fit, strange, own = sure[~known & ~half], sure[~known & half], sure[known & half]
    asked = torch.from_numpy(episode[~known & half])
    found = []
    for share in SHARES:
        # The next number above, since what equals a threshold is accepted.
        line = float(np.nextafter(np.quantile(fit, 1 - share, method="higher"), np.inf))
        accepted, turned = float((strange >= line).mean()), float((own < line).mean())
        interval = share_interval(torch.from_numpy(strange >= line), asked)
        found.append(Unknown(share, line, accepted, turned, interval))
    return tuple(found)
