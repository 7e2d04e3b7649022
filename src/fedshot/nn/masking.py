"""A loss over those classes of an episode that somebody has told of."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody reads)
from torch import Tensor


def mask_logits(logits: Tensor, used: Tensor) -> Tensor:
    """Return logits [n, numbers] that no number out of use can win, and that give it no gradient.

    `used` is bool, [numbers] or of the logits' shape. They stay finite, as float32, too: what is
    not finite has diverged.
    """
    least = max(torch.finfo(dtype).min for dtype in (logits.dtype, torch.float32))
    return logits.masked_fill(~used, least)


def masked_cross_entropy(logits: Tensor, y: Tensor, used: Tensor, loss: str) -> Tensor:
    """Return the mean over rows of -l_y + log sum_c exp(l_c), over the numbers in use; a scalar.

    `logits` are [n, numbers], `y` is [n], `used` bool [numbers].
    "softmax" sums over all of them, which is the cross-entropy; "literal" leaves out y, and where
    nothing is left, the logarithm, too. Rows of a class out of use do not count.
    """
    known = used[y]  # a class whose clients were all lost has no prototype
    if loss == "softmax":
        each = F.cross_entropy(logits, y, reduction="none")
        return torch.where(known, each, torch.zeros_like(each)).sum() / known.sum().clamp_min(1)
    mine = y[:, None] == torch.arange(logits.shape[1], device=y.device)
    others = mask_logits(logits, ~mine).logsumexp(-1)
    others = torch.where((used & ~mine).any(-1), others, torch.zeros_like(others))
    own = torch.where(mine, logits, torch.zeros_like(logits)).sum(-1)
    each = torch.where(known, others - own, torch.zeros_like(own))
    return each.sum() / known.sum().clamp_min(1)
