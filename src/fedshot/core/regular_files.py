"""Paths, and reading regular files only: a pipe may wait forever, a device may have no end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading bytes. Raises OSError if it is not a regular file."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)  # returns at once, even for a pipe
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(code, "it is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: Path, limit: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Raises OSError if it is not a regular file, or holds more than `limit` bytes.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if limit is None:
                return file.read()
            data = file.read(limit + 1) if size <= limit else b""
    except OSError as error:  # an error while reading does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from None
    if max(size, len(data)) > limit:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {limit:,}", str(path))
    return data


def real_path(path: Path) -> Path:
    """Return the absolute path behind all symbolic links.

    Links that form a loop are left as they are, and opening them raises OSError; `Path.resolve`
    raises RuntimeError for them in Python 3.11 and 3.12.
    """
    return Path(os.path.realpath(path))
