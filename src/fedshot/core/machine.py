"""Cores, memory and threads of this process."""

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
# 2^-127, written by its bits because this thread may flush such a number to 0.
_TINY = torch.tensor([1 << 22], dtype=torch.int32, device="cpu").view(torch.float32)


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def keep_freed_memory() -> bool:
    """Make glibc keep large freed blocks for the next step instead of returning them to the system.

    By default, glibc returns a freed feature map of more than 32 MB to the system. Every training
    step then has to map new memory, which the system zeroes page by page; this takes half the time
    of a step of a Conv4 at 84 pixels. Of glibc's heaps (arenas) only the main one can keep blocks
    that large, so all threads are made to share it. The change affects the whole process, on Linux
    with glibc only. Returns whether it was made.
    """
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    wanted = (
        (_MMAP_THRESHOLD, 1024 * _MB),
        (_TRIM_THRESHOLD, 2**31 - 1),
        (_TOP_PAD, 64 * _MB),
        (_ARENA_MAX, 1),
    )
    done = [mallopt(name, value) == 1 for name, value in wanted]  # a list, so that all are set
    return all(done)


def give_back_memory() -> bool:
    """Return free blocks to the system; returns whether any memory was released.

    A loop that allocates small results between large blocks fragments the heap: glibc cannot reuse
    the holes, and after `keep_freed_memory` the process would grow without bound.
    """
    trim = _glibc("malloc_trim")
    return trim is not None and bool(trim(0))


@cache
def _glibc(name: str) -> Callable[..., int] | None:
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return None
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    return found


def denormals_flushed() -> bool:
    """Whether this thread treats float32 numbers below 1e-38 (denormals) as 0."""
    return bool(_TINY * 1.0 == 0.0)


def begin_thread(threads: int, flush: bool) -> None:
    """Set the intra-op threads and the flushing of denormals for the calling thread only.

    When a thread first uses torch, it copies the number of intra-op threads that any thread set
    last. Reading the number counts as first use, so it is read before it is set.
    """
    torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(flush)


@contextmanager
def arithmetic(threads: int) -> Iterator[None]:
    """Set how this thread, and threads it starts, compute in a run; restore it afterwards.

    They use `threads` intra-op threads and treat numbers below 1e-38 as 0. Near-certain predictions
    have gradients of that size, on which some processors are a hundred times slower: on an Intel
    Xeon a step of a Conv4 at 84 pixels took 17 times as long.
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
    """End the idle threads that GNU OpenMP keeps for the next operator of the calling thread.

    A forked process inherits the record of these threads but not the threads themselves, so its
    first parallel operator would wait for them forever. OpenMP starts them again when needed.
    LLVM's and Intel's OpenMP handle forks themselves.
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
