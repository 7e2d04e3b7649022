from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fedshot.core.errors import DataError
from fedshot.data.sources.hf import HF

INSTALLED = importlib.util.find_spec("datasets") is not None
needs_datasets = pytest.mark.skipif(not INSTALLED, reason="needs the extra hf")


@pytest.mark.parametrize("columns", [{}, {"text": "a", "image": "b"}])
def test_either_text_or_image_says_what_the_data_is(columns):
    with pytest.raises(DataError, match="set either `text` or `image`"):
        HF("some/name", **columns)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@needs_datasets
def test_a_folder_of_texts_is_read(tmp_path, offline):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.csv").write_text("words,kind,who\na cat,b,x\na dog,a,y\n")
    (tmp_path / "vectors.txt").write_text("a 1 2\ncat 3 4\n")
    source = HF(
        str(tmp_path / "mine"),
        text="words",
        label="kind",
        user="who",
        vectors=str(tmp_path / "vectors.txt"),
    )
    dataset = source.load(None)
    assert dataset.class_names == ("a", "b")
    assert dataset.y.tolist() == [1, 0]
    assert dataset.x.rows(np.arange(2)).tolist() == [[2, 3], [2, 1]]
    assert dataset.users is not None
    assert dataset.users.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"no column 'kin'\. Did you mean 'kind'"):
        HF(str(tmp_path / "mine"), text="words", label="kin").load(None)


@needs_datasets
def test_a_folder_of_images_is_read(tmp_path, offline):
    for name, colour in (("cat", (255, 0, 0)), ("dog", (0, 255, 0))):
        (tmp_path / "pets" / name).mkdir(parents=True)
        Image.new("RGB", (6, 4), colour).save(tmp_path / "pets" / name / "1.png")
    dataset = HF(str(tmp_path / "pets"), image="image").load(None)
    assert dataset.class_names == ("cat", "dog")
    assert dataset.shape == (4, 6, 3)


class Table(dict):
    """As much of a table of `datasets` as is read of it."""

    def __init__(self, label_kind: object = None, **columns: list) -> None:
        super().__init__(columns)
        self.column_names = list(columns)
        self.features = dict.fromkeys(columns) | {"label": label_kind}

    def cast_column(self, name: str, kind: object) -> list[dict]:
        return [{name: one} for one in self[name]]


class Named:
    """As `datasets.ClassLabel`."""

    def int2str(self, c: int) -> str:
        if not 0 <= c < 2:
            raise ValueError(c)
        return "ab"[c]


@pytest.mark.parametrize(
    ("labels", "kind", "said"),
    [
        ([0, -1, -1], Named(), "row 1: 'label' is -1, which names no class; so do 2 of 3"),
        ([0, 1, None], Named(), "row 2: 'label' is None"),
        ([0, -1, 1], None, "row 1: 'label' is -1"),
        (["a", None, "b"], None, "row 1: 'label' is None"),
        (["a", "", "b"], None, "row 1: 'label' is ''"),
        ([1.0, float("nan"), 2.0], None, "row 1: 'label' is nan"),
        ([["a"], ["a", "b"], []], None, "row 0: 'label' is a list; expected one class"),
    ],
)
def test_a_missing_label_is_no_class(monkeypatch, labels, kind, said):
    table = Table(kind, text=["x", "y", "z"], label=labels)
    monkeypatch.setattr(HF, "_table", lambda _: table)
    with pytest.raises(DataError, match=said):
        HF("some/name", text="text").load(None)


@pytest.mark.parametrize("who", [None, float("nan"), -1, ""])
def test_rows_without_a_user_are_no_client(monkeypatch, who):
    table = Table(text=["x", "y"], label=["a", "b"], who=[7, who])
    monkeypatch.setattr(HF, "_table", lambda _: table)
    with pytest.raises(DataError, match=r"row 1: 'who' is .*which names no user; .*1 of 2"):
        HF("some/name", text="text", user="who").load(None)


def test_a_row_without_an_image_is_named(monkeypatch):
    table = Table(image=[None], label=["a"])
    monkeypatch.setattr(HF, "_table", lambda _: table)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Image=lambda **_: None))
    with pytest.raises(DataError, match="row 0: 'image' holds no image"):
        HF("some/name", image="image").load(None)


def test_an_image_elsewhere_on_this_machine_is_not_read(monkeypatch, tmp_path):
    """A table names files, and a stranger's table could name any."""
    table = Table(image=[{"bytes": None, "path": str(tmp_path / "mine" / "1.png")}], label=["a"])
    cache = str(tmp_path / "cache")
    config = SimpleNamespace(HF_CACHE_HOME=cache, HF_DATASETS_CACHE=cache)
    fake = SimpleNamespace(Image=lambda **_: None, config=config)
    monkeypatch.setattr(HF, "_table", lambda _: table)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    (tmp_path / "mine").mkdir()
    Image.new("RGB", (6, 4)).save(tmp_path / "mine" / "1.png")
    with pytest.raises(DataError, match=r"1\.png, outside .* and the cache of"):
        HF(str(tmp_path / "other"), image="image").load(None)
    assert HF(str(tmp_path / "mine"), image="image").load(None).shape == (4, 6, 3)


@needs_datasets
def test_what_is_not_there_is_named(tmp_path, offline):
    with pytest.raises(DataError, match="cannot be loaded"):
        HF(str(tmp_path / "gone"), text="text").load(None)
