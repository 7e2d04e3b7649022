"""Losses and scores. Means over examples; logarithms are natural."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody reads)
from torch import Tensor

from fedshot.tree import Tree, leaves, sub


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


def proximal(params: Tree, reference: Tree) -> Tensor:
    """Return 1/2 ||w - w0||^2 over all leaves; its gradient is w - w0."""
    return 0.5 * torch.stack([d.square().sum() for d in leaves(sub(params, reference))]).sum()
