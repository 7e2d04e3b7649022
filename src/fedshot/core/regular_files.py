"""Regular files alone: a reader of a pipe may wait for ever, and a device may have no end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading its bytes. Raises OSError for what is no regular file."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)  # at once, also where it is a pipe
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(code, "it is no regular file", str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: Path, limit: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Raises OSError for another kind of file, or for more than `limit` bytes, which are not read.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if limit is None:
                return file.read()
            data = file.read(limit + 1) if size <= limit else b""
    except OSError as error:  # which names no file where reading fails
        raise OSError(error.errno, error.strerror, str(path)) from None
    if max(size, len(data)) > limit:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {limit:,}", str(path))
    return data
