"""What this process may use of the machine."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache

# glibc's names for mallopt, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MB = 1 << 20


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
