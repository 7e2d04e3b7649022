"""A folder that one process at a time may write to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedshot.errors import BusyError


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`; it frees itself when its process ends, however it ends.

    Raises BusyError when another process holds it. Windows and some network file systems have
    no such lock; there it is not checked.
    """
    with path.open("ab") as file:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(
                    f"another process is training in {path.parent}. Wait for it, or stop it first."
                ) from None
            except OSError:
                pass
        yield
