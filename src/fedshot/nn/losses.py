"""Losses and scores. Means over examples; logarithms are natural."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody reads)
from torch import Tensor

from fedshot.core.tree import Tree, leaves, sub

Clip = Literal["none", "log", "coef"]


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats; logits [n, way], y int64 [n]."""
    return F.cross_entropy(logits, y)


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the share of rows whose largest logit is the label's, in [0, 1], as a scalar."""
    return (logits.argmax(-1) == y).to(logits.dtype).mean()


def kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Return the mean over rows of KL(p || q) = sum p (log p - log q), in nats."""
    log_p, log_q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def clipped_kl(p_logits: Tensor, q_logits: Tensor, clip: Clip, epsilon: float) -> Tensor:
    """Return KL(p || q), mean over rows, with the ratio p/q kept in [1 - epsilon, 1 + epsilon].

    Fan & Huang (revised version) clip the ratio "in (11)", where it stands inside the logarithm:
    that is "log". Their lemma bounds the gradient, as "coef" does, too. p is a constant; gradients
    reach q alone. With r = p/q, the gradient of KL by q is -r, and

    - "none": -r, unbounded where q is small;
    - "log": sum p log clamp(r), with -r inside the band and 0 outside. In a row with some classes
      outside the softmax reverses their sign: descent takes q away from p, until all classes are
      outside and no gradient is left. With p = (.40, .30, .30), q = (.30, .35, .35)
      and epsilon .2 the gradient by q's logits is (.180, -.090, -.090), that of "none" (-.100,
      .050, .050). The value is that of the clipped ratio, and may be below 0;
    - "coef": -clamp(r), which is bounded by 1 + epsilon and never stops pulling. The surrogate is
      -sum sg[clamp(r)] q; the value reported is that of KL. As sum q = 1, what moves a logit is
      clamp(r) - 1 alone, so this pull is gentle: epsilon at most, where that of "none" is p - q.
    """
    log_p, log_q = p_logits.detach().log_softmax(-1), q_logits.log_softmax(-1)
    log_r = log_p - log_q
    if clip == "log":
        log_r = log_r.clamp(math.log(1 - epsilon), math.log(1 + epsilon))
    value = (log_p.exp() * log_r).sum(-1).mean()
    if clip != "coef":
        return value
    ratio = log_r.detach().exp().clamp(1 - epsilon, 1 + epsilon)
    # sum q = 1, so 1 may be taken from the ratio: where p is q nothing is left, not even rounding.
    surrogate = ((1 - ratio) * log_q.exp()).sum(-1).mean()
    return value.detach() + (surrogate - surrogate.detach())


def floored_kl(p_logits: Tensor, q_logits: Tensor, floor: float) -> Tensor:
    """Return KL(p || q), mean over rows, of probabilities no smaller than `floor` in the logarithm.

    At most log(1 / floor), so that it can be maximised. A class whose q is below the floor gives q
    no gradient; where p is below it, p keeps the gradient of its weight before the logarithms.
    """
    log_p, log_q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    least = math.log(floor)
    return (log_p.exp() * (log_p.clamp_min(least) - log_q.clamp_min(least))).sum(-1).mean()


def proximal(params: Tree, reference: Tree) -> Tensor:
    """Return 1/2 ||w - w0||^2 over all leaves; its gradient is w - w0."""
    return 0.5 * torch.stack([d.square().sum() for d in leaves(sub(params, reference))]).sum()
