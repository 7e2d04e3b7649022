"""One interface to read members of zip files, tar files and folders by name, without unpacking.

Opening an archive with a member whose name is absolute or contains `..` raises DataError. Nothing
is ever written to disk here, but such an archive is malicious or broken, and other tools may unpack
it.
"""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from fedshot.core.errors import DataError
from fedshot.core.regular_files import read_regular, real_path
from fedshot.data.files.bounded import (
    PIECE,
    check_link,
    check_member,
    check_name,
    check_size,
    naming_damage,
    opened_zip,
)
from fedshot.data.files.tars import Tar, opened_tar

IMAGE_LIMIT = 32 << 20  # bytes of one image file


class Archive(Protocol):
    """A container of files. `names` are the sorted paths of its members, without hidden files."""

    path: Path
    names: list[str]

    def read(self, name: str, limit: int = IMAGE_LIMIT) -> bytes:
        """Return the bytes of a member. Raises DataError above `limit` bytes. Thread-safe."""


@contextmanager
def opened(path: Path) -> Iterator[Archive]:
    """Open a folder, a .zip, a .tar or a .tar.gz. Raises DataError if it is damaged or unsafe."""
    if path.is_dir():
        yield _Folder(path)
    elif path.name.endswith((".tar.gz", ".tgz", ".tar")):
        with opened_tar(path) as tar:
            yield _Tar(path, tar)
    else:
        with opened_zip(path) as archive:
            yield _Zip(path, archive)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _unique(path: Path, names: list[str]) -> list[str]:
    """Return the names, sorted. Raises DataError for duplicates."""
    names = sorted(names)
    for name, other in pairwise(names):
        if name == other:
            raise DataError(f"{path} holds {name!r} twice. Fetch or write the file again.")
    return names


class _Zip:
    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path, self._archive = path, archive
        for name in archive.namelist():
            check_name(path, name)
        names = [n for n in archive.namelist() if not n.endswith("/") and not _is_hidden(n)]
        self.names = _unique(path, names)

    def read(self, name: str, limit: int = IMAGE_LIMIT) -> bytes:
        info = self._archive.getinfo(name)
        check_member(self.path, info, limit)
        with naming_damage(self.path, "zip"), self._archive.open(info) as file:
            return b"".join(iter(lambda: file.read(PIECE), b""))


class _Tar:
    def __init__(self, path: Path, tar: Tar) -> None:
        self.path, self._tar = path, tar
        members = [(member.name.removeprefix("./"), member) for member in tar.members()]
        self.names = _unique(path, [name for name, _ in members if not _is_hidden(name)])
        self._members = dict(members)
        self._lock = threading.Lock()  # all members are read through one file position

    def read(self, name: str, limit: int = IMAGE_LIMIT) -> bytes:
        with self._lock:
            return self._tar.read(self._members[name], limit)


class _Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.names = sorted(_walk(path))

    def read(self, name: str, limit: int = IMAGE_LIMIT) -> bytes:
        file = self.path / name
        try:
            check_size(self.path, name, file.stat().st_size, limit)
            return read_regular(file, limit)
        except OSError as error:
            raise DataError(f"{file} cannot be read ({error}). Put the file back.") from error


def _walk(root: Path) -> Iterator[str]:
    """Yield the names of the files below a folder. Raises DataError for links that leave it."""
    inside = real_path(root)
    for folder, subfolders, files in os.walk(root, followlinks=False):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in (*subfolders, *files):
            full = os.path.join(folder, name)  # noqa: PTH118  a Path for each of 779,165 is slow
            if os.path.islink(full):  # noqa: PTH114
                check_link(inside, Path(full))
        below = os.path.relpath(folder, root)
        for name in files:
            if not name.startswith("."):
                yield name if below == "." else f"{below}/{name}".replace(os.sep, "/")
