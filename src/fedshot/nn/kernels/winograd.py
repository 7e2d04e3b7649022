"""3x3 convolutions of many channels by Winograd's algorithm.

Source: Lavin & Gray 2016, F(2x2, 3x3), which takes 16 multiplications for 4 results, instead of 36.
`winograd.c` transforms every 4x4 tile of a feature map, 16 matrix products multiply all tiles with
the filters, and an inverse transform gives 2x2 results. Rounding errors are as large as those of
the direct sum; in the gradient of the filters, up to three times as large. Tiles are processed in
blocks of a few megabytes. On a CPU this takes 0.8 of the time of torch's convolution at 64
channels, 0.67 at 160 and 0.4 at 640, gradients included.

Where `products.ours` is true, `tiles.c` computes all three steps instead, in blocks that fit into
the cache. This takes 0.67 of torch's time at 32 channels, 0.55 to 0.7 at 64 and 0.55 at 160 on a
Zen 5, and 0.5, 0.5 to 0.6 and 0.67 on an Emerald Rapids.

First and second derivatives use the same algorithm. The last digits depend on the number of threads
and the processor, as torch's do. There is no third and no forward-mode derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshot.nn.kernels import tensors
from fedshot.nn.kernels.products import faster, ours, packed
from fedshot.nn.kernels.tensors import (
    MOST_CHANNELS,
    NO_THIRD,
    checked,
    empty,
    in_threads,
    library,
    shared,
)

_GROUP = 16  # channels, a multiple of the vector length in C
_GAP = 48  # numbers between the memory of two tile positions, as in `tiles.c`
_BLOCK = 40960  # numbers per tile position in a block
_LONG = 512  # fewest tiles of a block in `_by_filters`, which reads and writes sums per block
_SMALL = 96  # tiles in a block of `tiles.c`


def fits(x: Tensor, filters: Tensor) -> bool:
    """Whether the kernels support these inputs and filters.

    x is float32 [n, c, h, w] on a CPU and channels last, under no transform of `torch.func`. The
    numbers of input and of output channels must be multiples of 16, and at least 64, or at least 32
    where `products.faster` is true.
    """
    return (
        filters.shape[2:] == (3, 3)
        and all(c <= MOST_CHANNELS and c % _GROUP == 0 for c in filters.shape[:2])
        and x.shape[1] == filters.shape[1]
        and min(x.shape[2:]) > 1
        and (filters.dtype, filters.device) == (x.dtype, x.device)
        and tensors.fits(x)
        and min(filters.shape[:2]) >= (32 if faster() else 64)
    )


def conv3x3(x: Tensor, filters: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the convolution of x with 3x3 filters, padded by one pixel of zeros on each side.

    Args:
        x: feature maps [n, c, h, w] for which `fits` holds.
        filters: [f, c, 3, 3].
        bias: [f]; None for none.

    Returns:
        [n, f, h, w], channels last.
    """
    more = [] if bias is None else [bias.contiguous()]
    for vector in more:
        checked(vector, len(filters))
    y: Tensor = _Conv.apply(x, filters.contiguous(), *more)  # type: ignore[no-untyped-call]
    return y


_Span = tuple[int, int]  # first tile, number of tiles


