"""Reading members of archives: from several threads, and without trusting what headers claim."""

from __future__ import annotations

import io
import struct
import tarfile
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedshot.data.archives import opened
from fedshot.errors import DataError


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


def test_a_zip_that_holds_more_than_it_says_is_not_unpacked_in_one_go(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("a.png", bytes(50_000_000))
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<I", 50_000_000), struct.pack("<I", 100)))
    tracemalloc.start()
    with opened(path) as archive, pytest.raises(DataError, match=r"bomb\.zip"):
        archive.read("a.png")
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_a_zip_packed_in_another_way_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as made:
        made.writestr("a.png", b"x")
    with opened(path) as archive, pytest.raises(DataError, match="ordinary zip"):
        archive.read("a.png")
