"""The cache of decoded images: whole or absent, whoever is killed and whoever comes second."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fedshot.core import storage
from fedshot.core.errors import DataError
from fedshot.core.locks import locked
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset
from fedshot.data.files import cache
from fedshot.data.files.fingerprints import Fingerprints

X = np.random.default_rng(0).integers(0, 256, (40, 5, 5, 3), dtype=np.uint8)
Y = np.arange(40, dtype=np.int64) % 4
NAMES = ("a", "b", "c", "d")
SPLIT = ClassSplit((0, 1), (2,), (3,))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FEDSHOT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


class Builder:
    """A loader that counts how often it is asked."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.calls, self.seconds = 0, seconds

    def __call__(self, put) -> cache.Labels:
        self.calls += 1

        def blocks():
            for start in range(0, len(X), 7):
                time.sleep(self.seconds)
                yield X[start : start + 7]

        put(X.shape, blocks())
        return cache.Labels(Y, NAMES, SPLIT)


def build_slowly(folder: str, built) -> None:
    builder = Builder(0.05)
    cache.load_or_build("toy", "k", builder, Path(folder))
    built.put(builder.calls)


def build_forever(folder: str, begun) -> None:
    def build(put):
        def blocks():
            yield X[:7]
            begun.set()
            time.sleep(10**6)

        put(X.shape, blocks())
        return cache.Labels(Y, NAMES)

    cache.load_or_build("toy", "k", build, Path(folder))


def test_the_second_load_maps_what_the_first_one_built(folder):
    builder = Builder()
    first = cache.load_or_build("toy", "k", builder, folder)
    second = cache.load_or_build("toy", "k", builder, folder)
    assert builder.calls == 1
    for dataset in (first, second):
        assert np.array_equal(dataset.x, X)
        assert not dataset.x.flags.writeable
        assert dataset.y.tolist() == Y.tolist()
        assert dataset.class_names == NAMES
        assert dataset.standard == SPLIT
    assert isinstance(second.x.base, np.memmap)


def test_the_remembered_hash_is_the_one_that_would_be_computed(folder):
    stored = cache.load_or_build("toy", "k", Builder(), folder)
    assert stored.known_digest == Dataset("toy", X, Y, NAMES).digest == stored.digest
    assert cache.verify(stored)


def test_another_key_is_another_entry(folder):
    builder = Builder()
    for key in ("k", "l", "k"):
        cache.load_or_build("toy", key, builder, folder)
    assert builder.calls == 2


@pytest.mark.parametrize("harm", ["cut", "spoilt", "gone", "empty"])
def test_a_damaged_entry_is_built_again(folder, harm):
    for file in ("images.npy", "labels.npy", "about.json"):
        builder = Builder()
        cache.load_or_build("toy", file[:5], builder, folder)
        path = folder / f"toy-{file[:5]}" / file
        data = path.read_bytes()
        match harm:
            case "cut":
                path.write_bytes(data[:-5])
            case "spoilt":
                path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
            case "gone":
                path.unlink()
            case "empty":
                path.write_bytes(b"")
        again = cache.load_or_build("toy", file[:5], builder, folder)
        assert builder.calls == 2, file
        assert np.array_equal(again.x, X)


def test_verify_sees_a_change_that_the_quick_look_may_miss(folder):
    big = np.zeros((4000, 16, 16, 3), np.uint8)

    def build(put):
        put(big.shape, [big])
        return cache.Labels(np.zeros(4000, np.int64), ("a",))

    cache.load_or_build("toy", "k", build, folder)
    path = folder / "toy-k" / "images.npy"
    with path.open("r+b") as file:
        file.seek(128 + 6000)  # between two of the places that are looked at
        file.write(b"\1")
    assert not cache.verify(cache.load_or_build("toy", "k", build, folder))


@pytest.mark.slow
def test_two_processes_build_it_once(folder):
    context = multiprocessing.get_context("spawn")
    built = context.Queue()
    both = [context.Process(target=build_slowly, args=(str(folder), built)) for _ in range(2)]
    for process in both:
        process.start()
    assert sorted(built.get() for _ in both) == [0, 1]
    for process in both:
        process.join()
        assert process.exitcode == 0


@pytest.mark.slow
def test_a_builder_that_is_killed_leaves_nothing_that_counts(folder):
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    process = context.Process(target=build_forever, args=(str(folder), begun))
    process.start()
    assert begun.wait()
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert list(folder.glob("*.partial"))
    assert not (folder / "toy-k").exists()
    assert np.array_equal(cache.load_or_build("toy", "k", Builder(), folder).x, X)
    assert not list(folder.glob("*.partial"))


def test_what_killed_builders_of_other_entries_left_goes_and_what_the_living_write_stays(folder):
    for name in ("dead-1.77-ab.partial", "living-2.77-ab.partial"):
        (folder / name).mkdir()
        (folder / name / "images.npy").write_bytes(b"half")
    (folder / "dead-1.lock").touch()
    with locked(folder / "living-2.lock") as held:
        assert held
        cache.load_or_build("toy", "k", Builder(), folder)
        assert sorted(path.name for path in folder.iterdir()) == [
            *("living-2.77-ab.partial", "living-2.lock", "toy-k")
        ]
    cache.load_or_build("toy", "l", Builder(), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["toy-k", "toy-l"]


def hold(path: str, held, release) -> None:
    with locked(Path(path)):
        held.set()
        release.wait()


def test_a_lock_that_its_holder_removes_lets_one_in_at_a_time(folder):
    path, inside, most = folder / "x.lock", [0], [0]

    def enter(_: int) -> None:
        with locked(path) as held:
            assert held
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.002)
            inside[0] -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(enter, range(100)))
    assert most == [1]
    assert not path.exists()


