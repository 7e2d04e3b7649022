"""The most that this machine's convolutions reach: 3x3, forwards and backwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody reads)

# images, channels in and out, side: those of a ResNet-12 on 80 images, and some that fit a cache
SHAPES = ((80, 64, 32), (80, 160, 16), (80, 320, 8), (16, 128, 32), (16, 256, 16), (32, 512, 8))


class Ceiling(NamedTuple):
    """The quickest of the shapes."""

    run: Callable[[], float]
    flops: int


def _convolution(shape: tuple[int, int, int], layout: str, threads: int) -> Ceiling:
    n, c, side = shape
    form = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    x = torch.randn(n, c, side, side).to(memory_format=form).requires_grad_()
    w = torch.randn(c, c, 3, 3).to(memory_format=form).requires_grad_()
    dy = torch.randn(n, c, side, side).to(memory_format=form)

    def run() -> float:
        torch.set_num_threads(threads)
        start = time.perf_counter()
        torch.autograd.grad(F.conv2d(x, w, padding=1), (x, w), dy)
        return time.perf_counter() - start

    return Ceiling(run, 3 * 2 * 9 * n * c * c * side * side)


@cache
def best(threads: int, tries: int = 3) -> Ceiling:
    """Return the convolution with the most FLOP/s on so many threads."""

    def rate(found: Ceiling) -> float:
        found.run()
        return found.flops / min(found.run() for _ in range(tries))

    every = [_convolution(s, lay, threads) for s in SHAPES for lay in ("nchw", "channels_last")]
    return max(every, key=rate)
