"""idx files: MNIST and Fashion-MNIST."""

from __future__ import annotations

import contextlib
import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshot.core.errors import DataError
from fedshot.data.class_split import ClassSplit
from fedshot.data.sources.mnist import FashionMnist, Mnist, read_idx

pytestmark = pytest.mark.usefixtures("empty_cache")

X = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
Y = np.arange(20, dtype=np.uint8) % 10


def idx(array: np.ndarray) -> bytes:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return head + array.tobytes()


def write(folder: Path, half: str, x: np.ndarray = X, y: np.ndarray = Y) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{half}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(x)))
    (folder / f"{half}-labels-idx1-ubyte").write_bytes(idx(y))


def test_the_halves_that_are_there_are_read_training_images_first(tmp_path):
    write(tmp_path / "mnist", "t10k")
    source = Mnist()
    assert source.halves(tmp_path) == ("t10k",)
    dataset = source.load(tmp_path)
    assert np.array_equal(dataset.x[..., 0], X)
    assert dataset.y.tolist() == Y.tolist()
    assert dataset.standard == ClassSplit((0, 1, 2, 3, 4), (), (5, 6, 7, 8, 9))
    write(tmp_path / "mnist", "train", 255 - X)
    assert source.halves(tmp_path) == ("train", "t10k")
    assert np.array_equal(source.load(tmp_path).x[:20, ..., 0], 255 - X)


def test_fashion_mnist_has_its_own_folder_and_names(tmp_path):
    write(tmp_path / "fashionmnist" / "raw", "train")
    dataset = FashionMnist().load(tmp_path)
    assert dataset.name == "fashion_mnist"
    assert dataset.class_names[9] == "Ankle boot"
    assert FashionMnist().halves(tmp_path) == ("train",)


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (X[:, :27], Y, "28x27; expected 28x28"),
        (X[:19], Y, "20 labels for the 19 images"),
        (X, Y + 1, r"label 10 is out of range; expected 0\.\.9"),
        (
            X,
            np.zeros_like(Y),
            r"labels of 1 of its 10 classes, and none of '1', '2', '3', '4', '5' and 4 more\.",
        ),
    ],
)
def test_wrong_contents_are_refused(tmp_path, x, y, said):
    write(tmp_path / "mnist", "t10k", x, y)
    with pytest.raises(DataError, match=said):
        Mnist().load(tmp_path)


def test_missing_files_are_named_with_their_place(tmp_path):
    fetch = f"`fedshot data get mnist --data-dir {tmp_path}` fetches them"
    with pytest.raises(DataError, match=f"mnist holds no half.*{fetch}"):
        Mnist().load(tmp_path)
    write(tmp_path / "mnist", "train")
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz is missing, though"):
        Mnist().load(tmp_path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not an idx file"),
        (b"\0\0\x0d\3" + bytes(12), "not an idx file of bytes in 3 dimensions"),
        (idx(X)[:-1], "instead of the 15680 bytes"),
        (idx(X) + b"\0", "more than the 15680 bytes"),
        (gzip.compress(idx(X))[:-9], "is not a complete idx file"),
        (b"\x1f\x8bnonsense", "is not a complete idx file"),
        (struct.pack(">BBBB3I", 0, 0, 8, 3, 1 << 31, 1 << 31, 1 << 31), "declares"),
    ],
)
def test_a_damaged_idx_file_is_refused(tmp_path, data, said):
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(DataError, match=said):
        read_idx(path, 3)


WHOLE = {False: idx(X[:2]), True: gzip.compress(idx(X[:2]), mtime=0)}


@given(st.booleans(), st.integers(0, 10_000), st.binary(max_size=8))
def test_a_corrupted_idx_file_is_read_or_a_data_error(tmp_path_factory, zipped, place, harm):
    whole = WHOLE[zipped]
    place %= len(whole)
    path = tmp_path_factory.getbasetemp() / "fuzz-idx"
    path.write_bytes(whole[:place] + harm + whole[place + len(harm) :])
    with contextlib.suppress(DataError):
        read_idx(path, 3)
