"""How much arithmetic a training step is: decides, by a fixed rule, how threads are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody reads)
from torch.overrides import TorchFunctionMode

from fedshot.core.machine import arithmetic
from fedshot.core.seeds import Key
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model

_BY_FILTERS = (torch.conv2d, F.linear)
_PRODUCTS = (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__)


def step_flops(model: Model, images: int) -> int:
    """Return the multiplications and additions of one forward and backward pass.

    Counted for convolutions and matrix products of one forward pass of two images, times three, as
    a backward pass has two products for each. Recurrent layers are not counted, and are small. The
    pass is in float64, which the kernels leave to torch's operations, the ones that are counted.
    """
    if model.table is not None:
        return 0
    model = replace(model, dtype="float64", bf16=False)
    params, stats = model.init(Key(0))
    height, width, channels = model.shape
    x = torch.zeros(2, channels, height, width, dtype=model.torch_dtype)
    counter = _Counter()
    with torch.no_grad(), arithmetic(1), counter:  # starts no threads of OpenMP
        model.features(params, stats, x, Mode(norm="batch"))
    return 3 * counter.flops * images // 2


class _Counter(TorchFunctionMode):
    """Counts convolutions and matrix products by what is multiplied for one number of the result.

    torch's own FlopCounterMode counts the same, and loads torch's compiler to do so, which would be
    a third of the time that a small run takes to begin.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if func in _BY_FILTERS:
            self.flops += 2 * result.numel() * args[1][0].numel()
        elif func in _PRODUCTS:
            self.flops += 2 * result.numel() * args[0].shape[-1]
        return result
