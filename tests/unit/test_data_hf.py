from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedshot.data import HF
from fedshot.errors import DataError

INSTALLED = importlib.util.find_spec("datasets") is not None
needs_datasets = pytest.mark.skipif(not INSTALLED, reason="needs the extra hf")


@pytest.mark.parametrize("columns", [{}, {"text": "a", "image": "b"}])
def test_either_text_or_image_says_what_the_data_is(columns):
    with pytest.raises(DataError, match="set `text` or `image`, one of them"):
        HF("some/name", **columns)


def test_channels_are_grey_or_colour():
    with pytest.raises(DataError, match="channels is 4"):
        HF("some/name", image="image", channels=4)


@pytest.mark.skipif(INSTALLED, reason="is about the extra missing")
def test_without_the_extra_it_is_said_what_to_install():
    with pytest.raises(DataError, match=r'pip install "fedshot\[hf\]"'):
        HF("some/name", text="text").load(None)


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


@needs_datasets
def test_what_is_not_there_is_named(tmp_path, offline):
    with pytest.raises(DataError, match="cannot be loaded"):
        HF(str(tmp_path / "gone"), text="text").load(None)
