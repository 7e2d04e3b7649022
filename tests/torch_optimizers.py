"""The optimisers of torch, to compare fedshot's with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def torch_optimizer(opt: Any, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return torch's optimiser of the same options."""
    if opt.name == "adam":
        return torch.optim.Adam(params, opt.lr, weight_decay=opt.weight_decay)
    return torch.optim.SGD(params, opt.lr, opt.momentum, weight_decay=opt.weight_decay)
