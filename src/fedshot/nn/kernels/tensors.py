"""Calling the C functions on tensors: checks, memory for results, and threads.

Maps are feature maps of n images, float32 [n, c, h, w] on the CPU, channels last, for which `fits`
holds; vectors are float32 [c]. Shapes are checked, because C would read out of bounds.
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
from typing import TypeVar

import torch
from torch import Tensor

from fedshot.core import kernel_build
from fedshot.core.machine import begin_thread, denormals_flushed
from fedshot.nn.stacks import stacked

T = TypeVar("T")
R = TypeVar("R")


NO_THIRD = "the kernels have no third derivatives; set FEDSHOT_KERNELS=off"
MOST_CHANNELS = 1024  # the kernels keep one row of sums on the stack
_MANY = 1 << 16  # fewest tensor elements for which one more thread is worthwhile


def fits(x: Tensor) -> bool:
    """Whether the kernels support the feature maps x, and autocast to bfloat16 is off."""
    return readable(x) and not torch.is_autocast_enabled("cpu")


def readable(x: Tensor) -> bool:
    """Whether kernels can read the feature maps x: float32 on a CPU, channels last, no vmap."""
    return (
        not followed()
        and x.numel() > 0
        and x.dtype == torch.float32
        and x.is_cpu
        and x.shape[1] <= MOST_CHANNELS
        and x.permute(0, 2, 3, 1).is_contiguous()
        and not stacked()
        and kernel_build.library() is not None
    )


def followed() -> bool:
    """Whether torch exports or traces this code, which only works for torch operations."""
    return torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None


def plain_floats(*leaves: Tensor) -> bool:
    """Whether the elementwise kernels are built and all leaves are float32 on the CPU."""
    return kernel_build.library() is not None and all(
        leaf.dtype == torch.float32 and leaf.is_cpu for leaf in leaves
    )


def adam(
    leaves: Iterable[Sequence[Tensor]], *,
    decay: float, rise: float, grow: float, step: float, eps: float, reuse: bool = False,
) -> list[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Return (w', m', v'), a step of Adam, for every (w, g, m, v) in `leaves`.

    w is a parameter tensor, g its gradient, m and v its moments. With d = g + decay w, elementwise,

        m' = m + rise (d - m),  v' = v + grow (d d - v),  w' = w - step m' / (sqrt(v') + eps).

    The four tensors are float32 of the same shape, in any layout. Results have the layout of w;
    with `reuse` they overwrite w, m and v. One call updates all parameters, because threads wait
    for Python's global lock at each call.
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
        used.append(ins)  # keeps copies alive until the call
        made.append(outs)
    rule = (decay, rise, grow, step, eps)
    shared(n, library().fedshot_adam, [address(at), address(ends)], rule, [], numbers=n)
    return made


def take(pairs: Iterable[tuple[Tensor, Tensor]], scale: float) -> None:
    """Add round(x * scale) to each int64 `total` in place, for pairs (total, x) with float32 x."""
    at, ends, n = array("q"), array("q"), 0
    used = []
    for total, given in pairs:
        if not total.is_contiguous() or total.dtype != torch.int64 or total.shape != given.shape:
            raise ValueError(
                f"a total of {total.dtype} {list(total.shape)} and an update of "
                f"{list(given.shape)}; expected contiguous int64 and equal shapes."
            )
        x = given.contiguous()
        used.append(x)  # keeps a copy alive until the call
        at.extend((x.data_ptr(), total.data_ptr()))
        n += x.numel()
        ends.append(n)
    shared(n, library().fedshot_take, [address(at), address(ends)], (scale,), [], numbers=n)


def kept(n: int, words: tuple[int, int], threshold: int, value: float) -> Tensor:
    """Return float32 [n]: `value` where the hash of the index is at least `threshold`, else 0.

    `words` are the two 32-bit keys of the hash.
    """
    mask = empty(n)
    rule = (*words, threshold, value)
    shared(n, library().fedshot_kept, [], rule, [mask.data_ptr()], numbers=n)
    return mask


def largest(leaves: Iterable[Tensor]) -> float:
    """Return the largest |x| of float32 tensors: inf or NaN if they contain one, 0 if empty."""
    found = ctypes.c_uint32()
    plain = [_dense(leaf) for leaf in leaves]
    at = array("q", [leaf.data_ptr() for leaf in plain])
    sizes = array("q", [leaf.numel() for leaf in plain])
    where = (address(at), address(sizes))
    library().fedshot_largest(*where, len(plain), ctypes.addressof(found))
    value: float = ctypes.c_float.from_buffer(found).value
    return value


def library() -> ctypes.CDLL:
    """Return the library of C functions; the caller has checked that it is available."""
    found = kernel_build.library()
    assert found is not None
    return found


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return uninitialised memory on the CPU, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def doubles(*shape: int) -> Tensor:
    """Return uninitialised float64 memory on the CPU, for the sums of the kernels."""
    return empty(*shape, dtype=torch.float64)


def checked(t: Tensor, *shape: int) -> int:
    """Return the address of t.

    Raises ValueError unless t is contiguous, float32, on the CPU, and of this shape.
    """
    if not t.is_contiguous() or t.shape != shape or t.dtype != torch.float32 or not t.is_cpu:
        raise ValueError(
            f"the kernels were given {t.dtype} on {t.device}, shape {list(t.shape)}, strides "
            f"{t.stride()}; expected contiguous float32 {list(shape)} on the CPU. Convert it, or "
            "set FEDSHOT_KERNELS=off."
        )
    return t.data_ptr()


def each(
    n: int, kernel: Callable[..., None], ins: Sequence[Tensor], sizes: list[int],
    outs: Sequence[Tensor], rule: Sequence[float] = (),
) -> None:  # fmt: skip
    """Run a kernel over the n images of `ins[0]`, in several threads if they are large.

    The kernel receives the integers `sizes` and then the floats `rule`. The last of `sizes` is
    the number of channels, which is the length of the vectors in `ins`.
    """
    for t in ins:
        if t.dim() == 4:
            images = t.permute(0, 2, 3, 1)
            checked(images, *images.shape)
        else:
            checked(t, *sizes[-1:])
    before, after = [t.data_ptr() for t in ins], [t.data_ptr() for t in outs]
    shared(n, kernel, before, [*sizes, *rule], after, numbers=ins[0].numel())


def address(of: array[int]) -> int:
    """Return the address of an array, which must stay alive and not grow while C reads it."""
    return of.buffer_info()[0]


def _dense(t: Tensor) -> Tensor:
    """Return the tensor unchanged if its memory has no gaps, else a contiguous copy."""
    spread = t.is_contiguous() or (t.dim() == 4 and t.permute(0, 2, 3, 1).is_contiguous())
    return t if spread else t.contiguous()


def _alike(t: Tensor, like: Tensor) -> Tensor:
    """Return the tensor in the memory layout of `like`, which has the same shape."""
    if t.shape != like.shape:
        raise ValueError(f"shapes {list(t.shape)} and {list(like.shape)} differ.")
    return t if t.stride() == like.stride() else torch.empty_like(like).copy_(t)


def shared(
    n: int, kernel: Callable[..., None],
    ins: Sequence[int], rest: Sequence[float], outs: Sequence[int],
    *, numbers: int | None = None,
) -> None:  # fmt: skip
    """Run a kernel over n items, such as images or columns, in as many threads as torch uses.

    `ins` and `outs` are addresses, and `rest` are the kernel's numeric arguments. It runs in fewer
    threads if `numbers`, the number of tensor elements, is small.
    """
    threads = min(torch.get_num_threads(), n)
    if numbers is not None:
        threads = min(threads, numbers // _MANY)
    if threads <= 1:
        kernel(*ins, 0, n, *rest, *outs)
        return
    own, *others = (
        partial(kernel, *ins, first, last, *rest, *outs) for first, last in _cuts(n, threads)
    )
    _done(_pool_of(threads - 1, denormals_flushed()), others, own)


def in_threads(work: Callable[[Sequence[T]], R], items: Sequence[T]) -> list[R]:
    """Split the items among as many threads as torch uses; return one result per thread.

    `work` may call torch operations: in these threads, torch itself uses a single thread.
    """
    threads = min(torch.get_num_threads(), len(items))
    if threads <= 1:
        return [work(items)]
    pool = _pool_of(threads, denormals_flushed())
    return _done(pool, [partial(work, items[a:b]) for a, b in _cuts(len(items), threads)])


def _cuts(n: int, shares: int) -> Iterable[tuple[int, int]]:
    """Split range(n) into shares; return each share's first index and the index after its last."""
    return pairwise(n * i // shares for i in range(shares + 1))


def _done(
    pool: ThreadPoolExecutor,
    calls: Iterable[Callable[[], R]],
    own: Callable[[], None] | None = None,
) -> list[R]:
    """Run the calls in a pool and `own` in this thread; return the results of the calls."""
    shares: list[Future[R]] = []
    try:
        for call in calls:
            shares.append(pool.submit(call))
        if own is not None:
            own()
    finally:  # also after an error, because they write to the caller's memory
        wait(shares)
    return [share.result() for share in shares]


@cache
def _pool_of(threads: int, flush: bool) -> ThreadPoolExecutor:
    """Return a pool of threads in each of which torch uses one thread.

    With `flush`, the threads treat denormals as 0. All threads start here, because a thread takes
    over torch's number of threads when it starts.
    """
    pool = ThreadPoolExecutor(
        threads, "fedshot-kernel", initializer=begin_thread, initargs=(1, flush)
    )
    own, all_here = torch.get_num_threads(), Barrier(threads)
    wait([pool.submit(all_here.wait) for _ in range(threads)])
    torch.set_num_threads(own)
    return pool


if hasattr(os, "register_at_fork"):  # a forked process inherits the pools without their threads
    os.register_at_fork(after_in_child=_pool_of.cache_clear)
