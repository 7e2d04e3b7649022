"""Tar files, gone through member by member, with a limit on all that their headers claim.

Records may stand before a member: a long name, attributes, a map of holes. `tarfile` reads each of
them into memory, however long it says it is, and makes of it many times its bytes. Therefore it
reads through a stream that has an allowance for each member.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, cast

from fedshot.core.errors import DataError
from fedshot.data.files.bounded import PIECE, Stream, check_name, check_size, damage, unzipped

_HEADER = 1 << 14  # bytes before one member, its header and all records; a path has at most 4096
_HEADERS = 1 << 27  # bytes of all headers; 60,000 images have 9e7 at most


@contextmanager
def opened_tar(path: Path) -> Iterator[Tar]:
    """Open a .tar or .tar.gz; a damaged one is a DataError that names it."""
    with ExitStack() as stack:
        with damage(path, "tar"):
            tar = Tar(path, stack.enter_context(unzipped(path)))
        yield tar


class Tar:
    """A tar file's members, to be gone through once, and their bytes.

    Reading a member at once goes on where its header ended. Reading one that lies further back
    unpacks a .tar.gz anew from its beginning.
    """

    def __init__(self, path: Path, stream: Stream) -> None:
        self._path, self._stream, self._left = path, stream, _HEADERS
        self._allowance = _Allowance(path, stream)
        # Not "r|", which would read the content of members through the same stream as the headers.
        self._tar = tarfile.open(fileobj=cast(IO[bytes], self._allowance), mode="r:")  # noqa: SIM115

    def members(self) -> Iterator[tarfile.TarInfo]:
        """Yield the files in their order; links, devices and files with holes are refused."""
        while True:
            with damage(self._path, "tar"):
                member = self._tar.next()
            self._left -= self._allowance.renew()
            if self._left < 0:
                raise DataError(
                    f"{self._path} has more than {_HEADERS} bytes of headers, more members than "
                    "are taken from a tar. Unpack it, and give the folder."
                )
            if member is None:
                return
            # Records for all members to come are copied into each; none of theirs is of use here.
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
        """Return a member's bytes."""
        check_size(self._path, member.name, member.size, limit)
        with damage(self._path, "tar"):
            self._stream.seek(member.offset_data)
            pieces, left = [], member.size
            while left and (piece := self._stream.read(min(left, PIECE))):
                pieces.append(piece)
                left -= len(piece)
            if left:
                raise EOFError(f"{member.name} lacks the last {left} of {member.size} bytes")
            return b"".join(pieces)


class _Allowance:
    """A stream that ends in an error, not in all of memory, when too much is read from it."""

    def __init__(self, path: Path, stream: Stream) -> None:
        self._path, self._stream, self._left = path, stream, _HEADER

    def renew(self) -> int:
        """Start anew with the whole allowance; return what had been read of the last."""
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

    def seek(self, place: int) -> int:
        return self._stream.seek(place)

    def tell(self) -> int:
        return self._stream.tell()
