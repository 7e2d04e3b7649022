"""Bounded reading: a damaged, truncated or malicious file raises a DataError that names it.

All data readers open files here or with `fedshot.core.regular_files`. Only regular files are
opened, and a compressed file may expand to at most a fixed multiple of its size.
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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TypeAlias

from fedshot.core.errors import DataError
from fedshot.core.regular_files import open_regular, real_path

# What the standard library, numpy and Pillow raise for damaged files.
DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    tokenize.TokenError,  # numpy parses the header of an array as Python
    EOFError,
    OSError,
    RuntimeError,  # an encrypted member; NotImplementedError for an unsupported compression
    SyntaxError,
    TypeError,
    ValueError,
    LookupError,
    OverflowError,
    struct.error,
)
PIECE = 1 << 16  # bytes decompressed at a time
_FREE, _RATIO = 1 << 24, 100  # limit on decompressed bytes: _FREE + _RATIO * compressed bytes
_ENCRYPTED = 1
_FETCH = "Fetch the file again."
Stream: TypeAlias = IO[bytes]


@contextmanager
def naming_damage(path: Path, kind: str) -> Iterator[None]:
    """Turn an exception about a damaged file into a DataError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist. Put it there, or correct the path.") from error
    except DAMAGE as error:
        raise DataError(
            f"{path} is not a complete {kind} file ({error}). It may be truncated; fetch or write "
            "it again."
        ) from error


@contextmanager
def unzipped(path: Path, ratio: int = _RATIO) -> Iterator[Stream]:
    """Open a file; decompress it if its first bytes are those of gzip.

    Reading more than `max_unpacked(path, ratio)` bytes of a gzipped file raises DataError.
    """
    with open_regular(path) as file:
        gzipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not gzipped:
            yield file
            return
        with gzip.GzipFile(fileobj=file) as plain:
            yield io.BufferedReader(_Bounded(path, plain, max_unpacked(path, ratio)), PIECE)


@contextmanager
def opened_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file. Raises DataError if it is damaged."""
    with ExitStack() as stack:
        with naming_damage(path, "zip"):
            archive = stack.enter_context(zipfile.ZipFile(stack.enter_context(open_regular(path))))
        yield archive


def max_unpacked(path: Path, ratio: int = _RATIO) -> int:
    """Return how many bytes a file may expand to: `ratio` times its size, plus a constant."""
    return _FREE + ratio * path.stat().st_size


class _Bounded(io.RawIOBase):
    """The content of a .gz file; reading or seeking beyond `limit` bytes raises DataError."""

    def __init__(self, path: Path, plain: gzip.GzipFile, limit: int) -> None:
        self._path, self._plain, self._limit = path, plain, limit

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        data = self._plain.read(len(buffer))
        self._check(self._plain.tell())
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_CUR:
            offset += self._plain.tell()
        self._check(offset)
        return self._plain.seek(offset)

    def tell(self) -> int:
        return self._plain.tell()

    def _check(self, offset: int) -> None:
        if offset > self._limit:
            raise DataError(
                f"{self._path} unpacks to more than {self._limit} bytes, too many for a file of "
                "its size. Fetch it again, or unpack it yourself."
            )


def check_name(path: Path, name: str) -> None:
    """Raise DataError if the name of an archive's member points outside the archive."""
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or "\0" in name:
        raise DataError(
            f"{path} has a member {name!r}, a path that points outside the archive. Do not unpack "
            "it; fetch the file again from its publisher."
        )


def check_link(root: Path, path: Path) -> None:
    """Raise DataError if a path is a symbolic link to somewhere outside `root` (resolved)."""
    if path.is_symlink() and not real_path(path).is_relative_to(root):
        raise DataError(
            f"{path} is a link to {real_path(path)}, outside {root}. Copy the file into the folder."
        )


def check_size(path: Path, name: str, size: int, limit: int, fix: str = _FETCH) -> None:
    """Raise DataError if a member of an archive declares more than `limit` bytes."""
    if size > limit:
        raise DataError(f"{path}: {name} has {size} bytes, expected at most {limit}. {fix}")


def check_member(
    path: Path, member: zipfile.ZipInfo, limit: int | None = None, fix: str = _FETCH
) -> None:
    """Raise DataError if a zip member is encrypted, too large, or neither stored nor deflated.

    `limit` is the maximum number of bytes of the member; None for `max_unpacked`. `fix` is the last
    sentence of the error for a member that is too large.
    """
    if member.flag_bits & _ENCRYPTED:
        raise DataError(
            f"{path}: {member.filename} is encrypted. Pack the files again, without a password."
        )
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # zipfile decompresses only deflate piece by piece: other formats may expand without limit.
        raise DataError(
            f"{path}: {member.filename} has an unsupported compression. Pack the files again, as "
            "an ordinary zip (deflate)."
        )
    limit = max_unpacked(path) if limit is None else limit
    check_size(path, member.filename, member.file_size, limit, fix)


def check_memory(name: str, size: int, fix: str) -> None:
    """Raise DataError if `size` bytes for `name` do not fit into the machine's memory."""
    try:
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not known on this system
        return
    if size > have > 0:
        raise DataError(
            f"{name} needs {size / 1e9:.1f} GB of memory, and this machine has {have / 1e9:.1f}. "
            f"{fix}"
        )
