"""Raw texts for an encoder: as they were written, and without word vectors."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedshot.core.errors import DataError
from fedshot.data.dataset import Dataset
from fedshot.data.sources.digits import Digits
from fedshot.data.sources.hf import HF
from fedshot.data.sources.huffpost import HuffPost
from fedshot.data.sources.news import GROUPS, News20
from fedshot.data.sources.sent140 import Sent140
from fedshot.data.sources.texts import Texts
from fedshot.data.tokens import RawTexts

from .test_news import member, packed
from .test_sent140 import NAME, sheet


def texts_of(dataset: Dataset) -> tuple[str, ...]:
    assert isinstance(dataset.x, RawTexts)
    assert (dataset.kind, dataset.shape, dataset.is_text) == ("raw text", (), False)
    return dataset.x.texts


def test_a_table_keeps_case_marks_and_strange_words(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label,who\nHello; Grüße!,b,x\nqwrtz,a,y\n")
    dataset = Texts(str(path), user="who").load_raw(None)
    assert texts_of(dataset) == ("Hello; Grüße!", "qwrtz")
    assert (dataset.class_names, dataset.y.tolist()) == (("a", "b"), [1, 0])
    assert dataset.users is not None
    assert dataset.users.tolist() == [0, 1]
    path.write_text("text,label\n")
    with pytest.raises(DataError, match="holds no texts"):
        Texts(str(path)).load_raw(None)


def test_messages_keep_their_lines(tmp_path: Path) -> None:
    found = [member(f"20news-bydate-train/{group}/1") for group in GROUPS]
    packed(tmp_path / "20newsgroups" / "20news-bydate.tar.gz", found)
    dataset = News20(headers="none").load_raw(tmp_path)
    assert set(texts_of(dataset)) == {"The dog.\n"}
    assert dataset.standard is not None


def test_headlines_are_joined_by_spaces(tmp_path: Path) -> None:
    (tmp_path / "huffpost").mkdir()
    rows = [
        {"text": ["a", "Cat", "'s"], "label": 0},
        *({"raw": "a", "label": c} for c in range(41)),
    ]
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "huffpost" / "huffpost.json").write_text(text)
    assert texts_of(HuffPost().load_raw(tmp_path))[:2] == ("a Cat 's", "a")


def test_tweets_keep_words_without_a_vector(tmp_path: Path) -> None:
    (tmp_path / "sent140").mkdir()
    rows = [("4", "zoe", "GOOD &amp; qwrtz"), ("0", "adam", " "), ("0", "eve", "no")]
    (tmp_path / "sent140" / NAME).write_text(sheet(rows), encoding="latin-1")
    dataset = Sent140().load_raw(tmp_path)
    assert texts_of(dataset) == ("GOOD & qwrtz", "no")
    assert dataset.users is not None
    assert (dataset.y.tolist(), dataset.users.tolist()) == ([1, 0], [0, 1])


def test_a_column_of_the_hub_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"words": ["A cat!", "qwrtz"], "label": ["b", "a"]}

    class Table(SimpleNamespace):
        def __getitem__(self, name: str) -> Any:
            return columns[name]

    table = Table(column_names=[*columns], features={"label": None})
    monkeypatch.setattr(HF, "_table", lambda _: table)
    assert texts_of(HF("some/name", text="words").load_raw(None)) == ("A cat!", "qwrtz")


def test_images_are_the_same_for_an_encoder() -> None:
    assert Digits().load_raw(None).digest == Digits().load(None).digest


def test_the_hash_tells_texts_apart() -> None:
    def digest(*texts: str) -> str:
        return Dataset("t", RawTexts(texts), np.array([0, 1]), ("a", "b")).digest

    assert len({digest("ab", "c"), digest("a", "bc"), digest("ab", "C")}) == 3
