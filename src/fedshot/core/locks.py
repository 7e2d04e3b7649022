"""Locks between processes that die with their holder.

Windows and some network file systems have none; there nobody waits, and nobody is refused.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal, NamedTuple

from fedshot.core.errors import BusyError


class Lock(NamedTuple):
    """A lock file that this process has open; not `held` where there are no locks."""

    path: Path
    file: IO[bytes]
    held: bool

    def check(self) -> None:
        """Raise BusyError where the file is held but gone from its path: another may hold one."""
        if self.held and not _is_at(self.path, self.file):
            raise BusyError(
                f"{self.path.parent} was deleted or replaced while this process used it; this "
                "process writes nothing more. To use the folder again, start the command again."
            )


@contextmanager
def only_one(path: Path, does: str = "is training") -> Iterator[Lock]:
    """Hold the lock file at `path`, which stays.

    Raises BusyError when another process holds it, which says what that one `does`, and not when
    one only looks whether it is held.
    """
    with path.open("ab") as file:
        got = _lock(file.fileno(), wait=False)
        for pause in (0.02, 0.1):
            if got == "taken":
                time.sleep(pause)
                got = _lock(file.fileno(), wait=False)
        if got == "taken":
            raise BusyError(
                f"another process {does} in {path.parent}. Wait for it, or stop it first."
            )
        yield Lock(path, file, got == "held")


def taken(path: Path) -> bool | None:
    """Return whether a process holds the lock file at `path`; None where there are no locks."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        got = _lock(file.fileno(), wait=False, shared=True)
    return None if got == "none" else got == "taken"


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Wait for the lock file at `path`; yield whether the lock is held.

    With `wait=False`, `False` is yielded at once where somebody else holds it, and always where
    there are no locks: the caller must be right without one. The holder removes the file in the
    end; a killed one leaves it, free.
    """
    while True:
        with path.open("ab") as file:
            held = _lock(file.fileno(), wait=wait) == "held"
            if held and not _is_at(path, file):
                continue  # its holder removed it while we waited: somebody may hold a new one
            try:
                yield held
            finally:
                if held:
                    with suppress(OSError):
                        path.unlink()
            return  # closing the file frees the lock


def _lock(handle: int, *, wait: bool, shared: bool = False) -> Literal["held", "taken", "none"]:
    if sys.platform == "win32":
        return "none"
    import fcntl

    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(handle, kind | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return "taken"
    except OSError:
        return "none"
    return "held"


def _is_at(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
