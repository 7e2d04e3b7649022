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

from fedshot.nn import cross_entropy

Signal: TypeAlias = Literal["probability", "logit"]
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # of unknown examples that may be accepted
BINS = 15
_COLDEST, _HOTTEST = 1e-3, 1e4  # temperatures
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Unknown:
    """A threshold for "none of these", and what it does to episodes that it was not made from.

    Args:
        asked: share of unknown examples that may be accepted.
        threshold: probability, or logit, from which an answer is accepted.
        false_accept: share of unknown examples that were.
        false_reject: share of examples of the classes that were turned away.
    """

    asked: float
    threshold: float
    false_accept: float
    false_reject: float


@dataclass(frozen=True)
class Marked:
    """Logits [n, way] of queries, the right classes, -1 for none of them, and the half of each."""

    logits: Tensor
    y: Tensor
    measures: Tensor  # bool: not used to fit


def signals(logits: Tensor, heat: float) -> dict[Signal, Tensor]:
    """Return what may tell examples of the classes from others, float64 [n] each."""
    logits = logits.double()
    probability = torch.softmax(logits / heat, 1).max(1).values
    return {"probability": probability, "logit": logits.max(1).values}


def temperature(logits: Tensor, y: Tensor) -> tuple[float, bool]:
    """Return (the temperature of the least cross-entropy, whether it is the end of the range)."""
    logits = logits.double()

    def loss(log_t: float) -> float:
        return float(cross_entropy(logits / math.exp(log_t), y))

    low, high = math.log(_COLDEST), math.log(_HOTTEST)
    best = golden_section(loss, low, high)
    at_bound = min(best - low, high - best) < 0.01
    return math.exp(best), at_bound


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
    confidence, said = p.max(dim=1)
    right = (said == y).double()
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    gap = torch.zeros(BINS, dtype=torch.float64).index_add(0, place, right - confidence.double())
    return float(gap.abs().sum() / len(y))


def thresholds(marked: Marked, heat: float) -> dict[str, Any]:
    """Return the signal that tells better, how well, and its thresholds."""
    known, half = (marked.y >= 0).numpy(), marked.measures.numpy()
    if known.all():
        return {}
    found = signals(marked.logits, heat)

    def area(signal: Signal, part: np.ndarray[Any, Any]) -> float:
        return float(roc_auc_score(known[part], found[signal].numpy()[part]))

    best = max(found, key=lambda signal: area(signal, ~half))
    lines = lines_of(found[best].numpy(), known, half)
    return {"signal": best, "auroc": area(best, half), "unknown": lines}


def lines_of(
    sure: np.ndarray[Any, Any], known: np.ndarray[Any, Any], half: np.ndarray[Any, Any]
) -> tuple[Unknown, ...]:
    """Return the thresholds of a signal `sure` [n] for all shares; `half` does not fit them."""
    fit, strange, own = sure[~known & ~half], sure[~known & half], sure[known & half]
    found = []
    for share in SHARES:
        # The next number above, since what equals a threshold is accepted.
        line = float(np.nextafter(np.quantile(fit, 1 - share, method="higher"), np.inf))
        accepted, turned = float((strange >= line).mean()), float((own < line).mean())
        found.append(Unknown(share, line, accepted, turned))
    return tuple(found)
