"""CIFAR in the layouts people have it in, and its pickles without running them."""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import re
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedshot.core.errors import DataError
from fedshot.data.files import pickled
from fedshot.data.files.archives import opened
from fedshot.data.sources.cifar import CIFAR10, Cifar10, Cifar100
from fedshot.data.sources.splits.published import packaged
from traced_memory import memory_below

pytestmark = pytest.mark.usefixtures("empty_cache")

FINE = tuple(packaged("cifar100")["classes"])


def image(c: int, i: int) -> np.ndarray:
    return np.random.default_rng(1000 * c + i).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()


def short(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode("latin-1")


def batch(images: np.ndarray, label: str, labels: list[int], files: list[str]) -> bytes:
    """Return a batch as Python 2 wrote it: this is the layout of the published files."""
    data = images.transpose(0, 3, 1, 2).reshape(len(images), -1).tobytes()
    n = len(images).to_bytes(4, "little")
    return b"".join(
        [
            b"\x80\x02}q\x01(",
            short("data"),
            b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85U\x01b\x87Rq\x04",
            b"(K\x01J" + n + b"M\x00\x0c\x86cnumpy\ndtype\nq\x05U\x02u1K\x00K\x01\x87Rq\x06",
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89",
            b"T" + len(data).to_bytes(4, "little") + data + b"tb",
            short(label) + b"](" + b"".join(b"K" + bytes([c]) for c in labels) + b"e",
            short("filenames") + b"](" + b"".join(map(short, files)) + b"eu.",
        ]
    )


def meta(key: str, names: tuple[str, ...]) -> bytes:
    return b"\x80\x02}" + short(key) + b"](" + b"".join(map(short, names)) + b"es."


def cifar100_files() -> dict[str, bytes]:
    """Return one training and one test image of each class, training images in reverse order."""
    order = list(reversed(range(100)))
    train = np.stack([image(c, 0) for c in order])
    test = np.stack([image(c, 1) for c in range(100)])
    return {
        "meta": meta("fine_label_names", FINE),
        "train": batch(train, "fine_labels", order, [f"{c}_0.png" for c in order]),
        "test": batch(test, "fine_labels", list(range(100)), [f"{c}_1.png" for c in range(100)]),
    }


def write_tar(path: Path, files: dict[str, bytes], folder: str = "cifar-100-python") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.fixture(scope="module")
def pngs() -> dict[str, bytes]:
    return {
        f"{part}/{name}/{c}_{i}.png": png(image(c, i))
        for c, name in enumerate(FINE)
        for i, part in enumerate(("train", "test"))
    }


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_pickles_folders_and_zips_of_the_same_images_are_the_same_dataset(tmp_path, pngs):
    files = cifar100_files()
    write_tar(tmp_path / "1" / "cifar100" / "cifar-100-python.tar.gz", files)
    (tmp_path / "2" / "cifar100" / "cifar-100-python").mkdir(parents=True)
    for name, data in files.items():
        (tmp_path / "2" / "cifar100" / "cifar-100-python" / name).write_bytes(data)
    write_zip(tmp_path / "3" / "cifar100" / "any.zip", {f"cifar/{n}": d for n, d in pngs.items()})
    for name, data in pngs.items():
        path = tmp_path / "4" / "cifar100" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    sets = [Cifar100().load(tmp_path / which) for which in "1234"]
    for dataset in sets:
        assert dataset.shape == (32, 32, 3)
        assert dataset.y.tolist() == [c for c in range(100) for _ in range(2)]
        assert np.array_equal(dataset.x[7], image(3, 1))
    assert len({dataset.digest for dataset in sets}) == 1


def test_both_splits_come_with_fedshot(tmp_path, pngs):
    write_zip(tmp_path / "cifar100" / "any.zip", pngs)
    for variant, counts in (("fc100", [60, 20, 20]), ("cifar_fs", [64, 16, 20])):
        source = Cifar100(variant)
        dataset = source.load(tmp_path)
        split = dataset.standard
        assert dataset.name == variant
        assert split is not None
        assert [len(p) for p in (split.base, split.validation, split.novel)] == counts


def test_fc100_parts_share_no_superclass():
    split = packaged("cifar100")["fc100"]
    coarse = {  # the publisher's superclasses of one class from each part, spelled out
        "aquatic_mammals": {"beaver", "dolphin", "otter", "seal", "whale"},
        "vehicles_1": {"bicycle", "bus", "motorcycle", "pickup_truck", "train"},
        "large_carnivores": {"bear", "leopard", "lion", "tiger", "wolf"},
    }
    for members in coarse.values():
        assert sum(members <= set(part) for part in split.values()) == 1


def test_split_files_beside_the_data_win_and_must_be_whole(tmp_path, pngs):
    write_zip(tmp_path / "cifar100" / "any.zip", pngs)
    folder = tmp_path / "cifar100" / "splits"
    folder.mkdir()
    parts = {"train": FINE[:60], "val": FINE[60:80], "test": FINE[80:]}
    for part, names in parts.items():
        (folder / f"fc100_{part}.txt").write_text("\n".join(names))
    split = Cifar100().load(tmp_path).standard
    assert split is not None
    assert split.base == tuple(range(60))
    (folder / "fc100_val.txt").write_text("\n".join(FINE[60:79]))
    with pytest.raises(DataError, match=r"fc100_val\.txt lists 19 validation classes; expected 20"):
        Cifar100().load(tmp_path)
    (folder / "fc100_val.txt").unlink()
    with pytest.raises(DataError, match=r"fc100_val\.txt is missing, though"):
        Cifar100().load(tmp_path)


def test_cifar10_is_read_from_its_batches_and_has_no_split(tmp_path):
    files = {"batches.meta": meta("label_names", CIFAR10)}
    for b in range(6):
        images = np.stack([image(c, b) for c in range(10)])
        name = f"data_batch_{b + 1}" if b < 5 else "test_batch"
        files[name] = batch(images, "labels", list(range(10)), [f"{c}.png" for c in range(10)])
    write_tar(tmp_path / "cifar10" / "cifar-10-python.tar.gz", files, "cifar-10-batches-py")
    source = Cifar10()
    dataset = source.load(tmp_path)
    assert dataset.class_names == CIFAR10
    assert np.bincount(dataset.y).tolist() == [6] * 10
    assert np.array_equal(dataset.x[5], image(0, 5))  # test images come last in their class
    assert dataset.standard is None


def test_what_is_missing_is_named_with_its_place(tmp_path):
    with pytest.raises(DataError, match=r"Set \$FEDSHOT_DATA"):
        Cifar100().load(None)
    with pytest.raises(DataError, match=r"Put the file cifar-100-python\.tar\.gz into .*cifar100"):
        Cifar100().load(tmp_path)
    (tmp_path / "cifar100").mkdir()
    with pytest.raises(DataError, match=r"cifar100/x\.zip does not exist. Correct `file`"):
        Cifar100(file="x.zip").load(tmp_path)
    for name in ("a.zip", "b.zip"):
        write_zip(tmp_path / "cifar100" / name, {})
    with pytest.raises(DataError, match=r"holds a\.zip, b\.zip. Choose one with `file`"):
        Cifar100().load(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train/apple/x.png": png(np.zeros((30, 32, 3), np.uint8))}, "32x30 pixels; expected 32x"),
        ({"train/apple/x.png": b"no picture"}, r"train/apple/x\.png cannot be read"),
        (
            {"train/aple/x.png": png(image(0, 0))},
            "'aple', which is not a class of cifar100. Did you",
        ),
        ({"../x.png": b""}, r"'\.\./x\.png', a path that points outside the archive"),
        ({"a\\..\\..\\x.png": b""}, "points outside"),
        (
            {"train/apple/0_0.png": None, "test/apple/0_1.png": None},
            "99 of its 100 classes, and none of 'app",
        ),
    ],
)
def test_a_wrong_zip_is_refused_by_name(tmp_path, pngs, change, said):
    files = {name: data for name, data in {**pngs, **change}.items() if data is not None}
    write_zip(tmp_path / "cifar100" / "any.zip", files)
    with pytest.raises(DataError, match=said):
        Cifar100().load(tmp_path)


