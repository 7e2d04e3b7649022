"""The arithmetic cost of a training step, from which a fleet decides how to use threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch.overrides import TorchFunctionMode

from fedshot.core.machine import arithmetic
from fedshot.core.seeds import Key
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.models.module_backbone import ModuleBackbone

_BY_FILTERS = (torch.conv2d, F.linear)
_PRODUCTS = (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__)


def step_flops(model: Model, examples: int) -> int:
    """Return the number of multiplications and additions of one forward and backward pass.

    They are counted in the convolutions and matrix products of a forward pass of two examples, and
    scaled to `examples`. The number is multiplied by three, because a backward pass has two
    products for each product of the forward pass. Recurrent layers are small and not counted, so
    the number for texts is 0. The forward pass is in float64, because the C kernels, which cannot
    be counted, then give way to torch operations. A user's module runs no C kernels and keeps its
    dtype.
    """
    if model.table is not None:
        return 0
    module = isinstance(model.backbone, ModuleBackbone)
    model = replace(model, dtype=model.dtype if module else "float64", bf16=False)
    params, stats = model.init(Key(0))
    *sides, channels = model.shape
    x = torch.zeros(2, channels, *sides, dtype=model.torch_dtype)
    counter = _Counter()
    with torch.no_grad(), arithmetic(1), counter:  # one thread: starts no OpenMP threads
        model.features(params, stats, x, Mode(norm="batch"))
    return 3 * counter.flops * examples // 2


class _Counter(TorchFunctionMode):
    """Counts the multiplications and additions of convolutions and matrix products.

    torch's FlopCounterMode counts the same, but loads torch's compiler, which takes a third of the
    start-up time of a small run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        if func in _BY_FILTERS:
            self.flops += 2 * result.numel() * args[1][0].numel()
        elif func in _PRODUCTS:
            self.flops += 2 * result.numel() * args[0].shape[-1]
        return result
