from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshot.config import Config
from fedshot.data import Texts
from fedshot.errors import ConfigError, DataError
from fedshot.experiment import Experiment, Setting
from fedshot.reports.inspect import facts, pictures

CSV = 'label,text,who\nb,"A cat, a dog",x\na,"two\nlines",y\nb,,x\n'
ROWS = [
    {"label": "b", "text": "A cat, a dog", "who": "x"},
    {"label": "a", "text": "two\nlines", "who": "y"},
    {"label": "b", "text": "", "who": "x"},
]


@pytest.fixture
def vectors(tmp_path: Path) -> str:
    path = tmp_path / "vectors.txt"
    path.write_text("a 1 2\ncat 3 4\ndog 5 6\nlines 7 8\n")
    return str(path)


def made(tmp_path: Path, vectors: str, content: str | bytes, name="my.csv", **options) -> Texts:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Texts(str(path), vectors=vectors, cut=9, **options)


def test_a_csv_and_json_lines_give_the_same_dataset(tmp_path, vectors):
    lines = "\n".join(json.dumps(row) for row in ROWS)
    files = [("my.csv", CSV), ("my.jsonl", lines), ("my.json", "\ufeff" + lines + "\n\n")]
    for name, content in files:
        source = made(tmp_path, vectors, content, name, user="who")
        dataset = source.load(None)
        assert dataset.name == "my"
        assert dataset.class_names == ("a", "b")
        assert dataset.y.tolist() == [1, 0, 1]
        assert dataset.users is not None
        assert dataset.users.tolist() == [0, 1, 0]
        assert dataset.x.rows(np.arange(3)).tolist() == [
            [2, 3, 1, 2, 4],
            [1, 5, 0, 0, 0],
            [0, 0, 0, 0, 0],
        ]
        assert source.split(dataset) is None


def test_a_byte_order_mark_and_labels_that_are_numbers_are_fine(tmp_path, vectors):
    source = made(tmp_path, vectors, "\ufefftext,label\ncat,1\ndog,0\n")
    assert source.load(None).class_names == ("0", "1")
    source = made(tmp_path, vectors, '{"text": "cat", "label": 1}\n', "n.jsonl")
    assert source.load(None).class_names == ("1",)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("m.csv", "text,lable\ncat,a\n", "line 2: there is no 'label' among its 2 fields"),
        ("m.csv", "txt,label\ncat,a\n", "there is no 'text' among its 2 fields"),
        ("m.csv", "text,label\ncat,\n", "line 2: 'label' is empty"),
        ("m.csv", "text,label\ncat,a,b\n", "line 2: 3 cells; expected 2"),
        ("m.csv", "text,label\n", "holds no texts"),
        ("m.csv", "", "holds no texts"),
        (
            "m.csv",
            b"text,label\ncaf\xe9,a\n",
            "is not text in UTF-8: .* at byte 14. Save it as UTF-8",
        ),
        ("m.csv", "text,label\n" + "x" * 200_000 + ",a\n", "not a csv in utf-8-sig .Error"),
        ("m.jsonl", '{"text": "cat", "label": "a"}\n{"text": ', "line 2: not JSON"),
        ("m.jsonl", "[1]\n", "line 1: list; expected an object"),
        ("m.jsonl", '{"text": 3, "label": "a"}\n', "line 1: 'text' is empty or int"),
        ("m.jsonl", '{"text": "cat", "label": true}\n', "'label' is empty or bool"),
        ("m.jsonl", '{"text": "cat", "label": null}\n', "'label' is empty or NoneType"),
        ("m.jsonl", '{"text": "cat", "label": "\\ud800"}\n', "cannot be written as text"),
        ("m.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("m.jsonl", '{"text": "cat", "label": ' + "9" * 5000 + "}", "line 1: not JSON"),
        ("m.jsonl", b'{"text": "\xff"}\n', "line 1: not JSON in UTF-8"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_line(tmp_path, vectors, name, content, said):
    with pytest.raises(DataError, match=said) as error:
        made(tmp_path, vectors, content, name).load(None)
    assert name in str(error.value)


def test_a_missing_file_is_named(vectors):
    for name in ("gone.csv", "gone.jsonl"):
        with pytest.raises(DataError, match=rf"{name} cannot be read \(No such file"):
            Texts(name, vectors=vectors).load(None)


def test_a_user_is_never_shown(tmp_path, vectors):
    content = '{"text": "cat", "label": "a", "who": ["Jane Roe"]}\n'
    with pytest.raises(DataError, match="'who' is empty or list") as error:
        made(tmp_path, vectors, content, "m.jsonl", user="who").load(None)
    assert "Jane" not in str(error.value)


def test_a_run_on_texts_trains_validates_and_tests(tmp_path, vectors):
    words = ("a", "cat", "dog", "lines")
    rows = [f"{words[i % 4]} {words[i // 4 % 4]} etc,{i % 6}" for i in range(240)]
    (tmp_path / "my.csv").write_text("\n".join(["text,label", *rows]))
    config = Config.of(
        {
            "data": {"name": "texts", "path": str(tmp_path / "my.csv"), "vectors": vectors},
            "split": {"base": ["0-1"], "validation": ["2-3"], "novel": ["4-5"]},
            "partition": {"name": "iid", "clients": 2},
            "episode": {"way": 2, "shot": 1, "query": 2},
            "model": {"backbone": {"name": "gru", "hidden": 4}, "head": {"name": "none"}},
            "method": {"name": "fl_proto", "local_steps": 2},
            "run": {"rounds": 2},
            "test": {"way": 2, "shot": 1, "query": 2, "episodes": 4, "validation_episodes": 4},
        }
    )
    setting = Setting(config)
    assert any("240 texts of at most 100 words" in line for line in facts(setting))
    assert all(path.suffix == ".svg" for path in pictures(setting, tmp_path / "pictures"))
    experiment = Experiment(setting, tmp_path / "run")
    assert [record.round for record in experiment.run()] == [0, 1, 2]
    assert 0 <= experiment.result().accuracy <= 1
    assert experiment.folder.joinpath("result.json").is_file()


def test_an_image_backbone_is_refused_before_the_first_round(tmp_path, vectors):
    source = {"name": "texts", "path": made(tmp_path, vectors, CSV).path, "vectors": vectors}
    split = {"base": ["a"], "novel": ["b"]}
    dealt = {"name": "iid", "clients": 1}
    config = Config.of({"data": source, "split": split, "partition": dealt})  # Conv4 is the default
    with pytest.raises(ConfigError, match=r"Conv4 takes images, and the data are text"):
        Setting(config)


@settings(max_examples=150)
@given(
    st.one_of(
        st.binary(max_size=120), st.just(CSV.encode()), st.just(json.dumps(ROWS[0]).encode())
    ),
    st.integers(0, 119),
    st.integers(0, 255),
    st.sampled_from(["fuzz.csv", "fuzz.jsonl"]),
)
def test_damaged_bytes_are_read_or_refused(tmp_path_factory, data, at, bit, name):
    folder = tmp_path_factory.getbasetemp()
    (folder / "fuzz-vectors.txt").write_text("a 1 2\ncat 3 4\n")
    damaged = bytearray(data)
    if damaged:
        damaged[at % len(damaged)] ^= bit
    (folder / name).write_bytes(damaged)
    try:
        dataset = Texts(
            str(folder / name), user="who", vectors=str(folder / "fuzz-vectors.txt")
        ).load(None)
    except DataError:
        return
    assert len(dataset.digest) == 64