def test_a_link_out_of_a_folder_is_refused(tmp_path):
    folder = tmp_path / "cifar100" / "train" / "apple"
    folder.mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(b"")
    (folder / "x.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(DataError, match=r"x\.png is a link to .*secret\.png, outside"):
        Cifar100().load(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"meta": meta("fine_label_names", FINE[:-1])}, "meta lists other classes than the 100"),
        ({"test": None}, "has no file test"),
        ({"test": meta("data", FINE)}, "no images of 3072 bytes under 'data'"),
        (
            {"test": batch(np.zeros((2, 32, 32, 3), np.uint8), "fine_labels", [0], ["a", "b"])},
            "no list of 2 under 'fine_labels'",
        ),
        (
            {"test": batch(np.zeros((1, 32, 32, 3), np.uint8), "fine_labels", [100], ["a"])},
            r"fine_labels run from 100 to 100; expected 0\.\.99",
        ),
    ],
)
def test_wrong_batches_are_refused(tmp_path, change, said):
    files = {n: d for n, d in {**cifar100_files(), **change}.items() if d is not None}
    write_tar(tmp_path / "cifar100" / "cifar-100-python.tar.gz", files)
    with pytest.raises(DataError, match=said):
        Cifar100().load(tmp_path)


ARCHIVES: dict[str, bytes] = {}


