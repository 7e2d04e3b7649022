"""A lock between processes that dies with its holder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Wait for the lock file at `path`; yield whether the lock is held.

    Some network file systems and Windows have no such lock; there `False` is yielded at once, and
    the caller must be right without it. The file itself stays: to remove it while another process
    waits on it would let two in.
    """
    with path.open("ab") as file:
        yield _lock(file.fileno())  # closing the file frees the lock


def _lock(handle: int) -> bool:
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        return False
    return True
