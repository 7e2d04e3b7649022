"""Downloads datasets from their publishers, with checksums and resumption.

A file is written as `<name>.part` and renamed once its checksum is correct, so that an interrupted
download resumes and is never mistaken for the complete file. Other processes that want the same
file wait for a lock. Only https is used, also after redirects; tests may use http on localhost.
"""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from fedshot.core.errors import DataError, nearest
from fedshot.core.locks import locked
from fedshot.core.text import natural
from fedshot.data.files.fingerprints import hash_file
from fedshot.data.files.places import OPTION
from fedshot.data.sources.publishers import PUBLISHERS, Publisher, Remote

_CHUNK = 1 << 18
_TIMEOUT = 60.0  # seconds without data
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
Progress: TypeAlias = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Fetched:
    """A downloaded file of `size` bytes.

    `verified` is whether it has a published checksum, which then matches. `already` is whether the
    file was there before.
    """

    path: Path
    size: int
    verified: bool
    already: bool


class _UnreachableError(Exception):
    """A download from one address failed; the next address may work."""


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
    """Download a dataset's missing files to its folder below `data_dir`, and verify all its files.

    Args:
        name: a key of `PUBLISHERS`.
        data_dir: the folder of datasets.
        progress: called with (file name, bytes so far, total bytes if known).
        publishers: used in tests instead of `PUBLISHERS`.

    Raises DataError if a file cannot be downloaded or written, or has another checksum.
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
        return [_get_file(remote, folder, progress) for remote in publisher.files]
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written to ({error}). Make it writable, or choose "
            f"another with {OPTION}."
        ) from error


def by_hand(name: str, data_dir: Path) -> str:
    """Return instructions for downloading a dataset by hand."""
    publisher = PUBLISHERS[name]
    folder = data_dir / publisher.folder
    if publisher.manual:
        return publisher.manual.format(folder=folder)
    files = "; ".join(f"{remote.urls[0]} as {remote.name}" for remote in publisher.files)
    return f"Fetch by hand and put into {folder}: {files}."


def _get_file(remote: Remote, folder: Path, progress: Progress | None) -> Fetched:
    path = folder / remote.name
    with nullcontext() if path.exists() else locked(folder / f".{remote.name}.lock"):
        already = path.exists()  # another process may have downloaded it while this one waited
        if already:
            _check_sum(path, remote, "Move it away to fetch it again.")
        else:
            _fetch(remote, path, progress)
        return Fetched(path, path.stat().st_size, remote.checksum is not None, already)


def _fetch(remote: Remote, path: Path, progress: Progress | None) -> None:
    part = path.with_name(f"{remote.name}.part")
    failures = []
    for url in remote.urls:
        try:
            _download(url, part, remote, progress)
        except _UnreachableError as error:
            failures.append(f"{url} ({error})")
            continue
        try:
            _check_sum(part, remote, "Try again later; the publisher may have changed the file.")
        except DataError:
            part.unlink()  # resuming from wrong bytes would fail again
            raise
        part.replace(path)
        return
    raise DataError(
        f"{remote.name} cannot be fetched from {' nor '.join(failures)}. The partial file is "
        f"kept; try again to resume, or fetch it on another machine and put it at {path}."
    )


def _download(url: str, part: Path, remote: Remote, progress: Progress | None) -> None:
    """Download a file to `part`; if `part` exists, download the rest."""
    _check_url(url)
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "fedshot"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    opener = urllib.request.build_opener(_Redirects)
    try:
        with opener.open(request, timeout=_TIMEOUT) as answer:
            if done and not _continues(answer, done):
                done = 0  # the server sends the whole file
            length = natural(answer.headers.get("Content-Length") or "")
            total = None if length is None else done + length
            with part.open("ab" if done else "wb") as file:
                while chunk := answer.read(_CHUNK):
                    done += len(chunk)
                    if done > remote.at_most:
                        raise DataError(
                            f"{url} sends more than {remote.at_most} bytes, the limit for "
                            f"{remote.name}. Remove {part}; the publisher may have changed the "
                            "file."
                        )
                    file.write(chunk)
                    if progress is not None:
                        progress(remote.name, done, total)
    except urllib.error.HTTPError as error:
        if error.code == 416 and done:  # the file is complete: the checksum decides
            return
        raise _UnreachableError(f"status {error.code}") from error
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
            f"{url} is not an https address, and other downloads are not secure. Download the "
            "file by hand, and compare its checksum."
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