def archive(suffix: str) -> bytes:
    """Return a small archive of two files, made once."""
    if suffix not in ARCHIVES:
        out = io.BytesIO()
        if suffix == ".zip":
            with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
                for name in ("a/1.png", "b/2.png"):
                    packed.writestr(name, b"content " * 40)
        else:
            with tarfile.open(fileobj=out, mode="w:gz") as tar:
                for name in ("a/1.png", "b/2.png"):
                    info = tarfile.TarInfo(name)
                    info.size = 320
                    tar.addfile(info, io.BytesIO(b"content " * 40))
        ARCHIVES[suffix] = out.getvalue()
    return ARCHIVES[suffix]


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz", ".tar"])
@given(place=st.integers(0, 10_000), harm=st.binary(max_size=12), cut=st.booleans())
def test_a_corrupted_archive_is_read_or_a_data_error(tmp_path_factory, suffix, place, harm, cut):
    whole = archive(suffix)
    place %= len(whole)
    path = tmp_path_factory.getbasetemp() / f"fuzz{suffix}"
    path.write_bytes(whole[:place] + harm + (b"" if cut else whole[place + len(harm) :]))
    with contextlib.suppress(DataError), opened(path) as found:
        for name in found.names:
            found.read(name)


# --- pickles ---


class Evil:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self):
        return Path.touch, (self.made,)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path, protocol):
    made = tmp_path / "made"
    with pytest.raises(DataError, match=r"bad is not one of CIFAR's pickles.*open this one with"):
        pickled.read(pickle.dumps({"data": Evil(made)}, protocol), "bad")
    assert not made.exists()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x80\x02cos\nsystem\nU\x02id\x85R.", r"it asks for os\.system"),
        (b"\x80\x02cbuiltins\neval\n.", r"it asks for builtins\.eval"),
        (b"\x80\x02cnumpy\nload\n.", r"it asks for numpy\.load"),
        (b"\x80\x02cnumpy\nndarray\nK\x05\x85R.", "it calls something other than numpy's array"),
        (b"\x80\x02cnumpy\ndtype\nU\x01O\x85R.", "it calls something other"),
        (b"\x80\x02cnumpy\ndtype\n}b.", "it changes something other"),
        (b"\x80\x02]K\x01b.", "it changes something other"),
        (b"\x80\x04}.", "its protocol is not 2"),
        (b"\x80\x02U\xffabc.", "expected 255 bytes in a string1, but only 4 remain"),
        (b"\x80\x02T\xff\xff\xff\x7fabc.", "in a string4, but only 4 remain"),
        (b"\x80\x02].", "it holds a list"),
        (b"\x80\x02}K\x01K\x01s.", "keys are not strings"),
        (b"\x80\x02}h\x05.", "its opcodes make no sense"),
        (b"\x80\x02(e.", "its opcodes make no sense"),
        (b"\x80\x02}Pid\n.", "it has the opcode PERSID"),
        (b"}" * 100, "pickle exhausted before seeing STOP"),
        (b"c" + b"x" * 200, "no newline found"),
    ],
)
def test_anything_but_arrays_lists_numbers_and_texts_is_refused(data, said):
    with pytest.raises(DataError, match=said):
        pickled.read(data, "bad")


