"""Zip files, tar files and folders, read alike: members by name, nothing unpacked.

A member's name that is absolute or climbs (`..`) is refused although nothing is ever written under
it: whoever made such a file meant harm or made a mistake, and other tools may unpack it.
"""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from fedshot.core.errors import DataError
from fedshot.core.regular_files import open_regular, read_regular
from fedshot.data.files.bounded import PIECE, check_member, check_name, check_size, damage
from fedshot.data.files.tars import Tar, opened_tar

PICTURE_LIMIT = 32 << 20  # bytes of one picture file


class Archive(Protocol):
    """A thing that holds files; the names use `/` and are sorted."""

    path: Path
    names: list[str]

    def read(self, name: str, limit: int = PICTURE_LIMIT) -> bytes:
        """Return a file's bytes; safe from several threads at once."""


@contextmanager
def opened(path: Path) -> Iterator[Archive]:
    """Open a folder, a .zip, or a .tar.gz."""
    if path.is_dir():
        yield _Folder(path)
    elif path.name.endswith((".tar.gz", ".tgz", ".tar")):
        with opened_tar(path) as tar:
            yield _Tar(path, tar)
    else:
        with ExitStack() as stack:
            with damage(path, "zip"):
                file = stack.enter_context(open_regular(path))
                archive = stack.enter_context(zipfile.ZipFile(file))
            yield _Zip(path, archive)


def _hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _unique(path: Path, names: list[str]) -> list[str]:
    """Return the names, sorted. Of members under one name the last would win in silence."""
    names = sorted(names)
    for name, other in pairwise(names):
        if name == other:
            raise DataError(f"{path} holds {name!r} twice. Fetch or write the file again.")
    return names


class _Zip:
    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path, self._archive = path, archive
        for info in archive.infolist():
            check_name(path, info.filename)
        names = [n for n in archive.namelist() if not n.endswith("/") and not _hidden(n)]
        self.names = _unique(path, names)

    def read(self, name: str, limit: int = PICTURE_LIMIT) -> bytes:
        info = self._archive.getinfo(name)
        check_member(self.path, info, limit)
        with damage(self.path, "zip"), self._archive.open(info) as file:
            pieces = list(iter(lambda: file.read(PIECE), b""))
            return b"".join(pieces)


class _Tar:
    def __init__(self, path: Path, tar: Tar) -> None:
        self.path, self._tar = path, tar
        members = [(member.name.removeprefix("./"), member) for member in tar.members()]
        self.names = _unique(path, [name for name, _ in members if not _hidden(name)])
        self._members = dict(members)
        self._one = threading.Lock()

    def read(self, name: str, limit: int = PICTURE_LIMIT) -> bytes:
        with self._one:  # the members share one place in one file
            return self._tar.read(self._members[name], limit)


class _Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.names = sorted(_walk(path))

    def read(self, name: str, limit: int = PICTURE_LIMIT) -> bytes:
        file = self.path / name
        try:
            check_size(self.path, name, file.stat().st_size, limit)
            return read_regular(file, limit)
        except OSError as error:
            raise DataError(f"{file} cannot be read ({error}). Put the file back.") from error


def _walk(root: Path) -> Iterator[str]:
    """Yield the names of the files below a folder; a link that leads out is refused."""
    outside = root.resolve()
    for folder, subfolders, files in os.walk(root, followlinks=False):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in (*subfolders, *files):
            full = os.path.join(folder, name)  # noqa: PTH118  a Path for each of 779,165 is slow
            if os.path.islink(full) and not Path(full).resolve().is_relative_to(outside):  # noqa: PTH114
                raise DataError(
                    f"{full} is a link to {Path(full).resolve()}, outside {root}. Copy the file "
                    "into the folder."
                )
        below = os.path.relpath(folder, root)
        for name in files:
            if not name.startswith("."):
                yield name if below == "." else f"{below}/{name}".replace(os.sep, "/")
