"""The C functions on tensors: memory for the results, and shares for the threads.

In `fused.c`, maps are float32 [n, c, h, w] on the CPU, channels last: x and those of its shape are
what `fits`, y and dy are [n, c, h // 2, w // 2]. Vectors are float32 [c], which is checked, since C
would read past the end of others.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from itertools import pairwise
from threading import Barrier
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fedshot.core import kernel_build
from fedshot.core.machine import begin_thread, denormals_flushed

T = TypeVar("T")
R = TypeVar("R")


class Cut(NamedTuple):
    """Where the ReLU stands by a norm and its pool: what x and a pool are raised to; NaN: not."""

    least: float
    floor: float


NAN = float("nan")
RELU_LAST, RELU_FIRST = Cut(NAN, 0.0), Cut(0.0, NAN)

MOST_CHANNELS = 1024  # the kernels keep one row of sums on the stack
_MANY = 1 << 16  # numbers that are worth a thread


def fits(x: Tensor) -> bool:
    """Whether the kernels take these maps of a convolution, which autocast makes of bfloat16."""
    return readable(x) and not torch.is_autocast_enabled("cpu")


def readable(x: Tensor) -> bool:
    """Whether kernels can read these maps: some float32 on a CPU, channels last, not under vmap."""
    return (
        not followed()
        and x.numel() > 0
        and x.dtype == torch.float32
        and x.is_cpu
        and x.shape[1] <= MOST_CHANNELS
        and x.permute(0, 2, 3, 1).is_contiguous()
        and not torch._C._are_functorch_transforms_active()
        and kernel_build.library() is not None
    )


def followed() -> bool:
    """Whether an exporter or a tracer looks on, which knows torch's own operations alone."""
    return torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None


