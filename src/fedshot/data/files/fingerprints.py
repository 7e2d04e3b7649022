"""Hashes of files and folders, remembered as long as nothing about them changes."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from fedshot.core.errors import DataError
from fedshot.core.regular_files import open_regular
from fedshot.data.files.archives import opened

_FRESH = 2.0  # seconds; a file changed so lately may change again without a new time
_CHUNK = 1 << 20


class Readable(Protocol):
    """Anything with bytes to read."""

    def read(self, n: int, /) -> bytes:
        """Return at most n bytes, none at the end."""


class Fingerprints:
    """SHA-256 of contents, kept in a JSON file with the size and time that they were taken at."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[str]] = {}
        with suppress(OSError, ValueError):
            known = json.loads(path.read_bytes())
            if isinstance(known, dict):
                self._known = known

    def of(self, source: Path) -> str:
        """Return the hash of a file's bytes, or of the names and bytes of a folder's files."""
        place = str(source.resolve())
        try:
            stamp, changed = _stamp(source)
            if self._known.get(place, [""])[0] == stamp:
                return str(self._known[place][1])
            sha = hash_folder(source) if source.is_dir() else hash_file(source)
        except OSError as error:
            raise DataError(f"{source} cannot be read ({error}). Put the file back.") from error
        if time.time() - changed > _FRESH:
            self._remember(place, [stamp, sha])
        return sha

    def _remember(self, place: str, entry: list[str]) -> None:
        self._known = {p: e for p, e in self._known.items() if os.path.lexists(p)}
        self._known[place] = entry
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        with suppress(OSError):  # forgotten, then: it is only hashed again
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self._known))
            partial.replace(self._path)


def hash_file(path: Path, kind: str = "sha256") -> str:
    """Return the hash of a file's bytes, as hex."""
    with open_regular(path) as file:
        return hash_stream(file, kind)


def hash_stream(file: Readable, kind: str = "sha256") -> str:
    """Return the hash of all that can still be read, as hex."""
    digest = hashlib.new(kind, usedforsecurity=False)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def hash_folder(path: Path) -> str:
    """Return the hash of the names and bytes of all files below a folder."""
    sha = hashlib.sha256()
    with opened(path) as folder:
        for name in folder.names:
            sha.update(f"{len(name)}:{name}{hash_file(path / name)}".encode())
    return sha.hexdigest()


def _stamp(source: Path) -> tuple[str, float]:
    """Return what changes when the contents do, and when they last did (seconds)."""
    latest = 0
    sha = hashlib.sha256()
    for name, stat in _stats(source):
        latest = max(latest, stat.st_mtime_ns)
        sha.update(
            f"{len(name)}:{name}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}:{stat.st_ino};".encode()
        )
    return sha.hexdigest(), latest / 1e9


def _stats(source: Path) -> Iterator[tuple[str, os.stat_result]]:
    if not source.is_dir():
        yield "", source.stat()
        return
    with opened(source) as folder:
        for name in folder.names:
            yield name, os.stat(f"{source}/{name}")  # noqa: PTH116  a Path for each is slow