def test_a_number_to_store_under_reserves_no_memory():
    assert pickled.read(b"\x80\x02}r\xff\xff\xff\x7f.", "x") == {}


def test_too_many_bytes_or_instructions_are_refused(monkeypatch):
    monkeypatch.setattr(pickled, "_STEPS", 50)
    with pytest.raises(DataError, match="more than 50 opcodes"):
        pickled.read(b"]" * 100, "x")
    monkeypatch.setattr(pickled, "LIMIT", 10)
    with pytest.raises(DataError, match="has 100 bytes, expected at most 10"):
        pickled.read(b"]" * 100, "x")


def test_an_array_has_the_bytes_its_shape_says():
    good = batch(image(0, 0)[None], "fine_labels", [3], ["a.png"])
    content = pickled.read(good, "x")
    assert content["fine_labels"] == [3]
    assert content["filenames"] == ["a.png"]
    assert np.array_equal(content["data"].reshape(3, 32, 32), image(0, 0).transpose(2, 0, 1))
    with pytest.raises(DataError, match="cannot reshape"):
        pickled.read(good.replace(b"J\x01\0\0\0M\0\x0c", b"J\x02\0\0\0M\0\x0c"), "x")
    assert {op.name for op, _, _ in pickletools.genops(good)} > {"GLOBAL", "REDUCE", "BUILD"}


def test_a_text_that_fills_many_arrays_is_not_copied_for_each():
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
    text = b"T" + (60_000).to_bytes(4, "little") + b"x" * 60_000
    filled = b"(K\x01M\x60\xea\x85h\x01\x89h\x02tb"
    bomb = b"".join(
        [
            *(b"\x80\x02}(", short("kind"), kind, b"q\x01", short("text"), text, b"q\x02"),
            *(short("data"), b"](", (empty + filled) * 2000, b"eu."),
        ]
    )
    assert len(bomb) < 250_000
    said = r"bad is not .*its arrays have more bytes than the file"
    with memory_below(5_000_000), pytest.raises(DataError, match=said):
        pickled.read(bomb, "bad")


def test_one_long_file_name_does_not_make_all_of_them_long(tmp_path):
    files = cifar100_files()
    order = list(reversed(range(100)))
    names = [f"{c}_0.png" for c in order]
    whole = batch(np.stack([image(c, 0) for c in order]), "fine_labels", order, names)
    long = b"T" + (60_000).to_bytes(4, "little") + b"0" * 59_994 + b"_0.png"
    files["train"] = whole.replace(short("0_0.png"), long)
    write_tar(tmp_path / "cifar100" / "cifar-100-python.tar.gz", files)
    with memory_below(5_000_000):
        dataset = Cifar100().load(tmp_path)
    assert np.array_equal(dataset.x[0], image(0, 0))


VALID = batch(image(0, 0)[None, :4, :4].repeat(8, 1).repeat(8, 2), "fine_labels", [3], ["a.png"])


@given(st.binary(max_size=60))
def test_random_bytes_as_a_pickle_are_a_data_error(data):
    with contextlib.suppress(DataError):
        pickled.read(b"\x80\x02" + data, "x")


@given(st.integers(0, len(VALID) - 1), st.integers(0, 255), st.booleans())
def test_a_corrupted_pickle_is_read_or_a_data_error(place, value, cut):
    place = place % 250 if not cut else place  # the instructions, rather than the pixels
    harmed = VALID[:place] if cut else VALID[:place] + bytes([value]) + VALID[place + 1 :]
    with contextlib.suppress(DataError):
        pickled.read(harmed, "x")


def test_nothing_in_fedshot_imports_pickle():
    import fedshot

    root = Path(fedshot.__file__).parent
    forbidden = re.compile(
        r"^\s*(import|from)\s+(c?[pP]ickle|dill|joblib|shelve|marshal)\b|allow_pickle=True|torch\.load"
        r"|pickle\.loads?\(",
        re.MULTILINE,
    )
    for path in root.rglob("*.py"):
        text = re.sub(r"`[^`]*`", "", path.read_text(encoding="utf-8"))
        assert not forbidden.search(text), path
