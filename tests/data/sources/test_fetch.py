"""Downloads against a server on this machine that breaks, lies and redirects."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pydantic import TypeAdapter, ValidationError

from fedshot.core.errors import DataError
from fedshot.data.sources.fetch import by_hand, get
from fedshot.data.sources.publishers import PUBLISHERS, Publisher, Remote

BODY = bytes(range(256)) * 4000
MD5 = f"md5:{hashlib.md5(BODY, usedforsecurity=False).hexdigest()}"
SHA = f"sha256:{hashlib.sha256(BODY).hexdigest()}"


class Server:
    """What the handler looks at: how much to send before breaking, and what was asked."""

    def __init__(self) -> None:
        self.break_after: int | None = None
        self.ranges = True
        self.asked: list[str | None] = []
        self.slowly = 0.0  # seconds between two pieces
        self.url = ""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            state.asked.append(asked)
            if self.path == "/away":
                self.send_response(302)
                self.send_header("Location", "http://example.invalid/file")
                self.end_headers()
                return
            if self.path == "/file-scheme":
                self.send_response(302)
                self.send_header("Location", "ftp://127.0.0.1/etc/passwd")
                self.end_headers()
                return
            if self.path == "/here":
                self.send_response(302)
                self.send_header("Location", "/file")
                self.end_headers()
                return
            if self.path != "/file":
                self.send_error(404)
                return
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and state.ranges else 0
            if start >= len(BODY):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(BODY) - 1}/{len(BODY)}")
            self.send_header("Content-Length", str(len(BODY) - start))
            self.end_headers()
            end = len(BODY) if state.break_after is None else start + state.break_after
            for at in range(start, end, 1 << 18):
                self.wfile.write(BODY[at : min(end, at + (1 << 18))])
                time.sleep(state.slowly)

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield state
    http.shutdown()
    http.server_close()
    thread.join()


def one(*urls: str, checksum: str | None = MD5, at_most: int = 1 << 21) -> dict[str, Publisher]:
    return {"toy": Publisher("toy", (Remote("a.zip", urls, at_most, checksum),))}


@pytest.mark.parametrize("checksum", [MD5, SHA, None])
def test_a_file_arrives_whole_and_checked(server, tmp_path, checksum):
    seen: list[tuple[str, int, int | None]] = []
    got = get(
        "toy",
        tmp_path,
        lambda *args: seen.append(args),
        one(f"{server.url}/file", checksum=checksum),
    )
    assert (tmp_path / "toy" / "a.zip").read_bytes() == BODY
    assert [path.name for path in (tmp_path / "toy").iterdir()] == ["a.zip"]
    assert seen[-1] == ("a.zip", len(BODY), len(BODY))
    assert (got[0].size, got[0].verified, got[0].already) == (
        len(BODY),
        checksum is not None,
        False,
    )


def test_a_broken_download_goes_on_where_it_stopped(server, tmp_path):
    server.break_after = 300_000
    for _ in range(3):
        with pytest.raises(DataError, match="The partial file is kept"):
            get("toy", tmp_path, publishers=one(f"{server.url}/file"))
    assert not (tmp_path / "toy" / "a.zip").exists()
    get("toy", tmp_path, publishers=one(f"{server.url}/file"))
    assert (tmp_path / "toy" / "a.zip").read_bytes() == BODY
    assert server.asked == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_a_server_that_cannot_resume_sends_all_of_it_again(server, tmp_path):
    server.ranges = False
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "a.zip.part").write_bytes(b"old beginning")
    get("toy", tmp_path, publishers=one(f"{server.url}/file"))
    assert (tmp_path / "toy" / "a.zip").read_bytes() == BODY


def test_a_download_that_was_complete_but_not_renamed_is_finished(server, tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "a.zip.part").write_bytes(BODY)
    get("toy", tmp_path, publishers=one(f"{server.url}/file"))
    assert (tmp_path / "toy" / "a.zip").read_bytes() == BODY


def test_a_wrong_checksum_is_refused_and_the_bytes_are_dropped(server, tmp_path):
    with pytest.raises(DataError, match=r"a\.zip\.part has md5 \w+, expected 0000"):
        get("toy", tmp_path, publishers=one(f"{server.url}/file", checksum="md5:0000"))
    assert list((tmp_path / "toy").iterdir()) == []


def test_a_file_in_place_is_checked_and_not_fetched_again(server, tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "a.zip").write_bytes(BODY)
    assert get("toy", tmp_path, publishers=one(f"{server.url}/file"))[0].already
    assert server.asked == []
    (tmp_path / "toy" / "a.zip").write_bytes(BODY[1:])
    with pytest.raises(DataError, match=r"a\.zip has md5 .*Move it away to fetch it again"):
        get("toy", tmp_path, publishers=one(f"{server.url}/file"))


def test_more_bytes_than_the_file_has_are_refused(server, tmp_path):
    with pytest.raises(DataError, match=r"sends more than 1000 bytes"):
        get("toy", tmp_path, publishers=one(f"{server.url}/file", at_most=1000))
    assert not (tmp_path / "toy" / "a.zip").exists()


@pytest.mark.parametrize("path", ["away", "file-scheme"])
def test_a_redirect_away_from_https_is_refused(server, tmp_path, path):
    with pytest.raises(DataError, match="is not an https address"):
        get("toy", tmp_path, publishers=one(f"{server.url}/{path}"))


def test_a_redirect_on_this_machine_is_followed(server, tmp_path):
    get("toy", tmp_path, publishers=one(f"{server.url}/here"))
    assert (tmp_path / "toy" / "a.zip").read_bytes() == BODY


@pytest.mark.parametrize("url", ["http://example.org/x", "file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_only_https_is_used(tmp_path, url):
    with pytest.raises(DataError, match="is not an https address"):
        get("toy", tmp_path, publishers=one(url))


def test_the_second_address_serves_when_the_first_fails(server, tmp_path):
    get("toy", tmp_path, publishers=one(f"{server.url}/none", f"{server.url}/file"))
    assert (tmp_path / "toy" / "a.zip").read_bytes() == BODY


def test_without_a_network_the_place_of_the_file_is_told(tmp_path):
    with pytest.raises(DataError) as caught:
        get("toy", tmp_path, publishers=one("http://127.0.0.1:9/file"))
    assert "cannot be fetched from http://127.0.0.1:9/file" in str(caught.value)
    assert f"put it at {tmp_path / 'toy' / 'a.zip'}" in str(caught.value)


def test_two_who_want_the_same_file_fetch_it_once(server, tmp_path):
    server.slowly = 0.1

    def fetch(_: int) -> bool:
        (got,) = get("toy", tmp_path, publishers=one(f"{server.url}/file"))
        assert (got.size, got.verified) == (len(BODY), True)
        return got.already

    with ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(fetch, range(3))) == [False, True, True]
    assert server.asked == [None]
    assert (tmp_path / "toy" / "a.zip").read_bytes() == BODY
    assert [path.name for path in (tmp_path / "toy").iterdir()] == ["a.zip"]


def fetch_slowly(folder: str, url: str, begun) -> None:
    get("toy", Path(folder), lambda *_: begun.set(), one(f"{url}/file"))


@pytest.mark.slow
def test_a_download_that_is_killed_keeps_nobody_out(server, tmp_path):
    server.slowly = 0.5
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    process = context.Process(target=fetch_slowly, args=(str(tmp_path), server.url, begun))
    process.start()
    assert begun.wait()
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "toy" / "a.zip").exists()
    server.slowly = 0.0
    get("toy", tmp_path, publishers=one(f"{server.url}/file"))
    assert (tmp_path / "toy" / "a.zip").read_bytes() == BODY


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "toy").write_text("in the way")
    with pytest.raises(DataError, match=r"toy cannot be written to .*another with --data-dir"):
        get("toy", tmp_path, publishers=one("http://127.0.0.1:9/file"))


def test_where_a_person_must_click_it_says_what_goes_where(tmp_path):
    with pytest.raises(DataError, match=rf"image-net\.org.*into {tmp_path}/miniimagenet"):
        get("mini_imagenet", tmp_path)
    assert str(tmp_path / "cifar100") in by_hand("cifar100", tmp_path)
    with pytest.raises(DataError, match="no publisher is known for 'cifar'"):
        get("cifar", tmp_path)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"licences": "MIT"}, r"one\.licences"),
        ({"complete": {"examples": 1, "classes": 1, "n": 1}}, r"one\.complete\.n"),
        ({"files": [{"name": "a", "urls": [], "at_most": 1, "md5": "0"}]}, r"one\.files\.0\.md5"),
    ],
)
def test_an_unknown_key_of_a_publisher_is_an_error(entry, said):
    table = TypeAdapter(dict[str, Publisher])
    with pytest.raises(ValidationError, match=said):
        table.validate_python({"one": {"folder": "one", **entry}})


def test_every_publisher_has_files_over_https_with_checksums_or_words_for_a_person():
    for publisher in PUBLISHERS.values():
        assert bool(publisher.files) != bool(publisher.manual)
        if publisher.manual:
            assert "{folder}" in publisher.manual
        for remote in publisher.files:
            assert all(urlsplit(url).scheme == "https" for url in remote.urls)
            kind, digest = (remote.checksum or "").split(":")
            assert len(digest) == {"md5": 32, "sha256": 64}[kind]
