"""File locks between processes. A lock ends with the process that holds it.

Some network file systems do not support locks. On these, no function of this module waits for
another process or raises BusyError.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from fedshot.core.errors import BusyError

_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_WHILE_OTHERS_CHECK = 0.2  # seconds to wait, since `taken` holds the lock for an instant


class Lock(NamedTuple):
    """A lock file that this process holds.

    `inode` is its (device, inode), or None if the file system does not support locks.
    """

    path: Path
    inode: tuple[int, int] | None

    @property
    def held(self) -> bool:
        """Whether the lock excludes other processes; False if the file system has no locks."""
        return self.inode is not None

    def check(self) -> None:
        """Raise BusyError if the lock file was deleted or replaced.

        Another process may then hold a new lock file at the same path.
        """
        if self.held and _inode(self.path) != self.inode:
            raise BusyError(
                f"{self.path.parent} was deleted or replaced while this process used it; this "
                "process writes nothing more. Start the command again to use the folder."
            )


@contextmanager
def only_one(path: Path, does: str = "is training") -> Iterator[Lock]:
    """Hold a lock on the file at `path`, and leave the file there afterwards.

    Raises BusyError if another process holds the lock. `does` is the verb phrase of the message:
    "another process {does} in {folder}".
    """
    with _lock(path, _WHILE_OTHERS_CHECK) as got:
        if got == "taken":
            raise BusyError(
                f"another process {does} in {path.parent}. Wait for it, or stop it first."
            )
        yield Lock(path, _inode(path) if got == "held" else None)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file at `path` and remove it afterwards; yield whether the lock is held.

    The lock is not held if the file system does not support locks, or, with `wait=False`, if
    another process holds it. The caller must work correctly in these cases, too.
    """
    with _lock(path, -1 if wait else 0) as got:
        try:
            yield got == "held"
        finally:
            if got == "held":
                with suppress(OSError):
                    path.unlink()


@contextmanager
def _lock(path: Path, timeout: float) -> Iterator[Literal["held", "taken", "none"]]:
    from filelock import FileLock, Timeout  # importing takes 40 ms

    lock = FileLock(path, timeout, thread_local=False, poll_interval=0.02, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        yield "taken"
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        yield "none"
    else:
        try:
            yield "held"
        finally:
            lock.release()


def taken(path: Path) -> bool | None:
    """Return whether a process holds the lock file at `path`; None if that is unknown.

    The check takes a shared lock for an instant. Several processes can check at once, and none
    needs write permission.
    """
    if not path.exists():
        return False
    if sys.platform == "win32":
        return None
    import fcntl

    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
    return False


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino
