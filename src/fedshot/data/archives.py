"""Zip files, tar files and folders, read alike: members by name, nothing unpacked.

A member's name that is absolute or climbs (`..`) is refused although nothing is ever written under
it: whoever made such a file meant harm or made a mistake, and other tools may unpack it.
"""

from __future__ import annotations

import gzip
import os
import struct
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

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
PICTURE_LIMIT = 32 << 20  # bytes of one picture file
_ENCRYPTED = 1
_PIECE = 1 << 16  # bytes unpacked at a time


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
        with _damage(path, "tar"):
            tar = tarfile.open(path)  # noqa: SIM115  closed below; errors there are not its own
        with tar:
            yield _Tar(path, tar)
    else:
        with _damage(path, "zip"):
            archive = zipfile.ZipFile(path)
        with archive:
            yield _Zip(path, archive)


@contextmanager
def opened_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file; a damaged one is a DataError that names it."""
    with _damage(path, "zip"), zipfile.ZipFile(path) as archive:
        yield archive


@contextmanager
def unzipped(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """Open a file that may be gzipped, by its first bytes rather than by its name."""
    with path.open("rb") as file:
        if file.read(2) == b"\x1f\x8b":
            file.seek(0)
            with gzip.GzipFile(fileobj=file) as plain:
                yield plain
        else:
            file.seek(0)
            yield file


def home(data_dir: Path | None, source: str, folder: str, wanted: str) -> Path:
    """Return the folder of a dataset below the data folder, or say what belongs where."""
    if data_dir is None:
        raise DataError(
            f"{source} needs a data folder and none is given. Set $FEDSHOT_DATA, or the option "
            f"`data_dir`, to the folder that holds {folder}/ with {wanted}."
        )
    return data_dir / folder


def check_name(path: Path, name: str) -> None:
    """Raise DataError if a member's name would lead out of the archive."""
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or "\0" in name:
        raise DataError(
            f"{path} has a member {name!r}, a path that climbs out of the archive. Do not unpack "
            "it; fetch the file again from its publisher."
        )


def _hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _bounded(path: Path, name: str, size: int, limit: int) -> None:
    if size > limit:
        raise DataError(
            f"{path}: {name} has {size} bytes, expected at most {limit}. Fetch the file again."
        )


@contextmanager
def _damage(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist. Put it there, or correct the path.") from error
    except DAMAGE as error:
        raise DataError(
            f"{path} is not a whole {kind} file ({error}). It was probably cut off; fetch or write "
            "it again."
        ) from error


class _Zip:
    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path, self._archive = path, archive
        for info in archive.infolist():
            check_name(path, info.filename)
            if info.flag_bits & _ENCRYPTED:
                raise DataError(
                    f"{path}: {info.filename} is encrypted. Pack the files again, "
                    "without a password."
                )
        # Of members under one name the last would win in silence, so a repeated name is refused.
        names = [n for n in archive.namelist() if not n.endswith("/") and not _hidden(n)]
        self.names = sorted(set(names))
        if len(self.names) != len(names):
            twice = next(a for a, b in zip(sorted(names), self.names, strict=False) if a != b)
            raise DataError(f"{path} holds {twice!r} twice. Fetch or write the file again.")

    def read(self, name: str, limit: int = PICTURE_LIMIT) -> bytes:
        info = self._archive.getinfo(name)
        _bounded(self.path, name, info.file_size, limit)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # Only deflate is unpacked piece by piece: the others may hold far more than they say.
            raise DataError(
                f"{self.path}: {name} is packed in a way that is not taken. Pack the files again, "
                "as an ordinary zip (deflate)."
            )
        with _damage(self.path, "zip"), self._archive.open(info) as file:
            pieces = list(iter(lambda: file.read(_PIECE), b""))
            return b"".join(pieces)


class _Tar:
    def __init__(self, path: Path, tar: tarfile.TarFile) -> None:
        self.path, self._tar = path, tar
        with _damage(path, "tar"):
            members = tar.getmembers()
        for member in members:
            check_name(path, member.name)
            if not (member.isfile() or member.isdir()):
                raise DataError(
                    f"{path}: {member.name!r} is a link or device; expected files only. Fetch the "
                    "file again from its publisher."
                )
        self._one = threading.Lock()
        self._members = {m.name: m for m in members if m.isfile() and not _hidden(m.name)}
        self.names = sorted(self._members)

    def read(self, name: str, limit: int = PICTURE_LIMIT) -> bytes:
        member = self._members[name]
        _bounded(self.path, name, member.size, limit)
        with self._one, _damage(self.path, "tar"):  # the members share one place in one file
            file = self._tar.extractfile(member)
            assert file is not None  # it is a regular file
            data = file.read()
            if len(data) != member.size:
                raise EOFError(f"{name} ends after {len(data)} of {member.size} bytes")
            return data


class _Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.names = sorted(_walk(path))

    def read(self, name: str, limit: int = PICTURE_LIMIT) -> bytes:
        file = self.path / name
        try:
            _bounded(self.path, name, file.stat().st_size, limit)
            return file.read_bytes()
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
