"""What this process may use of the machine."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

# glibc's names for mallopt, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MB = 1 << 20
_HARD = 2  # omp_pause_hard, from omp.h
# 2^-127 by its bits, whatever this thread does to such a number.
_TINY = torch.tensor([1 << 22], dtype=torch.int32, device="cpu").view(torch.float32)


def cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep large blocks for the next step instead of giving them back to the system.

    Feature maps above 32 MB are otherwise mapped anew, and zeroed page by page, at every step of
    training, which takes as long as half of a Conv4 at 84 pixels. Blocks that large fit only the
    main arena, so threads share it. For the whole process, and only on Linux with glibc; returns
    whether it was done.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = (
        (_MMAP_THRESHOLD, 1024 * _MB),
        (_TRIM_THRESHOLD, 2**31 - 1),
        (_TOP_PAD, 64 * _MB),
        (_ARENA_MAX, 1),
    )
    done = [mallopt(name, value) == 1 for name, value in wanted]  # every one of them
    return all(done)


def give_back_memory() -> bool:
    """Give free blocks back to the system; returns whether there was a way to.

    A loop that keeps small results between large blocks of slightly different places leaves holes
    that glibc cannot use again, and grows without bound where it keeps what is freed.
    """
    trim = _trim()
    return trim is not None and bool(trim(0))


@cache
def _trim() -> Callable[[int], int] | None:
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return None
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return found


def denormals_flushed() -> bool:
    """Whether this thread takes numbers too small for a float32's exponent, below 1e-38, for 0."""
    return bool(_TINY * 1.0 == 0.0)


def begin_thread(threads: int, flush: bool) -> None:
    """Set what counts for the thread that calls it alone: intra-op threads, and tiny numbers.

    When a thread first uses torch it takes the number that any thread set last; asking is a use.
    """
    torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(flush)


@contextmanager
def arithmetic(threads: int) -> Iterator[None]:
    """Let this thread, and those it starts, compute as runs do; as before it afterwards.

    With so many intra-op threads, and with numbers below 1e-38 taken for 0. Gradients of that size
    are what an episode sends back that is solved for certain, and processors of some makers need a
    hundred times as long for each: on an Intel Xeon a step of a Conv4 at 84 pixels took 17 times.
    """
    before, flushed = torch.get_num_threads(), denormals_flushed()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(flushed)


def end_idle_openmp_threads() -> None:
    """End the threads that GNU OpenMP keeps for the next operator of the calling thread.

    A forked process inherits the record of these threads and not the threads, and its first
    operator that uses several would wait for them for ever. They start again when they are needed.
    LLVM's and Intel's OpenMP see to this themselves.
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for path in {line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(path, mode=os.RTLD_NOLOAD).omp_pause_resource_all(_HARD)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=end_idle_openmp_threads)
