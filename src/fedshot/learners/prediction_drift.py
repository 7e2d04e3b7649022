"""Client drift in predictions: how far the models of clients disagree on synthetic episodes.

The server has no data, and a client's data stay private, so the episodes are synthetic: a class is
a random pattern, and an example is its class's pattern with half of the bytes (or words) drawn
anew. They depend only on the shape of the data, so every client draws the same ones and none are
sent. Predictions on noise show how much the models differ as functions, not how much they differ on
real images.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.devices import CPU
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.learner import EvalEpisode
from fedshot.learners.maml import Maml
from fedshot.nn.models.model import Model

WAYS = 5  # classes of an episode, or as many as the head has
QUERIES = 5  # of each class
PART = "common_questions"  # key of the predictions in a client's upload


def common_questions(model: Model, n: int, device: torch.device = CPU) -> tuple[EvalEpisode, ...]:
    """Return n synthetic one-shot episodes, the same at all clients, as inputs of the model."""
    text = model.table is not None
    shape = model.shape[:1] if text else model.shape
    words = 0 if model.table is None else len(model.table)
    drawn = (_draw(shape, words, _ways(model), u, device) for u in range(n))
    if model.kind != "features":
        return tuple(drawn)
    return tuple(  # bytes become numbers from -1 to 1
        one._replace(support_x=one.support_x / 127.5 - 1, query_x=one.query_x / 127.5 - 1)
        for one in drawn
    )


def _ways(model: Model) -> int:
    assert model.head is not None
    return min(model.head.way, WAYS)


@cache  # unbounded: a recorded graph has the addresses
def _draw(
    shape: tuple[int, ...], words: int, way: int, u: int, device: torch.device
) -> EvalEpisode:
    # Drawn by numpy, because torch's random operations would run under vmap with stacked clients.
    rng = Key(0).at("probe", u).numpy()
    low, high, dtype = (1, words, np.int32) if words else (0, 256, np.uint8)

    def noise(n: int) -> np.ndarray[Any, Any]:
        return rng.integers(low, high, (n, *shape)).astype(dtype)

    patterns, examples = noise(way), []
    for n in (1, QUERIES):
        x = patterns.repeat(n, 0)
        keep = rng.random(x.shape) < 0.5
        examples.append(torch.from_numpy(np.where(keep, x, noise(len(x)))))
    drawn = EvalEpisode(examples[0], torch.arange(way), examples[1], torch.arange(way))
    found: EvalEpisode = tree.to(drawn, device)
    return found


def common_form(model: Model, n: int) -> dict[str, Tensor]:
    """Return {"common_questions": a meta tensor} with the shape and dtype that clients upload.

    That is float32 [n * queries, way], as `answer_common` returns it. Returns `{}` for n = 0.
    """
    if n == 0:
        return {}
    way = _ways(model)
    return {PART: torch.empty(n * QUERIES * way, way, device="meta")}


def answer_common(learner: Maml, params: Tree, stats: Tree, n: int) -> dict[str, Tensor]:
    """Return a client's predictions on the n synthetic episodes: `{"common_questions": log p}`.

    log p is float32 [n * queries, way]. All values are finite, so that they never cause a client's
    reply to be rejected: log p is at least -80, and NaN is replaced by 1.0, which no
    log-probability can be. Returns `{}` for n = 0.
    """
    if n == 0:
        return {}
    device = tree.leaves(params)[0].device
    episodes = common_questions(learner.model, n, device)
    logits = torch.cat([learner.answer(params, stats, e).detach().float() for e in episodes])
    log_p = logits.log_softmax(-1).clamp(min=-80.0)
    return {PART: torch.where(log_p.isnan(), 1.0, log_p)}


def divergence(parts: Mapping[str, Any]) -> dict[str, float]:
    """Return `{"divergence": mean over pairs of clients of (KL(i || j) + KL(j || i)) / 2}`, nats.

    The mean is also over queries. Clients whose predictions contain NaN are left out. Returns `{}`
    for fewer than two clients.

    The mean over ordered pairs of sum p_i (log p_i - log p_j) is
    (K sum_i p_i log p_i - sum_i p_i sum_j log p_j) / (K (K - 1)), without a loop over pairs.
    """
    answers = {c: log_p for c, log_p in parts.get(PART, {}).items() if float(log_p.max()) < 0.5}
    k = len(answers)
    if k < 2:
        return {}
    log_p = torch.stack([answers[c] for c in sorted(answers)]).double().log_softmax(-1)
    p = log_p.exp()
    each = k * (p * log_p).sum((0, 2)) - (p.sum(0) * log_p.sum(0)).sum(-1)
    return {"divergence": float(each.mean()) / (k * (k - 1))}
