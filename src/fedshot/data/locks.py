"""A lock between processes that dies with its holder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Wait for the lock file at `path`; yield whether the lock is held.

    With `wait=False`, `False` is yielded at once where somebody else holds it. Some network file
    systems and Windows have no such lock; there `False` is always yielded at once, and the caller
    must be right without it. The holder removes the file in the end; a killed one leaves it, free.
    """
    while True:
        with path.open("ab") as file:
            held = _lock(file.fileno(), wait)
            if held and not _is_at(path, file):
                continue  # its holder removed it while we waited: somebody may hold a new one
            try:
                yield held
            finally:
                if held:
                    with suppress(OSError):
                        path.unlink()
            return  # closing the file frees the lock


def _lock(handle: int, wait: bool) -> bool:
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _is_at(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
