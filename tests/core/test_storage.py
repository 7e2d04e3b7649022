"""Storage: whole or not at all, and never believed without its hash."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedshot.core import regular_files, storage, tree
from fedshot.core.errors import CheckpointError
from fedshot.nn.optim import OptState

CONTENT = {
    "w": torch.tensor([[1.0, -0.0], [float("nan"), float("inf")]]),
    "state": OptState(torch.tensor(7), {"m": torch.ones(2).double()}, {}),
    "pair": (torch.tensor([True, False]), torch.zeros(0, 3, dtype=torch.uint8)),
}
NOTES = {"round": 3, "text": "ä → /", "list": [1, 2.5, None]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


@pytest.mark.parametrize("sync", [True, False])
def test_what_is_written_is_read_to_the_bit(path: Path, sync: bool) -> None:
    sha = storage.write(path, CONTENT, NOTES, sync=sync)
    flat, notes, found = storage.read(path)
    assert tree.digest(tree.rebuild(CONTENT, flat)) == tree.digest(CONTENT)
    assert (notes, found) == (NOTES, sha)
    assert list(path.parent.iterdir()) == [path]


def test_values_are_read_into_the_tensors_themselves(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that reading takes the memory of one copy, not of two."""
    storage.write(path, {"a": torch.ones(2000), "b": torch.ones(3000)}, sync=False)
    sizes: list[int] = []

    class File(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            sizes.append(len(data))
            return data

    monkeypatch.setattr(storage, "open_regular", lambda path: File(io.FileIO(path)))
    flat, _, _ = storage.read(path)
    assert [float(leaf.sum()) for leaf in flat.values()] == [2000.0, 3000.0]
    assert sizes == [8, path.stat().st_size - 8 - 4 * 5000]  # the header


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hnp.arrays(
        st.sampled_from(["f4", "f8", "f2", "i8", "i4", "u1", "?"]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    )
)
def test_every_type_and_shape_round_trips(path: Path, array: np.ndarray) -> None:
    leaf = torch.from_numpy(array)
    storage.write(path, {"x": leaf}, sync=False)
    flat, _, _ = storage.read(path)
    assert tree.digest(flat["x"]) == tree.digest(leaf)


@pytest.mark.parametrize("empty", [{}, (), {"a": {}}])
def test_an_empty_tree_round_trips(path: Path, empty: Any) -> None:
    storage.write(path, empty, {"round": 0}, sync=False)
    flat, notes, _ = storage.read(path)
    assert tree.rebuild(empty, flat) == empty
    assert notes == {"round": 0}


def test_views_and_repeated_tensors_round_trip(path: Path) -> None:
    """Leaves may be pieces of one memory, or the same tensor twice."""
    block = torch.arange(12.0).reshape(3, 4)
    content = {
        "row": block[0],
        "same": block[0],
        "column": block[:, 1],
        "wide": torch.ones(1).expand(4),
        "pixels": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }
    storage.write(path, content, sync=False)
    flat, _, _ = storage.read(path)
    assert tree.digest(flat) == tree.digest(content)


def test_gradients_do_not_matter(path: Path) -> None:
    storage.write(path, {"w": torch.ones(2, requires_grad=True)}, sync=False)
    assert not storage.read(path)[0]["w"].requires_grad


def test_the_hash_is_of_content_and_notes(path: Path) -> None:
    w = torch.ones(2)
    hashes = [
        storage.write(path, {"w": w}, {"round": 1}, sync=False),
        storage.write(path, {"w": w}, {"round": 2}, sync=False),
        storage.write(path, {"w": 2 * w}, {"round": 1}, sync=False),
        storage.write(path, {"v": w}, {"round": 1}, sync=False),
    ]
    assert len(set(hashes)) == 4
    assert storage.write(path, {"w": w}, {"round": 1}, sync=False) == hashes[0]


def test_equal_content_is_equal_bytes(path: Path) -> None:
    written = set()
    for _ in range(20):
        storage.write(path, CONTENT, NOTES, sync=False)
        written.add(path.read_bytes())
    assert len(written) == 1


def test_reading_keeps_nothing(path: Path) -> None:
    storage.write(path, {f"layer {i}": torch.ones(3) for i in range(19)}, NOTES, sync=False)
    for _ in range(5):
        storage.read(path)
    grown = []
    for _ in range(3):  # what else the interpreter keeps comes now and then
        before = sys.getallocatedblocks()
        for _ in range(100):
            storage.read(path)
        grown.append(sys.getallocatedblocks() - before)
    assert min(grown) < 100  # two for each tensor and read would be 3800


def test_what_is_read_begins_where_torch_lets_its_own_begin(path: Path) -> None:
    storage.write(path, {"a": torch.ones(3), "b": torch.ones(5, dtype=torch.uint8)}, sync=False)
    flat, _, _ = storage.read(path)
    assert all(leaf.data_ptr() % 64 == 0 for leaf in flat.values())


def hash_of(flat: dict[str, torch.Tensor], notes: str) -> str:
    """Return the hash that a file must hold, computed from its definition."""
    sha = hashlib.sha256()
    for name, leaf in sorted(flat.items()):
        sha.update(f"{name}:{str(leaf.dtype)[6:]}{list(leaf.shape)};".encode())
        sha.update(leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashlib.sha256((sha.hexdigest() + notes).encode()).hexdigest()


def test_files_agree_with_the_library_of_safetensors(path: Path) -> None:
    """It reads what `write` writes; `read` reads its files if they hold a hash."""
    theirs_too = safetensors.torch._TYPES.values()  # older versions lack some
    dtypes = [dtype for dtype in storage._DTYPES.values() if dtype in theirs_too]
    assert torch.float32 in dtypes
    flat = {f"Leaf {i}": torch.arange(1 + i).to(dtype) for i, dtype in enumerate(dtypes)}
    sha = storage.write(path, flat, NOTES, sync=False)
    theirs = load_file(path)
    assert tree.digest(theirs) == tree.digest(flat)
    assert {name: leaf.dtype for name, leaf in theirs.items()} == dict(
        zip(flat, dtypes, strict=True)
    )
    notes = json.dumps(NOTES, sort_keys=True)
    assert sha == hash_of(flat, notes)
    save_file(flat, path, {"notes": notes, "sha256": sha})
    again, found, _ = storage.read(path)
    assert tree.digest(again) == tree.digest(flat)
    assert found == NOTES


def test_a_type_that_no_file_can_hold_is_refused(path: Path) -> None:
    with pytest.raises(TypeError, match=r"^w is torch.complex128, which safetensors files cannot"):
        storage.write(path, {"w": torch.ones(1, dtype=torch.complex128)}, sync=False)
    assert not path.exists()


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        storage.read(path)
    assert str(error.value) == f"{path} does not exist"


def damaged(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        storage.read(path)
    assert str(error.value).startswith(f"{path} is damaged: ")
    return str(error.value)


def test_a_file_cut_short_anywhere_is_refused(path: Path) -> None:
    storage.write(path, {"w": torch.arange(5.0)}, {"round": 1}, sync=False)
    whole = path.read_bytes()
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        damaged(path)
    path.write_bytes(whole)
    storage.read(path)


def test_bytes_behind_the_end_are_refused(path: Path) -> None:
    storage.write(path, CONTENT, NOTES, sync=False)
    path.write_bytes(path.read_bytes() + b"\0")
    damaged(path)


ENTRY: dict[str, Any] = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "header",
    [
        "[]", "3", "{", '{"w": 3}', pytest.param("[" * 10_000, id="deep"),
        '{"w": {"dtype": "U8"}}', "\xff",
        *(json.dumps({"w": ENTRY | change}) for change in (
            {"dtype": "U9"}, {"dtype": ["U8"]}, {"dtype": None}, {"dtype": "F32"},
            {"shape": 4}, {"shape": [5]}, {"shape": [-4]}, {"shape": [-2, -2]}, {"shape": [4.0]},
            {"shape": ["4"]}, {"shape": [0, 10**30]}, {"shape": [10**9] * 9},
            {"shape": [0, 10**30], "data_offsets": [0, 0]}, {"shape": None},
            {"data_offsets": [0]}, {"data_offsets": [0, 5]}, {"data_offsets": [-1, 3]},
            {"data_offsets": ["0", "4"]}, {"data_offsets": "04"}, {"data_offsets": None},
            {"shape": [3], "data_offsets": [1, 4]}, {"shape": [3], "data_offsets": [0, 3]},
            {"shape": [10**15], "data_offsets": [0, 10**15]},
        )),
        json.dumps({"v": ENTRY, "w": ENTRY}),
        json.dumps({"w": ENTRY, "__metadata__": 3}),
        json.dumps({"w": ENTRY, "__metadata__": {"sha256": "0", "notes": 3}}),
        json.dumps({"\ud800": ENTRY, "__metadata__": {"sha256": "0"}}),
        json.dumps({"w": ENTRY, "__metadata__": {"sha256": "0", "notes": "\ud800"}}),
        json.dumps({"w": ENTRY, "__metadata__": {"sha256": 0}}),
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_the_file_is_damage(path: Path, header: str) -> None:
    data = header.encode("latin-1")
    path.write_bytes(len(data).to_bytes(8, "little") + data + b"\0\1\0\1")
    damaged(path)


@pytest.mark.parametrize("bit", [0, 5])
def test_a_flipped_bit_anywhere_is_refused(path: Path, bit: int) -> None:
    storage.write(path, {"w": torch.arange(5.0), "v": torch.tensor(1)}, {"r": "ä"}, sync=False)
    whole = path.read_bytes()
    for i in range(len(whole)):
        flipped = bytearray(whole)
        flipped[i] ^= 1 << bit
        path.write_bytes(bytes(flipped))
        damaged(path)


def test_edited_notes_are_refused(path: Path) -> None:
    storage.write(path, {"w": torch.ones(2)}, {"round": 1}, sync=False)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    save_file(load_file(path), path, metadata=header | {"notes": '{"round": 2}'})
    assert damaged(path).endswith("its content differs from the hash inside it")


def test_a_file_of_somebody_else_is_refused(path: Path) -> None:
    save_file({"w": torch.ones(2)}, path)
    assert "was not written by `fedshot.core.storage.write`" in damaged(path)


def test_a_pickle_is_never_opened(path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(path.parent / "exploded"),)

    path.write_bytes(pickle.dumps(Bomb()))
    damaged(path)
    torch.save({"w": Bomb()}, path)
    damaged(path)
    assert not (path.parent / "exploded").exists()


def test_a_process_that_dies_while_writing_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write(path, {"w": torch.ones(2)}, {"round": 1}, sync=True)

    def die(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        storage.write(path, {"w": torch.zeros(2)}, {"round": 2}, sync=True)
    monkeypatch.undo()
    assert storage.read(path)[1] == {"round": 1}
    assert list(path.parent.iterdir()) == [path]


def test_processes_may_write_one_file_at_a_time(path: Path) -> None:
    """Each of them writes beside the file under a name of its own; who is last has it."""
    with ThreadPoolExecutor(8) as pool:
        done = [
            pool.submit(storage.write_bytes, path, bytes([n]) * 100_000, sync=False)
            for n in range(64)
        ]
        held = [path.read_bytes() for _ in range(200) if path.exists()]
    for one in done:
        one.result()
    assert all(len(data) == 100_000 and len(set(data)) == 1 for data in held)
    assert list(path.parent.iterdir()) == [path]


def test_names_that_look_alike_are_kept_apart_by_the_hash(path: Path) -> None:
    """A name may hold any sign but '/'."""
    hashes = {
        storage.write(path, {"a": {"b": torch.tensor(x)}, "a>b": torch.tensor(y)}, sync=False)
        for x in (0, 1)
        for y in (0, 1)
    }
    assert len(hashes) == 4
    storage.read(path)


def test_what_is_no_file_is_written_to_and_a_link_stays_one(tmp_path: Path) -> None:
    pipe, target, link = (tmp_path / name for name in ("pipe", "target", "link"))
    os.mkfifo(pipe)
    link.symlink_to(target)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        storage.deliver(pipe, b"through")
        assert read.result() == b"through"
    assert pipe.is_fifo()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="symbolic links"):
        storage.deliver(loop, b"data")
    assert loop.is_symlink()
    target.write_bytes(b"old")
    storage.deliver(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_disk_that_fails_is_named_and_nothing_is_left(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        storage.write_bytes(path, b"data", sync=True)
    assert raised.value.filename == str(path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.slow
def test_a_standard_stream_is_written_to_behind_what_is_there(tmp_path: Path) -> None:
    """It may be a file that the shell has opened to be added to."""
    code = (
        "from pathlib import Path; from fedshot.core import storage;"
        "storage.deliver(Path('/dev/stdout'), b'table\\n'); print('told')"
    )
    log = tmp_path / "log"
    log.write_text("precious\n", encoding="utf-8")
    with log.open("ab") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert log.read_text(encoding="utf-8") == "precious\ntable\ntold\n"


def test_a_regular_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert regular_files.read_regular(tmp_path / "a", 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, more than 4") as error:
        regular_files.read_regular(tmp_path / "a", 4)
    assert error.value.errno == errno.EFBIG


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, code in (("pipe", errno.EINVAL), ("device", errno.EINVAL), (".", errno.EISDIR)):
        with pytest.raises(OSError, match="it is not a regular file") as error:
            regular_files.open_regular(tmp_path / name)
        assert error.value.errno == code
    with pytest.raises(FileNotFoundError):
        regular_files.open_regular(tmp_path / "none")


@pytest.mark.parametrize(("n", "offered", "single"), [(3, True, 3), (40, True, 0), (40, False, 40)])
def test_many_files_are_flushed_at_once_where_the_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, offered: bool, single: int
) -> None:
    paths = [tmp_path / str(i) for i in range(n)]
    for path in paths:
        path.write_bytes(b"x")
    flushed: list[Path] = []
    monkeypatch.setattr(storage, "flush", flushed.append)
    monkeypatch.setattr(storage, "_flush_file_system", lambda _: offered)
    storage.flush_all(paths, tmp_path)
    assert flushed == paths[:single]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux flushes one file system")
def test_linux_flushes_a_file_system(tmp_path: Path) -> None:
    assert storage._flush_file_system(tmp_path)