class _Tiles(NamedTuple):
    """The tiles of n feature maps of h x w pixels; each tile gives 2x2 results."""

    n: int
    h: int
    w: int

    @property
    def all(self) -> int:
        """The number of tiles."""
        return self.n * ((self.h + 1) // 2) * ((self.w + 1) // 2)

    def share(self, most: int | None = None) -> int:
        """Return the number of tiles in a block: an equal part for each thread, at most `most`."""
        each = max(1, -(-self.all // torch.get_num_threads()))
        return each if most is None else min(most, each)

    def blocks(self, size: int) -> list[_Span]:
        """Return (first tile, number of tiles) of each block of at most `size` tiles."""
        return [(first, min(size, self.all - first)) for first in range(0, self.all, size)]


class _Conv(torch.autograd.Function):
    """Computes the 3x3 convolution of x [n, c, h, w], with or without a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor, bias: Tensor | None = None) -> Tensor:
        u = _folded(filters)
        ctx.save_for_backward(x, filters, u)
        return _apply(x, u.transpose(1, 2), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        asked = tuple(ctx.needs_input_grad)
        found = _ConvGradient.apply(dy, *ctx.saved_tensors, asked)  # type: ignore[no-untyped-call]
        return found[: len(asked)]


class _ConvGradient(torch.autograd.Function):
    """The gradient of `_Conv`: (dx, dfilters, dbias) from (dy, x, filters), None where not asked.

    It can be differentiated again. It is bilinear, so that `backward` computes convolutions, too.
    """

    @staticmethod
    def forward(
        ctx: Any, dy: Tensor, x: Tensor, _filters: Tensor, u: Tensor, asked: tuple[bool, ...]
    ) -> Any:
        dy = dy.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(dy, x, u)
        ctx.set_materialize_grads(False)
        dx = _apply(dy, u, None, turned=True) if asked[0] else None
        by_filters = _by_filters(x, dy) if asked[1] else None
        return dx, by_filters, dy.sum((0, 2, 3)) if asked[2:] == (True,) else None

    @staticmethod
    def backward(
        ctx: Any, by_dx: Tensor | None, by_filters: Tensor | None, by_bias: Tensor | None
    ) -> Any:
        """Return the gradients with respect to dy, x and the filters."""
        if torch.is_grad_enabled():
            raise RuntimeError(NO_THIRD)
        dy, x, u = ctx.saved_tensors
        of_dy = of_x = of_filters = None
        if by_dx is not None:
            by_dx = by_dx.contiguous(memory_format=torch.channels_last)
            of_dy, of_filters = _apply(by_dx, u.transpose(1, 2), None), _by_filters(by_dx, dy)
        if by_filters is not None:
            v = _folded(by_filters.contiguous())
            through = _apply(x, v.transpose(1, 2), None)
            of_dy = through if of_dy is None else of_dy.add_(through)
            of_x = _apply(dy, v, None, turned=True) if ctx.needs_input_grad[1] else None
        if by_bias is not None:
            of_dy = by_bias[:, None, None] + (torch.zeros_like(dy) if of_dy is None else of_dy)
        return of_dy, of_x, of_filters, None, None


def _folded(filters: Tensor) -> Tensor:
    """Return the filters [f, c, 3, 3] after Winograd's transform, G g G^T of each g: [16, f, c]."""
    f, c = filters.shape[:2]
    u = empty(16, f, c)
    _groups("filters", f * c, filters, u)
    return u


def _apply(x: Tensor, u: Tensor, bias: Tensor | None, *, turned: bool = False) -> Tensor:
    """Return the convolution [n, f, h, w] of x with transformed filters u [16, c, f].

    The result is channels last. `turned` rotates the filters by 180 degrees,
    for the gradient with respect to x.
    """
    (n, c, h, w), f, turn = x.shape, u.shape[2], int(turned)
    y, tiles = empty(n, h, w, f), _Tiles(n, h, w)
    added = 0 if bias is None else bias.data_ptr()
    if ours(c, f):
        size, kernel, right = tiles.share(), library().fedshot_tiles, packed(u)

        def work(spans: Sequence[_Span]) -> None:
            room = _small_room(c + f)
            for first, count in spans:
                sizes = (first, first + count, _SMALL, h, w, c, f, turn)
                kernel(x.data_ptr(), right.data_ptr(), added, *sizes, room.data_ptr(), y.data_ptr())

    else:
        size, kernel = tiles.share(_BLOCK // max(c, f)), library().fedshot_winograd_out

        def work(spans: Sequence[_Span]) -> None:
            before, after = _room(size, c), _room(size, f)
            for first, count in spans:
                v, m = before[:, :count], after[:, :count]
                _transform("in", x, first, v, turn)
                torch.bmm(v, u, out=m)
                sizes = (first, h, w, f, m.stride(0), turn)
                kernel(m.data_ptr(), added, 0, count, *sizes, y.data_ptr())

    in_threads(work, tiles.blocks(size))
    return y.permute(0, 3, 1, 2)


def _by_filters(x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient with respect to the filters, [f, c, 3, 3].

    dy [n, f, h, w] is that with respect to the output.
    """
    (n, c, h, w), f = x.shape, dy.shape[1]
    tiles = _Tiles(n, h, w)
    if ours(c, f):
        size, kernel = tiles.share(), library().fedshot_tiles_by_filters

        def work(spans: Sequence[_Span]) -> Tensor:
            room, du = _small_room(c + f), empty(16, f, c)
            for first, count in spans:
                sizes = (first, first + count, _SMALL, h, w, c, f, (first, count) != spans[0])
                kernel(x.data_ptr(), dy.data_ptr(), *sizes, room.data_ptr(), du.data_ptr())
            return du

    else:
        size = tiles.share(max(_BLOCK // max(c, f), _LONG))

        def work(spans: Sequence[_Span]) -> Tensor:
            before, after, du = _room(size, c), _room(size, f), empty(16, f, c)
            for first, count in spans:
                v, m = before[:, :count], after[:, :count]
                _transform("in", x, first, v, 0)
                _transform("back", dy, first, m)
                beta = float((first, count) != spans[0])
                torch.baddbmm(du, m.transpose(1, 2), v, beta=beta, out=du)
            return du

    du, *more = in_threads(work, tiles.blocks(size))
    for other in more:
        du += other
    found = empty(f, c, 3, 3)
    _groups("unfold", f * c, du, found)
    return found


def _groups(name: str, filters: int, given: Tensor, found: Tensor) -> None:
    """Fill `found` from `given` by the kernel `name`, which transforms 16 filters at a time.

    `filters` is the number of 3x3 filters.
    """
    kernel, n = getattr(library(), f"fedshot_winograd_{name}"), filters // _GROUP
    shared(n, kernel, [given.data_ptr()], [filters], [found.data_ptr()], numbers=16 * filters)


def _transform(name: str, x: Tensor, first: int, room: Tensor, *rest: int) -> None:
    """Fill `room` [16, tiles, c] with transformed tiles of the feature maps x.

    `first` is the index of the first of these tiles, `name` is the kernel, and `rest` are the
    kernel's last arguments.
    """
    kernel, (_, c, h, w) = getattr(library(), f"fedshot_winograd_{name}"), x.shape
    sizes = (first, h, w, c, room.stride(0), *rest)
    kernel(x.data_ptr(), 0, room.shape[1], *sizes, room.data_ptr())


def _room(tiles: int, c: int) -> Tensor:
    """Return memory [16, tiles, c] with gaps: strides of a power of 2 would share cache lines."""
    apart = tiles * c + _GAP
    return empty(16 * apart).as_strided((16, tiles, c), (apart, c, 1))


def _small_room(c: int) -> Tensor:
    """Return memory for the matrix products of one block in `tiles.c`.

    c is the number of channels of their inputs and results together.
    """
    return empty(16 * (_SMALL * c + 2 * _GAP))
