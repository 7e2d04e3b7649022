"""Data in memory as datasets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import fedshot as fs
from fedshot.api.training import given_settings

PIXELS = np.arange(4 * 2 * 3 * 3, dtype=np.uint8).reshape(4, 2, 3, 3)  # [n, H, W, C]


def test_arrays_keep_their_pixels_and_name_their_classes():
    found = fs.as_dataset((PIXELS, ["b", "a", "b", "c"], ["x", "z", "y", "x"]), name="mine")
    assert (found.x == PIXELS).all()
    assert found.class_names == ("a", "b", "c")
    assert found.y.tolist() == [1, 0, 1, 2]
    assert found.users.tolist() == [0, 2, 1, 0]
    assert found.name == "mine"
    assert fs.as_dataset(found) is found


def test_floats_are_shares_of_255_and_grey_images_get_a_channel():
    found = fs.as_dataset((PIXELS[..., 0] / 255, [0, 1, 10, 2]))
    assert (found.x == PIXELS[..., :1]).all()
    assert found.class_names == ("0", "1", "2", "10")
    assert fs.as_dataset((PIXELS[..., 0], [0, 0, 1, 1]), size=4).shape == (4, 4, 1)
    assert fs.as_dataset((PIXELS, [0, 0, 1, 1]), channels=1).shape == (2, 3, 1)


def test_tensors_may_have_channels_first():
    x, y = torch.from_numpy(PIXELS).movedim(-1, 1), torch.tensor([0, 0, 1, 1])
    x = torch.nn.functional.pad(x, (0, 2))  # [4, 3, 2, 5]
    parts = (x[:2], y[:2]), (x[2:], y[2:])
    mappings = [dict(enumerate(parts)), {i: TensorDataset(*part) for i, part in enumerate(parts)}]
    for data in ((x, y), (list(x), y), TensorDataset(x, y), TensorDataset(x / 255.0, y), *mappings):
        found = fs.as_dataset(data)
        assert found.shape == (2, 5, 3)
        assert (found.x[:, :, :3] == PIXELS).all()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_tensor_of_grey_images_has_no_channels(n):
    x = torch.from_numpy(PIXELS[:n, ..., 0])  # [n, 2, 3]
    x = torch.nn.functional.pad(x, (0, 2))
    pair = x, [0] * n
    for data in (pair, {"north": pair}):
        found = fs.as_dataset(data)
        assert (found.x[..., 0] == x.numpy()).all()


def test_classes_of_a_torch_dataset_are_its_names():
    data = TensorDataset(torch.from_numpy(PIXELS), torch.tensor([1, 0, 1, 0]))
    data.classes = ["cat", "dog"]
    found = fs.as_dataset(data)
    assert [found.class_names[c] for c in found.y] == ["dog", "cat", "dog", "cat"]


def test_classes_of_a_torch_dataset_need_a_name_each():
    for classes in ([1, 0, 2, 0], [1, 0, -1, 0]):
        data = TensorDataset(torch.from_numpy(PIXELS), torch.tensor(classes))
        data.classes = ["cat", "dog"]
        with pytest.raises(
            fs.DataError, match=r"data\.classes has 2 names; expected classes 0\.\.1"
        ):
            fs.as_dataset(data)


def test_each_entry_of_a_mapping_is_a_client():
    pair = PIXELS[:2], ["b", "a"]
    found = fs.as_dataset({"north": pair, "south": (PIXELS, ["a"] * 4)})
    assert found.users.tolist() == [0, 0, 1, 1, 1, 1]
    assert found.y.tolist() == [1, 0, 0, 0, 0, 0]
    assert (found.x == np.concatenate([PIXELS[:2], PIXELS])).all()
    with pytest.raises(fs.DataError, match="one of these names clients itself"):
        fs.as_dataset({"north": (*pair, [0, 0])})
    with pytest.raises(fs.DataError, match="empty mapping"):
        fs.as_dataset({})


def test_names_of_clients_are_kept_if_they_are_texts():
    half = PIXELS[:2], [0, 1]
    assert fs.as_dataset({"b": half, "a": half}).user_names == ("b", "a")
    assert fs.as_dataset((PIXELS, [0, 1, 0, 1], ["b", "a", "b", "c"])).user_names == ("a", "b", "c")
    assert fs.as_dataset((PIXELS, [0, 1, 0, 1], [3, 1, 3, 1])).user_names == ()
    assert fs.as_dataset({1: half, "a": half}).user_names == ()


def test_clients_with_pixels_of_two_types_keep_their_values():
    north, south = (PIXELS > 1).astype(np.uint8), PIXELS / 255
    found = fs.as_dataset({"north": (north, [0, 1, 0, 1]), "south": (south, [0, 1, 0, 1])})
    assert (found.x == np.concatenate([north, PIXELS])).all()


def test_a_table_of_features_is_an_array_of_features():
    table = pd.DataFrame({"a": [1, 2, 3], "b": [0.5, 0, 1]})
    for data in ((table, [0, 1, 0]), {"north": (table, pd.Series([0, 1, 0]))}):
        assert fs.as_dataset(data).x.tolist() == [[1, 0.5], [2, 0], [3, 1]]


def test_a_table_of_pictures_is_read_from_their_paths(tmp_path):
    for i, pixels in enumerate(PIXELS):
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    table = pd.DataFrame({
        "path": [str(tmp_path / f"{i}.png") for i in range(4)],
        "kind": list("abab"),
        "client": [7, 7, 9, 9],
    })  # fmt: skip
    found = fs.as_dataset(table, label="kind")
    assert (found.x == PIXELS).all()
    assert found.users.tolist() == [0, 0, 1, 1]
    assert fs.as_dataset(table, label="kind", size=8, channels=1).shape == (8, 8, 1)
    with pytest.raises(fs.DataError, match=r"no column 'kin'\. Did you mean 'kind'"):
        fs.as_dataset(table, label="kin")


def test_a_table_of_texts_is_tokenised(tmp_path):
    (tmp_path / "vectors.txt").write_text("a 1 2\ncat 3 4\n")
    table = pd.DataFrame({"text": ["A cat", "cat a cat"], "label": ["x", "y"]})
    found = fs.as_dataset(table, vectors=str(tmp_path / "vectors.txt"))
    assert found.is_text
    assert found.x.words == ("a", "cat")
    assert found.x.rows(np.arange(2)).tolist() == [[2, 3, 0], [3, 2, 3]]


def test_named_classes_of_a_hugging_face_dataset_are_its_names():
    class Table:
        """As much of a table of `datasets` as is read of it."""

        column_names = ("image", "label")
        features: ClassVar = {"label": SimpleNamespace(int2str=["cat", "dog"].__getitem__)}

        def __getitem__(self, name: str) -> list:
            images = [Image.fromarray(pixels) for pixels in PIXELS]
            return images if name == "image" else [1, 0, 1, 1]

    found = fs.as_dataset(Table())
    assert (found.x == PIXELS).all()
    assert [found.class_names[c] for c in found.y] == ["dog", "cat", "dog", "dog"]


class Unreadable:
    """A torch dataset whose item 2 is a damaged file."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        if i == 2:
            raise OSError("truncated file")
        return PIXELS[i], i % 2


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (5, "data is of type int; expected a pair"),
        ("pictures", "data is of type str"),
        (([PIXELS[0], PIXELS[0][:1]], [0, 1]), "images differ in shape: image 0 has"),
        ((PIXELS, [0, 1]), "4 examples, and a label is given for 2"),
        ((PIXELS, [0, 1, None, 1]), "the label of example 2 is missing"),
        ((PIXELS, [0, 1, 0, 1], [0, None, 1, 1]), "the client of example 1 is missing"),
        ((PIXELS[:0], []), "no examples"),
        ((PIXELS, None), "y is None; expected the class of each example"),
        ({"north": (PIXELS, None)}, "y is None; expected the class of each example"),
        ((PIXELS * 3.0, [0, 1, 0, 1]), r"expected floating point pixels in \[0, 1\]"),
        ([1, 2], "not pairs"),
        ((np.zeros((4, 3, 8, 8), np.uint8), [0, 1, 0, 1]), r"\[4, 3, 8, 8\], channels first"),
        (([np.zeros((1, 8, 8), np.uint8)] * 4, [0, 1, 0, 1]), r"image 0: .*, channels first"),
        (([{}, {}], [0, 1]), "example 0 is of type dict"),
        ((PIXELS[:, :, 0, 0] > 1, [0, 1, 0, 1]), r"example 0 is an array bool\[2\]"),
        ((None, [0, 1]), "the examples X are of type NoneType"),
        (("ab", [0, 1]), "the examples X are of type str"),
        ((["a b", None], [0, 1]), "example 1 is of type NoneType, and others are texts"),
        ([(PIXELS, [0, 1, 0, 1]), (PIXELS, np.arange(4))], "not pairs"),
        ({"north": (PIXELS, [0, 1, 0, 1]), "south": (PIXELS[:0], [])}, "'south' has no examples"),
        (
            (PIXELS, [0, 1, 0, 1], [0.5, 1, 1, 1]),
            "a client is a number with a fraction; expected names",
        ),
        ((PIXELS, np.array([0, 1, np.nan, 1])), r"example 2 is missing \(nan\).*contains NaN"),
        (
            {"north": (PIXELS, [0, 1, 0, 1]), "south": (PIXELS, ["0", "1", "0", "1"])},
            "label 0 is of the types int and str. Convert all labels to one type",
        ),
        (Unreadable(), "item 2 of the Unreadable cannot be read: OSError: truncated file"),
        (pd.DataFrame({"a": [1], "label": [1]}), "none is named 'text', 'image' or 'path'"),
    ],
)
def test_what_is_no_dataset_is_refused(data, text):
    with pytest.raises(fs.DataError, match=text):
        fs.as_dataset(data)


