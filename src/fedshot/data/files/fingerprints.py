"""Hashes of files and folders, remembered until their sizes or time stamps change."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedshot.core import storage
from fedshot.core.errors import DataError
from fedshot.core.regular_files import open_regular, real_path
from fedshot.data.files.archives import opened

_FRESH = 2.0  # seconds; a file changed more recently may change again with the same time stamp


class Fingerprints:
    """SHA-256 hashes of files' contents, kept in the JSON file `path`.

    Each is stored with a hash of the file's size and time stamps, which tells whether it is valid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[str]] = {}
        with suppress(OSError, ValueError):
            known = json.loads(path.read_bytes())
            if isinstance(known, dict):
                self._known = known

    def of(self, source: Path) -> str:
        """Return the hash of a file's bytes, or of the names and bytes of a folder's files."""
        key = str(real_path(source))
        try:
            stamp, changed = _stamp(source)
            if self._known.get(key, [""])[0] == stamp:
                return str(self._known[key][1])
            sha = _hash_folder(source) if source.is_dir() else hash_file(source)
        except OSError as error:
            raise DataError(f"{source} cannot be read ({error}). Put the file back.") from error
        if time.time() - changed > _FRESH:
            self._remember(key, [stamp, sha])
        return sha

    def _remember(self, key: str, entry: list[str]) -> None:
        self._known = {p: e for p, e in self._known.items() if os.path.lexists(p)}
        self._known[key] = entry
        with suppress(OSError):  # without the file, sources are hashed again
            self._path.parent.mkdir(parents=True, exist_ok=True)
            storage.write_bytes(self._path, json.dumps(self._known).encode(), sync=False)


def hash_file(path: Path, kind: str = "sha256") -> str:
    """Return the hash of a file's bytes as hex; `kind` is the algorithm's name in hashlib."""
    with open_regular(path) as file:
        return hash_stream(file, kind)


def hash_stream(file: Any, kind: str = "sha256") -> str:
    """Return the hash of the remaining bytes of a stream as hex; `kind` as in `hash_file`."""
    new = partial(hashlib.new, kind, usedforsecurity=False)
    return hashlib.file_digest(file, new).hexdigest()


def hash_json(value: Any) -> str:
    """Return the SHA-256, as hex, of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _hash_folder(path: Path) -> str:
    """Return the hash of the names and bytes of all files below a folder."""
    sha = hashlib.sha256()
    with opened(path) as folder:
        for name in folder.names:
            sha.update(f"{len(name)}:{name}{hash_file(path / name)}".encode())
    return sha.hexdigest()


def _stamp(source: Path) -> tuple[str, float]:
    """Return (hash of the files' sizes and time stamps, latest modification time in seconds)."""
    names = [""]
    if source.is_dir():
        with opened(source) as folder:
            names = folder.names
    latest = 0
    sha = hashlib.sha256()
    for name in names:
        stat = os.stat(f"{source}/{name}" if name else source)  # noqa: PTH116  a Path each is slow
        latest = max(latest, stat.st_mtime_ns)
        parts = (len(name), name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        sha.update((":".join(map(str, parts)) + ";").encode())
    return sha.hexdigest(), latest / 1e9
