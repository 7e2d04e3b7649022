"""Logits and cross-entropy over a subset of the classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch import Tensor


def mask_logits(logits: Tensor, used: Tensor) -> Tensor:
    """Return logits [n, classes] in which unused classes have a very low value and no gradient.

    `used` is a bool mask, [classes] or [n, classes]. The value is finite, also in float32, because
    infinite values would count as divergence.
    """
    least = max(torch.finfo(dtype).min for dtype in (logits.dtype, torch.float32))
    return logits.masked_fill(~used, least)


def masked_cross_entropy(logits: Tensor, y: Tensor, used: Tensor, loss: str) -> Tensor:
    """Return the mean over rows of -l_y + log sum_c exp(l_c), with c over the used classes.

    `logits` are [n, classes], `y` is int64 [n], `used` is bool [classes]. Rows whose class y is
    unused do not count. Values of `loss`:

    - "softmax": c runs over all used classes; this is the cross-entropy.
    - "literal": c runs over the used classes except y. If there are none, the row's loss is -l_y.
    """
    known = used[y]  # a class has no prototype if all of its clients dropped out
    if loss == "softmax":
        each = F.cross_entropy(logits, y, reduction="none")
        return torch.where(known, each, torch.zeros_like(each)).sum() / known.sum().clamp_min(1)
    mine = y[:, None] == torch.arange(logits.shape[1], device=y.device)
    others = mask_logits(logits, ~mine).logsumexp(-1)
    others = torch.where((used & ~mine).any(-1), others, torch.zeros_like(others))
    own = torch.where(mine, logits, torch.zeros_like(logits)).sum(-1)
    each = torch.where(known, others - own, torch.zeros_like(own))
    return each.sum() / known.sum().clamp_min(1)