def test_what_cannot_be_trained_on_is_refused(tmp_path):
    """And never replaced by the default data."""
    with pytest.raises(fs.ConfigError, match="data is empty"):
        fs.train(data={}, progress=False, out=tmp_path / "run")
    for path in (tmp_path, str(tmp_path)):
        with pytest.raises(fs.ConfigError, match=r"a file or folder\. Say .*'name': 'folder'"):
            fs.train(data=path, progress=False, out=tmp_path / "run")
    with pytest.raises(fs.DataError, match=r"has 2 classes, and training, .* at least 3 in all"):
        fs.train(data=(PIXELS, [0, 1, 0, 1]), progress=False, out=tmp_path / "run")
    (tmp_path / "file").write_text("no folder")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(fs.ConfigError, match="file is a file; expected a folder"):
            fs.train(data="digits", progress=False, out=out)
    with pytest.raises(fs.DataError, match="size is 'big'"):
        fs.as_dataset((PIXELS, [0, 1, 0, 1]), size="big")


def test_numbers_of_numpy_are_options():
    given, _ = given_settings(None, {"run.rounds": np.int64(2), "method.mu": np.float32(0.5)})
    assert given == {"run": {"rounds": 2}, "method": {"mu": 0.5}}
    assert [type(x) for x in (given["run"]["rounds"], given["method"]["mu"])] == [int, float]
