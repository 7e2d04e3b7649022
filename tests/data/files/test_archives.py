"""Reading members of archives: from several threads, and without trusting what headers claim."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedshot.core.errors import DataError
from fedshot.data.files import bounded
from fedshot.data.files.archives import opened
from fedshot.data.sources.news import messages
from traced_memory import memory_below


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_threads_read_a_tar_without_mixing_its_members(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("many.tar.gz" if mode == "w:gz" else "many.tar")
    contents = {f"c{i % 5}/{i}.bin": bytes([i % 256]) * (700 + i) for i in range(200)}
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with opened(path) as archive, ThreadPoolExecutor(8) as pool:
        names = archive.names * 4
        for name, data in zip(names, pool.map(archive.read, names), strict=True):
            assert data == contents[name]


def test_a_tar_packed_from_where_one_stands_has_the_same_names(tmp_path: Path) -> None:
    path = tmp_path / "here.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("./b/2.png", "./a/1.png", "./.hidden/3.png"):
            tar.addfile(tarfile.TarInfo(name))
    with opened(path) as archive:
        assert archive.names == ["a/1.png", "b/2.png"]


def test_a_zip_that_holds_more_than_it_says_is_not_unpacked_in_one_go(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("a.png", bytes(50_000_000))
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<I", 50_000_000), struct.pack("<I", 100)))
    with (
        memory_below(5_000_000),
        opened(path) as archive,
        pytest.raises(DataError, match=r"bomb\.zip"),
    ):
        archive.read("a.png")


def test_a_zip_packed_in_another_way_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as made:
        made.writestr("a.png", b"x")
    with opened(path) as archive, pytest.raises(DataError, match="ordinary zip"):
        archive.read("a.png")


# --- what stands before a member of a tar ---


def head(kind: bytes, size: int, name: str = "a.png") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def record(kind: bytes, data: bytes) -> bytes:
    return head(kind, len(data)) + data + bytes(-len(data) % 512)


def attribute(name: str, value: str) -> bytes:
    body = f" {name}={value}\n".encode()
    n = next(n for n in range(len(body), len(body) + 9) if len(str(n)) + len(body) == n)
    return f"{n}".encode() + body


FILE = head(tarfile.REGTYPE, 0)
MANY = 20_000_000
# The length of each record is told as shorter than it is: each name then runs to the only "=".
NESTED = b"5 aa\n" * 20_000 + b"="
HOLES = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}


@pytest.mark.parametrize(
    "harm",
    [
        lambda: record(tarfile.GNUTYPE_LONGNAME, b"a" * MANY) + FILE,
        lambda: record(tarfile.GNUTYPE_LONGLINK, b"a" * MANY) + FILE,
        lambda: record(tarfile.XHDTYPE, attribute("comment", "a" * MANY)) + FILE,
        lambda: record(tarfile.XGLTYPE, attribute("comment", "a" * MANY)) + FILE,
        lambda: record(tarfile.XHDTYPE, NESTED) + FILE,
        lambda: (
            record(tarfile.XHDTYPE, b"".join(attribute(n, v) for n, v in HOLES.items()))
            + record(tarfile.REGTYPE, b"4000000\n" + b"0\n" * (MANY // 2))
        ),
        lambda: record(tarfile.GNUTYPE_LONGNAME, b"a") * 100 + FILE,
        lambda: head(tarfile.GNUTYPE_LONGNAME, 1 << 40) + bytes(MANY),
        lambda: head(tarfile.GNUTYPE_LONGNAME, -512) + bytes(MANY),
    ],
)
def test_records_before_a_member_of_a_tar_are_not_read_without_limit(
    tmp_path: Path, harm: Callable[[], bytes]
) -> None:
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(harm() + bytes(1024), 1))
    said = (
        r"bomb\.tar\.gz has a member with a header of more than 16384 bytes.*pack the files again"
    )
    for reader in (opened, messages):  # by a context, and by a loop over all members
        with memory_below(1_000_000), pytest.raises(DataError, match=said), reader(path):
            pass


def test_attributes_for_all_members_of_a_tar_are_not_kept_for_each(tmp_path: Path) -> None:
    path = tmp_path / "many.tar.gz"
    every = b"".join(attribute(f"aa{i}", "") for i in range(1000))
    members = [
        record(tarfile.XGLTYPE, every.replace(b"aa", f"{i}".encode()))
        + head(tarfile.REGTYPE, 0, f"{i}.png")
        for i in range(10, 25)
    ]
    path.write_bytes(gzip.compress(b"".join(members) + bytes(1024), 1))
    with memory_below(1_500_000), opened(path) as archive:
        assert len(archive.names) == 15


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda data: data[: 2 * len(FILE)], "after 1024 bytes: empty header"),
        (lambda data: data[: 2 * len(FILE) + 9], "after 1024 bytes: truncated header"),
        (lambda data: data.replace(b"1.png", b"7.png"), "after 512 bytes: bad checksum"),
        (lambda data: data.replace(FILE, b"x" * 512), "after 1024 bytes: invalid header"),
    ],
)
def test_a_tar_does_not_end_at_a_damaged_header(
    tmp_path: Path, harm: Callable[[bytes], bytes], said: str
) -> None:
    data = b"".join(head(tarfile.REGTYPE, 0, name) for name in ("0.png", "1.png", "a.png"))
    path = tmp_path / "harmed.tar"
    path.write_bytes(harm(data + bytes(1024)))
    with pytest.raises(DataError, match=said), opened(path):
        pass


def test_members_of_a_tar_without_end_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("fedshot.data.files.tars._HEADERS", 100_000)
    path = tmp_path / "endless.tar.gz"
    path.write_bytes(gzip.compress(b"".join(head(b"0", 0, f"{i}.png") for i in range(300)), 1))
    said = r"endless\.tar\.gz has more than 100000 bytes of headers"
    with pytest.raises(DataError, match=said), opened(path):
        pass


def test_a_tar_that_unpacks_to_far_more_than_its_size_is_not_gone_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "_FREE", 1 << 20)
    path = tmp_path / "bomb.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in ("a.bin", "b.png"):
            info = tarfile.TarInfo(name)
            info.size = 20_000_000
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    with pytest.raises(DataError, match="unpacks to more than"), opened(path) as archive:
        archive.read("b.png")


@pytest.mark.parametrize("name", ["pipe.zip", "pipe.tar.gz", "pipe.tar"])
def test_a_pipe_in_place_of_an_archive_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="not a regular file"), opened(tmp_path / name):
        pass


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".zip"])
def test_a_name_that_is_there_twice_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"twice{suffix}"
    if suffix == ".zip":
        with zipfile.ZipFile(path, "w") as made:
            made.writestr("a.png", b"1")
            made.writestr("a.png", b"2")
    else:
        content = FILE * 2 + bytes(1024)
        path.write_bytes(gzip.compress(content) if suffix == ".tar.gz" else content)
    said = rf"twice\{suffix} holds 'a\.png' twice. Fetch or write"
    with pytest.raises(DataError, match=said), opened(path):
        pass


def test_a_member_that_lies_about_its_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.tar"
    path.write_bytes(record(tarfile.REGTYPE, b"1" * 1000)[:-600])
    for content in (path.read_bytes(), head(tarfile.REGTYPE, -512) + bytes(1024)):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"short\.tar"), opened(path) as archive:
            archive.read("a.png")


def test_holes_in_a_member_of_a_tar_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "holes.tar"
    sparse = b"".join(attribute(n, v) for n, v in HOLES.items())
    map_of_one = record(tarfile.REGTYPE, b"1\n0\n0\n" + bytes(506))
    path.write_bytes(record(tarfile.XHDTYPE, sparse) + map_of_one + bytes(1024))
    said = r"'a\.png' is a link or device, or has holes"
    with pytest.raises(DataError, match=said), opened(path):
        pass