@pytest.mark.slow
def test_a_lock_of_another_process_is_seen_without_waiting_and_frees_itself(folder):
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(str(folder / "x.lock"), held, release))
    process.start()
    assert held.wait()
    with locked(folder / "x.lock", wait=False) as mine:
        assert not mine
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    with locked(folder / "x.lock", wait=False) as mine:
        assert mine
    assert not (folder / "x.lock").exists()


def test_a_builder_that_fails_leaves_nothing(folder):
    def build(put):
        put(X.shape, [X[:7]])
        raise DataError("image 8 is bad")

    with pytest.raises(DataError, match="image 8 is bad"):
        cache.load_or_build("toy", "k", build, folder)
    assert list(folder.iterdir()) == []


def test_blocks_that_do_not_fill_the_array_are_no_entry(folder):
    def build(put):
        put(X.shape, [X[:7]])
        return cache.Labels(Y, NAMES)

    with pytest.raises((DataError, ValueError)):
        cache.load_or_build("toy", "k", build, folder)
    assert not (folder / "toy-k").exists()


def test_without_a_folder_to_write_to_images_are_kept_in_memory(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDSHOT_CACHE", str(tmp_path / "file" / "below"))
    dataset = cache.cached("toy", [], {}, Builder())
    assert np.array_equal(dataset.x, X)
    assert dataset.standard == SPLIT
    assert "Set $FEDSHOT_CACHE" in capsys.readouterr().err


def test_a_full_disk_is_told_with_the_fix(folder, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"No space left on device.*set \$FEDSHOT_CACHE"):
        cache.load_or_build("toy", "k", Builder(), folder)


def test_a_lock_file_that_cannot_be_opened_is_told_with_the_fix(folder):
    (folder / "toy-k.lock").mkdir()  # stands for one of another person, which root could open
    with pytest.raises(DataError, match=r"cache folder .*toy-k\.lock.*set \$FEDSHOT_CACHE"):
        cache.load_or_build("toy", "k", Builder(), folder)


def test_the_folder_is_the_option_then_xdg_then_home(monkeypatch):
    assert storage.cache_folder() == Path(os.environ["FEDSHOT_CACHE"])
    monkeypatch.delenv("FEDSHOT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert storage.cache_folder() == Path("/xdg/fedshot")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert storage.cache_folder() == Path("/home/me/.cache/fedshot")


# --- which files an entry belongs to ---


def old(path: Path, data: bytes, when: int = 1_000_000_000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (when, when))
    return path


def test_an_entry_belongs_to_contents_and_options_not_to_places(tmp_path, folder):
    builder = Builder()
    one, two = old(tmp_path / "1", b"same"), old(tmp_path / "elsewhere" / "2", b"same")
    for source, options in ((one, {}), (two, {}), (one, {"size": 3}), (one, {})):
        cache.cached("toy", [source], options, builder)
    assert builder.calls == 2
    old(one, b"else", 1_000_000_001)
    cache.cached("toy", [one], {}, builder)
    assert builder.calls == 3


@pytest.mark.parametrize("writable", [True, False])
def test_a_file_that_changes_while_it_is_decoded_is_no_entry(
    tmp_path, folder, monkeypatch, writable
):
    source = old(tmp_path / "x.zip", b"one")
    monkeypatch.setattr(cache, "writable", lambda *_: writable)

    def build(put):
        old(source, b"two", 1_000_000_001)
        return Builder()(put)

    with pytest.raises(DataError, match=r"x\.zip changed while toy was read from it\. Wait until"):
        cache.cached("toy", [source], {}, build)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []
    builder = Builder()
    cache.cached("toy", [source], {}, builder)
    assert builder.calls == 1


def test_a_hash_is_remembered_from_the_first_load_on(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSHOT_CACHE", str(tmp_path / "not" / "yet"))
    source = old(tmp_path / "x.zip", b"one")
    cache.cached("toy", [source], {}, Builder())
    monkeypatch.setattr(
        "fedshot.data.files.fingerprints.hash_file", lambda *_: pytest.fail("read again")
    )
    cache.cached("toy", [source], {}, Builder())


def test_a_changed_file_has_another_hash_and_a_fresh_one_is_not_remembered(tmp_path):
    known = tmp_path / "known.json"
    path = old(tmp_path / "x.zip", b"one")
    first = Fingerprints(known).of(path)
    old(path, b"two", 1_000_000_001)
    assert Fingerprints(known).of(path) != first
    remembered = known.read_text()
    (tmp_path / "fresh.zip").write_bytes(b"just now")
    Fingerprints(known).of(tmp_path / "fresh.zip")
    assert known.read_text() == remembered


def test_a_folder_has_the_hash_of_its_names_and_contents(tmp_path):
    for name in ("a", "b"):
        old(tmp_path / name / "cat" / "1.png", b"cat")
        old(tmp_path / name / "dog" / "1.png", b"dog")
    known = Fingerprints(tmp_path / "known.json")
    assert known.of(tmp_path / "a") == known.of(tmp_path / "b")
    (tmp_path / "b" / "dog" / "1.png").rename(tmp_path / "b" / "dog" / "2.png")
    assert known.of(tmp_path / "a") != known.of(tmp_path / "b")


@pytest.mark.parametrize("text", ["", "[]", '{"x": 3}', "nonsense"])
def test_a_spoilt_memory_of_hashes_is_forgotten(tmp_path, text):
    known = tmp_path / "known.json"
    known.write_text(text)
    path = old(tmp_path / "x.zip", b"one")
    assert Fingerprints(known).of(path) == Fingerprints(tmp_path / "none.json").of(path)
    assert isinstance(json.loads(known.read_text()), dict)
