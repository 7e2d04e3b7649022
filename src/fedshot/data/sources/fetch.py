"""Downloads from a dataset's publisher: checked, resumed, and whole or absent.

A file grows as `<name>.part` and is renamed once its checksum is right, so a broken download goes
on where it stopped and never passes for a whole file. While one process writes to it, others that
want the same file wait. Only https is used, through redirects too; plain http is for a server on
this machine, in tests.
"""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from fedshot.core.errors import DataError, nearest
from fedshot.core.locks import locked
from fedshot.data.files.fingerprints import hash_file
from fedshot.data.files.places import OPTION
from fedshot.data.sources.publishers import PUBLISHERS, Publisher, Remote

_CHUNK = 1 << 18
_TIMEOUT = 60.0  # seconds without a byte
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
Progress: TypeAlias = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Fetched:
    """A file that is in place: where, how many bytes, and whether a checksum was compared."""

    path: Path
    size: int
    verified: bool
    already: bool  # it was there before


class _UnreachableError(Exception):
    """The address gave no file; the next one may."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        _check_url(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def get(
    name: str,
    data_dir: Path,
    progress: Progress | None = None,
    publishers: dict[str, Publisher] | None = None,
) -> list[Fetched]:
    """Bring the files of a dataset to its folder below `data_dir`; those in place are only checked.

    Args:
        name: as in `PUBLISHERS`.
        data_dir: the folder of datasets.
        progress: called with (file name, bytes so far, bytes in all if known).
        publishers: replaces `PUBLISHERS`, in tests.
    """
    known = PUBLISHERS if publishers is None else publishers
    if name not in known:
        raise DataError(f"no publisher is known for {name!r}. {nearest(name, known)}")
    publisher = known[name]
    folder = data_dir / publisher.folder
    if not publisher.files:
        raise DataError(f"{name} cannot be downloaded by a program. {by_hand(name, data_dir)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_bring(remote, folder, progress) for remote in publisher.files]
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written to ({error}). Make it a folder of yours, or choose "
            f"another with {OPTION}."
        ) from error


def by_hand(name: str, data_dir: Path) -> str:
    """Return which files to put where, for a person or for a machine without a network."""
    publisher = PUBLISHERS[name]
    folder = data_dir / publisher.folder
    if publisher.manual:
        return publisher.manual.format(folder=folder)
    files = "; ".join(f"{remote.urls[0]} as {remote.name}" for remote in publisher.files)
    return f"Fetch by hand and put into {folder}: {files}."


def _bring(remote: Remote, folder: Path, progress: Progress | None) -> Fetched:
    path = folder / remote.name
    if path.exists():
        return _in_place(path, remote)
    with locked(folder / f".{remote.name}.lock"):
        if path.exists():  # another process has brought it while we waited
            return _in_place(path, remote)
        return _fetch(remote, path, progress)


def _in_place(path: Path, remote: Remote) -> Fetched:
    _check_sum(path, remote, "Move it away to fetch it again.")
    return Fetched(path, path.stat().st_size, remote.checksum is not None, already=True)


def _fetch(remote: Remote, path: Path, progress: Progress | None) -> Fetched:
    part = path.with_name(f"{remote.name}.part")
    said = []
    for url in remote.urls:
        try:
            _download(url, part, remote, progress)
        except _UnreachableError as error:
            said.append(f"{url} ({error})")
            continue
        try:
            _check_sum(part, remote, "Try again later; the publisher may have changed the file.")
        except DataError:
            part.unlink()  # to go on from wrong bytes would never end well
            raise
        part.replace(path)
        return Fetched(path, path.stat().st_size, remote.checksum is not None, already=False)
    raise DataError(
        f"{remote.name} cannot be fetched from {' nor '.join(said)}. What arrived is kept; try "
        f"again to go on, or fetch it on another machine and put it at {path}."
    )


def _download(url: str, part: Path, remote: Remote, progress: Progress | None) -> None:
    """Fetch a file, or what is still missing of it, into `part`."""
    _check_url(url)
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "fedshot"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    opener = urllib.request.build_opener(_Redirects)
    try:
        with opener.open(request, timeout=_TIMEOUT) as answer:
            if done and not _continues(answer, done):
                done = 0  # the server sends all of it again
            told = answer.headers.get("Content-Length")
            total = done + int(told) if told and told.isdigit() else None
            with part.open("ab" if done else "wb") as file:
                while chunk := answer.read(_CHUNK):
                    done += len(chunk)
                    if done > remote.at_most:
                        raise DataError(
                            f"{url} sends more than {remote.at_most} bytes, which {remote.name} "
                            f"has at most. Remove {part}; the publisher may have changed the file."
                        )
                    file.write(chunk)
                    if progress is not None:
                        progress(remote.name, done, total)
    except urllib.error.HTTPError as error:
        if error.code == 416 and done:  # nothing is left to send: the checksum decides
            return
        raise _UnreachableError(f"answer {error.code}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _UnreachableError(
            str(getattr(error, "reason", error)) or type(error).__name__
        ) from error
    if total is not None and done < total:
        raise _UnreachableError(f"the connection broke after {done} of {total} bytes")


def _continues(answer: http.client.HTTPResponse, done: int) -> bool:
    span = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
    return answer.status == 206 and span is not None and int(span[1]) == done


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        raise DataError(
            f"{url} is not an https address; nothing is fetched unprotected. Fetch the file by "
            "hand, and compare its checksum."
        )


def _check_sum(path: Path, remote: Remote, remedy: str) -> None:
    if remote.checksum is None:
        return
    kind, wanted = remote.checksum.split(":")
    found = hash_file(path, kind)
    if found != wanted:
        raise DataError(
            f"{path} has {kind} {found}, expected {wanted}: it is damaged, or another version. "
            f"{remedy}"
        )
