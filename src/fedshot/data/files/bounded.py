"""Files from elsewhere: one that is damaged, cut off or made to harm is refused by name.

All readers of data open files here, or with `fedshot.core.regular_files`: regular files alone, and
of a packed file no more than a bounded multiple of its size.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import struct
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeAlias

from fedshot.core.errors import DataError
from fedshot.core.regular_files import open_regular

DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    tokenize.TokenError,  # numpy reads the header of an array as Python
    EOFError,
    OSError,
    RuntimeError,  # an encrypted member; NotImplementedError for exotic compression
    SyntaxError,
    TypeError,
    ValueError,
    LookupError,
    OverflowError,
    struct.error,
)
PIECE = 1 << 16  # bytes unpacked at a time
_FREE, _RATIO = 1 << 24, 100  # bytes that any file may unpack to, and how many more for each byte
_ENCRYPTED = 1
_FETCH = "Fetch the file again."
Stream: TypeAlias = IO[bytes]


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
def unzipped(path: Path, ratio: int = _RATIO) -> Iterator[Stream]:
    """Open a file that may be gzipped, by its first bytes rather than by its name.

    Reading a .gz beyond what `most_unpacked` allows is a DataError.
    """
    with open_regular(path) as file:
        if file.read(2) == b"\x1f\x8b":
            file.seek(0)
            with gzip.GzipFile(fileobj=file) as plain:
                yield io.BufferedReader(_Bounded(path, plain, most_unpacked(path, ratio)), PIECE)
        else:
            file.seek(0)
            yield file


@contextmanager
def opened_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file; a damaged one is a DataError that names it."""
    with (
        damage(path, "zip"),
        open_regular(path) as file,
        zipfile.ZipFile(file) as archive,
    ):
        yield archive


def most_unpacked(path: Path, ratio: int = _RATIO) -> int:
    """Return the bytes that a packed file may hold: no real images are packed a hundred to one."""
    return _FREE + ratio * path.stat().st_size


class _Bounded(io.RawIOBase):
    """The content of a .gz file, which ends in an error where it is too much for the file."""

    def __init__(self, path: Path, plain: gzip.GzipFile, most: int) -> None:
        self._path, self._plain, self._most = path, plain, most

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        data = self._plain.read(len(buffer))
        self._check(self._plain.tell())
        buffer[: len(data)] = data
        return len(data)

    def seek(self, place: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_CUR:
            place += self._plain.tell()
        self._check(place)
        return self._plain.seek(place)

    def tell(self) -> int:
        return self._plain.tell()

    def _check(self, place: int) -> None:
        if place > self._most:
            raise DataError(
                f"{self._path} unpacks to more than {self._most} bytes, more than real data of its "
                "size. Fetch it again, or unpack it yourself."
            )


def check_name(path: Path, name: str) -> None:
    """Raise DataError if a member's name would lead out of the archive."""
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or "\0" in name:
        raise DataError(
            f"{path} has a member {name!r}, a path that climbs out of the archive. Do not unpack "
            "it; fetch the file again from its publisher."
        )


def check_size(path: Path, name: str, size: int, limit: int, fix: str = _FETCH) -> None:
    """Raise DataError if a member says that it is larger than what it should hold."""
    if size > limit:
        raise DataError(f"{path}: {name} has {size} bytes, expected at most {limit}. {fix}")


def check_member(
    path: Path, member: zipfile.ZipInfo, limit: int | None = None, fix: str = _FETCH
) -> None:
    """Raise DataError for a member of a zip file that cannot be unpacked within bounds.

    `limit` is the most bytes it may have, without one those that `most_unpacked` allows; `fix` is
    what to do where it has more.
    """
    if member.flag_bits & _ENCRYPTED:
        raise DataError(
            f"{path}: {member.filename} is encrypted. Pack the files again, without a password."
        )
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # Only deflate is unpacked piece by piece: the others may hold far more than they say.
        raise DataError(
            f"{path}: {member.filename} is packed in a way that is not taken. Pack the files "
            "again, as an ordinary zip (deflate)."
        )
    most = most_unpacked(path) if limit is None else limit
    check_size(path, member.filename, member.file_size, most, fix)


def check_memory(name: str, size: int, fix: str) -> None:
    """Raise DataError for `size` bytes that are more than the machine's memory."""
    try:
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # a system that does not tell
        return
    if size > have > 0:
        raise DataError(
            f"{name} needs {size / 1e9:.1f} GB of memory, and this machine has {have / 1e9:.1f}. "
            f"{fix}"
        )