def forward(x: Tensor, scale: Tensor, shift: Tensor, cut: Cut) -> Tensor:
    """Return max_pool2d(x * scale + shift, 2) and its ReLU; a NaN anywhere in a pool wins it."""
    n, c, h, w = x.shape
    y = empty(n, h // 2, w // 2, c)
    each(n, library().fedshot_pool, [x, scale, shift], [h, w, c], [y], cut)
    return y.permute(0, 3, 1, 2)


def sums(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, dy: Tensor, cut: Cut
) -> tuple[Tensor, Tensor]:
    """Return the sums of dz and of dz * (x - mean) over each image, float64 [n, c].

    dz is what reaches the winners.
    """
    n, c, h, w = x.shape
    dz, dzx = empty(2, n, c, dtype=torch.float64).unbind(0)
    each(n, library().fedshot_sums, [x, scale, shift, mean, dy], [h, w, c], [dz, dzx], cut)
    return dz, dzx


def grad(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, slope: Tensor, level: Tensor, dy: Tensor,
    cut: Cut,
) -> Tensor:  # fmt: skip
    """Return scale * dz + slope * (x - mean) + level, and 0 where x was raised."""
    n, c, h, w = x.shape
    dx = empty(n, h, w, c)
    ins = [x, scale, shift, mean, slope, level, dy]
    each(n, library().fedshot_grad, ins, [h, w, c], [dx], cut)
    return dx.permute(0, 3, 1, 2)


def twice_sums(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, dy: Tensor, u: Tensor, floor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums [c] of u, of u * (x - mean), and of u times dz, where no x is raised."""
    n, c, h, w = x.shape
    parts = empty(3, n, c, dtype=torch.float64)
    ins = [x, scale, shift, mean, dy, u]
    each(n, library().fedshot_twice_sums, ins, [h, w, c], list(parts), [floor])
    u0, u1, uz = parts.sum(1).float()
    return u0, u1, uz


def twice_grad(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, *, slope: Tensor, at_z: Tensor,
    at_u: Tensor, level: Tensor, base: Tensor, dy: Tensor, u: Tensor, floor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients by x and dy, with coefficients [c], where no x is raised.

    `fused.c` has the terms.
    """
    n, c, h, w = x.shape
    gx, gdy = empty(n, h, w, c), empty(n, h // 2, w // 2, c)
    ins = [x, scale, shift, mean, slope, at_z, at_u, level, base, dy, u]
    each(n, library().fedshot_twice_grad, ins, [h, w, c], [gx, gdy], [floor])
    return gx.permute(0, 3, 1, 2), gdy.permute(0, 3, 1, 2)


def plain_floats(*leaves: Tensor) -> bool:
    """Whether the kernels that follow are for these: float32 on the CPU, and there are kernels."""
    return kernel_build.library() is not None and all(
        leaf.dtype == torch.float32 and leaf.is_cpu for leaf in leaves
    )


def adam(
    leaves: Iterable[Sequence[Tensor]], *,
    decay: float, rise: float, grow: float, step: float, eps: float, reuse: bool = False,
) -> list[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Return (w', m', v') of every (w, g, m, v), elementwise; `elementwise.c` says it.

    The four of a leaf are float32 of one shape. They may lie in memory in any order; the results
    lie as w does, with `reuse` in the memory of w, m and v. One call for all: threads that take
    turns at Python's lock lose time at each.
    """
    at, ends, n = array("q"), array("q"), 0
    used, made = [], []
    for first, *rest in leaves:
        w = _dense(first)
        ins = [w, *[_alike(t, w) for t in rest]]
        _, _, m, v = ins
        outs = (
            (w, m, v) if reuse else (torch.empty_like(w), torch.empty_like(w), torch.empty_like(w))
        )
        at.extend([t.data_ptr() for t in (*ins, *outs)])
        n += w.numel()
        ends.append(n)
        used.append(ins)  # copies among them live until they are read
        made.append(outs)
    rule = (decay, rise, grow, step, eps)
    _numbers(n, library().fedshot_adam, [address(at), address(ends)], rule, [])
    return made


def take(pairs: Iterable[tuple[Tensor, Tensor]], scale: float) -> None:
    """Add x * scale to whole numbers in place, rounded once, for every (total, x).

    The two are int64 and float32, of one shape.
    """
    at, ends, n = array("q"), array("q"), 0
    used = []
    for total, given in pairs:
        if not total.is_contiguous() or total.dtype != torch.int64 or total.shape != given.shape:
            raise ValueError(
                f"a total of {total.dtype} {list(total.shape)} and an update of "
                f"{list(given.shape)}; expected contiguous int64, and one shape."
            )
        x = given.contiguous()
        used.append(x)  # a copy lives until it is read
        at.extend((x.data_ptr(), total.data_ptr()))
        n += x.numel()
        ends.append(n)
    _numbers(n, library().fedshot_take, [address(at), address(ends)], (scale,), [])


def kept(n: int, words: tuple[int, int], threshold: int, value: float) -> Tensor:
    """Return float32 [n]: `value` where the hash of a place reaches the threshold, 0 elsewhere."""
    mask = empty(n)
    _numbers(n, library().fedshot_kept, [], (*words, threshold, value), [mask.data_ptr()])
    return mask


def largest(leaves: Iterable[Tensor]) -> float:
    """Return the largest |x| of float32 tensors; inf or NaN where they hold one, 0 if empty."""
    found = ctypes.c_uint32()
    plain = [leaf.contiguous() for leaf in leaves]
    at = array("q", [leaf.data_ptr() for leaf in plain])
    sizes = array("q", [leaf.numel() for leaf in plain])
    where = (address(at), address(sizes))
    library().fedshot_largest(*where, len(plain), ctypes.addressof(found))
    value: float = ctypes.c_float.from_buffer(found).value
    return value


def library() -> ctypes.CDLL:
    """Return the C functions, for those who know that they are there."""
    found = kernel_build.library()
    assert found is not None
    return found


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return memory that C may fill, whatever torch's default type and device are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def check_vector(t: Tensor, c: int) -> None:
    """Refuse a vector of c channels that C would misread."""
    _check_floats(t)
    if t.shape != (c,) or not t.is_contiguous():
        raise ValueError(
            f"the kernels were given a vector of shape {list(t.shape)} and strides "
            f"{list(t.stride())}; expected [{c}], one value per channel, contiguous."
        )


def _check_floats(t: Tensor) -> None:
    if t.dtype != torch.float32 or not t.is_cpu:
        raise TypeError(
            f"the kernels were given {t.dtype} on {t.device}, shape {list(t.shape)}; they take "
            "torch.float32 on the CPU. Convert it, or set FEDSHOT_KERNELS=off."
        )


def each(
    n: int, kernel: Callable[..., None], ins: Sequence[Tensor], sizes: list[int],
    outs: Sequence[Tensor], rule: Sequence[float] = (),
) -> None:  # fmt: skip
    """Run a kernel over n images, the first of `ins`, shared among threads where they are many.

    The last of `sizes` is the number of channels, which vectors among `ins` must have.
    """
    for t in ins:
        if t.dim() == 4:
            _check_floats(t)
        else:
            check_vector(t, sizes[-1])
    before, after = [t.data_ptr() for t in ins], [t.data_ptr() for t in outs]
    threads = min(torch.get_num_threads(), n, ins[0].numel() // _MANY)
    _share(n, threads, kernel, before, [*sizes, *rule], after)


def address(of: array[int]) -> int:
    """Return where the numbers of an array lie; it must live, and not grow, while they are read."""
    return of.buffer_info()[0]


def _dense(t: Tensor) -> Tensor:
    """Return the tensor without gaps in memory, in the order in which it lies."""
    spread = t.is_contiguous() or (t.dim() == 4 and t.permute(0, 2, 3, 1).is_contiguous())
    return t if spread else t.contiguous()


def _alike(t: Tensor, like: Tensor) -> Tensor:
    """Return the tensor in the memory order of another of its shape."""
    if t.shape != like.shape:
        raise ValueError(f"tensors of shape {list(t.shape)} and {list(like.shape)}; expected one.")
    return t if t.stride() == like.stride() else torch.empty_like(like).copy_(t)


def shared(
    n: int, kernel: Callable[..., None], ins: list[int], rest: Sequence[float], outs: list[int],
    *, numbers: int | None = None,
) -> None:  # fmt: skip
    """Run a kernel over n columns, shared among as many threads as torch uses.

    Fewer where `numbers`, how many are worked on, would not keep them busy.
    """
    threads = min(torch.get_num_threads(), n)
    if numbers is not None:
        threads = min(threads, numbers // _MANY)
    _share(n, threads, kernel, ins, rest, outs)


def in_threads(work: Callable[[Sequence[T]], R], items: Sequence[T]) -> list[R]:
    """Return what `work` makes of each share of the items: as many shares as torch uses threads.

    In each of them torch uses one, so that operations of torch can be among the work.
    """
    threads = min(torch.get_num_threads(), len(items))
    if threads <= 1:
        return [work(items)]
    pool = _pool_of(threads, denormals_flushed())
    return _done(pool, [partial(work, items[a:b]) for a, b in _cuts(len(items), threads)])


def _numbers(
    n: int, kernel: Callable[..., None], ins: list[int], rule: Sequence[float], outs: list[int]
) -> None:
    """Run a kernel over n numbers, shared among threads where they are many."""
    _share(n, min(torch.get_num_threads(), n // _MANY), kernel, ins, rule, outs)


def _share(
    n: int, threads: int, kernel: Callable[..., None],
    ins: Sequence[int], rest: Sequence[float], outs: Sequence[int],
) -> None:  # fmt: skip
    """Run a kernel over the parts 0 to n of its memory, a share in each thread, this one too."""
    if threads <= 1:
        kernel(*ins, 0, n, *rest, *outs)
        return
    own, *others = (
        partial(kernel, *ins, first, last, *rest, *outs) for first, last in _cuts(n, threads)
    )
    _done(_pool_of(threads - 1, denormals_flushed()), others, own)


def _cuts(n: int, shares: int) -> Iterable[tuple[int, int]]:
    """Return begin and end of each share of n."""
    return pairwise(n * i // shares for i in range(shares + 1))


def _done(
    pool: ThreadPoolExecutor,
    calls: Iterable[Callable[[], R]],
    own: Callable[[], None] | None = None,
) -> list[R]:
    """Return what the calls return, made by a pool while this thread makes its own."""
    shares: list[Future[R]] = []
    try:
        for call in calls:
            shares.append(pool.submit(call))
        if own is not None:
            own()
    finally:  # whatever happens: they write to memory that is the caller's
        wait(shares)
    return [share.result() for share in shares]


@cache
def _pool_of(threads: int, flush: bool) -> ThreadPoolExecutor:
    """Return a pool whose threads treat tiny numbers as their caller does, and work alone.

    All of them begin here: torch gives threads that begin later the number that was set last.
    """
    pool = ThreadPoolExecutor(
        threads, "fedshot-kernel", initializer=begin_thread, initargs=(1, flush)
    )
    own, all_here = torch.get_num_threads(), Barrier(threads)
    wait([pool.submit(all_here.wait) for _ in range(threads)])
    torch.set_num_threads(own)
    return pool


if hasattr(os, "register_at_fork"):  # a forked process has the pools, but none of their threads
    os.register_at_fork(after_in_child=_pool_of.cache_clear)
