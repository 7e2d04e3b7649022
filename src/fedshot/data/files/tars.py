"""Reads tar files member by member, with a limit on the size of their headers.

A member may follow extension records, such as a long name, attributes or the map of a sparse file.
`tarfile` reads each record into memory, whatever size the record declares. `tarfile` is therefore
given a stream that limits the bytes of every header.

`tarfile` also takes a damaged header, or a file that was cut off between two members, for the end
of the file. Here both are errors.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Self, cast

from fedshot.core.errors import DataError
from fedshot.data.files.bounded import (
    PIECE,
    Stream,
    check_name,
    check_size,
    naming_damage,
    unzipped,
)

_HEADER = 1 << 14  # bytes of one member's header and its records; a path has at most 4096
_HEADERS = 1 << 27  # bytes of all headers; 60,000 images have at most 9e7


@contextmanager
def opened_tar(path: Path) -> Iterator[Tar]:
    """Open a .tar or .tar.gz. Raises DataError if it is damaged."""
    with ExitStack() as stack:
        with naming_damage(path, "tar"):
            tar = Tar(path, stack.enter_context(unzipped(path)))
        yield tar


class Tar:
    """The members of a tar file, which can be iterated over once, and their bytes.

    Reading a member directly after its header is fast. Reading an earlier member decompresses a
    .tar.gz again from its beginning.
    """

    def __init__(self, path: Path, stream: Stream) -> None:
        self._path, self._stream, self._left = path, stream, _HEADERS
        self._headers = _HeaderStream(path, stream)
        # Mode "r|" would read the content of members through the header stream, too.
        file = cast(IO[bytes], self._headers)
        self._tar = tarfile.open(fileobj=file, mode="r:", tarinfo=_Member)  # noqa: SIM115

    def members(self) -> Iterator[tarfile.TarInfo]:
        """Yield the members that are files.

        Raises DataError for links, devices, sparse files and names that point outside the archive.
        """
        while True:
            with naming_damage(self._path, "tar"):
                member = self._tar.next()
            self._left -= self._headers.reset()
            if self._left < 0:
                raise DataError(
                    f"{self._path} has more than {_HEADERS} bytes of headers, too many members "
                    "for a tar. Unpack it, and use the folder."
                )
            if member is None:
                return
            # tarfile copies global records into every later member; they are not needed.
            member.pax_headers, self._tar.pax_headers = {}, {}
            check_name(self._path, member.name)
            if not (member.isfile() or member.isdir()) or member.issparse() or member.size < 0:
                raise DataError(
                    f"{self._path}: {member.name!r} is a link or device, or has holes; expected "
                    "plain files only. Fetch the file again from its publisher."
                )
            if member.isfile():
                yield member

    def read(self, member: tarfile.TarInfo, limit: int) -> bytes:
        """Return a member's bytes. Raises DataError if it has over `limit` bytes or is damaged."""
        check_size(self._path, member.name, member.size, limit)
        with naming_damage(self._path, "tar"):
            self._stream.seek(member.offset_data)
            pieces, left = [], member.size
            while left and (piece := self._stream.read(min(left, PIECE))):
                pieces.append(piece)
                left -= len(piece)
            if left:
                raise EOFError(f"{member.name} lacks the last {left} of {member.size} bytes")
            return b"".join(pieces)


class _Member(tarfile.TarInfo):
    """A member whose header, if it is damaged or missing, raises ReadError."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"after {archive.offset} bytes: {error}") from error


class _HeaderStream:
    """A stream from which at most _HEADER bytes can be read before the next `reset`."""

    def __init__(self, path: Path, stream: Stream) -> None:
        self._path, self._stream, self._left = path, stream, _HEADER

    def reset(self) -> int:
        """Start the next header; return the number of bytes of the previous header."""
        used, self._left = _HEADER - self._left, _HEADER
        return used

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self._left:
            raise DataError(
                f"{self._path} has a member with a header of more than {_HEADER} bytes. Fetch the "
                "file again from its publisher, or pack the files again, without attributes."
            )
        self._left -= size
        return self._stream.read(size)

    def seek(self, offset: int) -> int:
        return self._stream.seek(offset)

    def tell(self) -> int:
        return self._stream.tell()
