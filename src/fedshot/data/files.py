"""Files from elsewhere: one that is damaged, cut off or made to harm is refused by name."""

from __future__ import annotations

import gzip
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeAlias

from fedshot.errors import DataError

DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    EOFError,
    OSError,
    RuntimeError,  # an encrypted member; NotImplementedError for exotic compression
    ValueError,
    LookupError,
    OverflowError,
    struct.error,
)
PIECE = 1 << 16  # bytes unpacked at a time
Stream: TypeAlias = IO[bytes] | gzip.GzipFile


@contextmanager
def damage(path: Path, kind: str) -> Iterator[None]:
    """Turn what a reader raises about a bad file into a DataError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist. Put it there, or correct the path.") from error
    except DAMAGE as error:
        raise DataError(
            f"{path} is not a whole {kind} file ({error}). It was probably cut off; fetch or write "
            "it again."
        ) from error


@contextmanager
def unzipped(path: Path) -> Iterator[Stream]:
    """Open a file that may be gzipped, by its first bytes rather than by its name."""
    with path.open("rb") as file:
        if file.read(2) == b"\x1f\x8b":
            file.seek(0)
            with gzip.GzipFile(fileobj=file) as plain:
                yield plain
        else:
            file.seek(0)
            yield file


def check_name(path: Path, name: str) -> None:
    """Raise DataError if a member's name would lead out of the archive."""
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or "\0" in name:
        raise DataError(
            f"{path} has a member {name!r}, a path that climbs out of the archive. Do not unpack "
            "it; fetch the file again from its publisher."
        )


def check_size(path: Path, name: str, size: int, limit: int) -> None:
    """Raise DataError if a member says that it is larger than what it should hold."""
    if size > limit:
        raise DataError(
            f"{path}: {name} has {size} bytes, expected at most {limit}. Fetch the file again."
        )
