"""Losses and accuracy: means over examples, with natural logarithms."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch import Tensor

from fedshot.core.tree import Tree, leaves, sub

Clip = Literal["none", "log", "coef"]


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats; logits [n, way], y int64 [n]."""
    return F.cross_entropy(logits, y)


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the fraction of rows whose largest logit is that of the label, a scalar in [0, 1]."""
    return (logits.argmax(-1) == y).to(logits.dtype).mean()


def kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Return the mean over rows of KL(p || q) = sum p (log p - log q), in nats."""
    log_p, log_q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def clipped_kl(p_logits: Tensor, q_logits: Tensor, clip: Clip, epsilon: float) -> Tensor:
    """Return the mean over rows of KL(p || q), with the ratio r = p/q clipped as `clip` says.

    clamp(r) is r clipped to the band [1 - epsilon, 1 + epsilon]. p is a constant: only q gets
    gradients. Values of `clip`:

    - "none": r is not clipped. The gradient with respect to q is -r, unbounded for small q.
    - "log": the value is sum p log clamp(r), which may be negative. Fan & Huang (revised version)
      clip the ratio "in (11)", that is, inside the logarithm. The gradient with respect to q is -r
      inside the band and 0 outside. If only some classes of a row are outside, the softmax reverses
      the sign of their gradients: descent moves q away from p until all classes are outside and no
      gradient is left. With p = (.40, .30, .30), q = (.30, .35, .35) and epsilon .2 the gradient
      with respect to q's logits is (.180, -.090, -.090); with "none" it is (-.100, .050, .050).
    - "coef": the value is that of "none". The gradient with respect to q is -clamp(r), never 0 and
      bounded by 1 + epsilon, as in Fan & Huang's lemma. It is the gradient of -sum sg[clamp(r)] q,
      where sg stops gradients. As sum q = 1, only clamp(r) - 1 moves a logit: at most epsilon,
      where "none" moves it by p - q.
    """
    log_p, log_q = p_logits.detach().log_softmax(-1), q_logits.log_softmax(-1)
    log_r = log_p - log_q
    if clip == "log":
        log_r = log_r.clamp(math.log(1 - epsilon), math.log(1 + epsilon))
    value = (log_p.exp() * log_r).sum(-1).mean()
    if clip != "coef":
        return value
    ratio = log_r.detach().exp().clamp(1 - epsilon, 1 + epsilon)
    # As sum q = 1, 1 may be subtracted from the ratio; then p = q gives exactly 0.
    surrogate = ((1 - ratio) * log_q.exp()).sum(-1).mean()
    return value.detach() + (surrogate - surrogate.detach())


def floored_kl(p_logits: Tensor, q_logits: Tensor, floor: float) -> Tensor:
    """Return the mean over rows of sum p (log max(p, floor) - log max(q, floor)), in nats.

    This is KL(p || q) with a lower bound on the probabilities inside the logarithms. Its value is
    at most log(1 / floor), so it can be maximised. A probability q below the floor gets no
    gradient; a p below the floor still gets one through the factor p before the logarithms.
    """
    log_p, log_q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    least = math.log(floor)
    return (log_p.exp() * (log_p.clamp_min(least) - log_q.clamp_min(least))).sum(-1).mean()


def proximal(params: Tree, reference: Tree) -> Tensor:
    """Return 1/2 ||w - w0||^2 over all leaves; its gradient is w - w0."""
    return 0.5 * torch.stack([d.square().sum() for d in leaves(sub(params, reference))]).sum()
