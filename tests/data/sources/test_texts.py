from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshot.config.load import Config
from fedshot.core.errors import ConfigError, DataError
from fedshot.data.sources.texts import Texts
from fedshot.reports.inspect import facts, pictures
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

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
        assert dataset.standard is None


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
        (
            "m.csv",
            "text,label\n" + "x" * 200_000 + ",a\n",
            "line 2: .* more than 131,072 characters",
        ),
        ("m.jsonl", '{"text": "cat", "label": "a"}\n{"text": ', "line 2: not JSON"),
        ("m.jsonl", "1\n", "line 1: int; expected an object"),
        ("m.jsonl", '["cat", "a"]\n', "line 1: .* array of 2 values. Set `text` and `label` to"),
        ("m.json", '{"part": [\n["cat", "a"]\n]}', "one dict of 1 values over many lines"),
        (
            "m.jsonl",
            '{"text": "cat", "label": "a", "text": "dog"}',
            "line 1: .*'text' occurs twice",
        ),
        ("m.csv", "text,label,text\ncat,a,dog\n", "the header has 2 columns 'text'"),
        ("m.csv", 'text,label\ncat,a\ndog,"b\ncat,a\n', "line 3: a double quote opens"),
        ("m.csv", 'label,text\na,"x\ny"\nb,"dog\n' + "a,cat\n" * 40_000, "line 4: .* begins here"),
        ("m.tsv", "text;label\ncat;a\n".replace("label", "kind"), "there is no 'label'"),
        ("m.jsonl", '{"text": 3, "label": "a"}\n', "line 1: 'text' is of type int"),
        ("m.jsonl", '{"text": "cat", "label": true}\n', "'label' is of type bool"),
        ("m.jsonl", '{"text": "cat", "label": null}\n', "'label' is of type NoneType"),
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


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("t.tsv", "label\ttext\nb\ta cat, a dog\na\tlines; cat\n", {}),
        ("s.csv", "label;text\nb;a cat, a dog\na;lines\\; cat\n".replace("\\; ", " , "), {}),
        (
            "a.json",
            '[\n{"label": "b", "text": "a cat, a dog"},\n{"label": "a", "text": "lines"}]',
            {},
        ),
        ("p.json", '[["a cat, a dog", "b"], ["lines", "a"]]', {"text": "0", "label": "1"}),
        ("p.jsonl", '["a cat, a dog", "b"]\n["lines", "a"]', {"text": "0", "label": "1"}),
    ],
)
def test_tabs_semicolons_and_arrays_are_read(tmp_path, vectors, name, content, columns):
    dataset = made(tmp_path, vectors, content, name, **columns).load(None)
    assert dataset.class_names == ("a", "b")
    assert dataset.y.tolist() == [1, 0]
    assert dataset.x.rows(np.array([0])).tolist() == [[2, 3, 1, 2, 4]]
    assert dataset.x.rows(np.array([1]))[0, 0] == 5


@pytest.mark.parametrize("other", ["b ", " b", "cafe\u0301"])
def test_two_spellings_of_a_label_are_refused_with_both(tmp_path, vectors, other):
    one = "caf\u00e9" if "f" in other else "b"
    source = made(tmp_path, vectors, f"text,label\ncat,{one}\ndog,{other}\n")
    with pytest.raises(DataError, match="differ only in whitespace or in how") as error:
        source.load(None)
    assert ascii(one) in str(error.value)
    assert ascii(other) in str(error.value)


def test_two_spellings_of_a_user_are_one_user(tmp_path, vectors):
    content = "text,label,who\ncat,a,Ren\u00e9\ncat,b,Rene\u0301 \ndog,b,Jo\n"
    users = made(tmp_path, vectors, content, user="who").load(None).users
    assert users is not None
    assert users.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("texts", "keep", "said"),
    [
        (["cat", "", "", "dog", ""], "all", "3 of 5 texts are empty or have no word"),
        (["cat", "xyzzy", "plugh", "qwert"], "known", "3 of 4 texts .* 75.0 % of the words"),
        (["cat q w e", "dog q w e"], "all", "0 of 2 texts .* 75.0 % of the words"),
        (["cat q w e", "dog q w e"], "known", "0 of 2 texts .* 75.0 % of the words"),
    ],
)
def test_texts_that_are_mostly_empty_or_unknown_are_refused(tmp_path, vectors, texts, keep, said):
    rows = "".join(f"{text},{i % 2}\n" for i, text in enumerate(texts))
    with pytest.raises(DataError, match=f"{said}.*; expected at most half"):
        made(tmp_path, vectors, f"text,label\n{rows}", keep=keep).load(None)


@pytest.mark.parametrize(("keep", "words"), [("all", "33.3"), ("known", "33.3")])
def test_a_few_empty_and_unknown_texts_are_counted(tmp_path, vectors, keep, words):
    dataset = made(tmp_path, vectors, "text,label\ncat q,a\ndog cat dog,b\n,a\nq,b\n", keep=keep)
    x = dataset.load(None).x
    assert x.lacking == (
        f"2 of 4 texts are empty or have no word with a vector; {words} % of the words have none"
    )


@pytest.mark.parametrize("name", ["pipe.csv", "pipe.jsonl"])
def test_a_pipe_is_refused_at_once(tmp_path, vectors, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name} cannot be read \(it is not a regular file"):
        Texts(str(tmp_path / name), vectors=vectors).load(None)


def test_a_missing_file_is_named(vectors):
    for name in ("gone.csv", "gone.jsonl"):
        with pytest.raises(DataError, match=rf"{name} cannot be read \(No such file"):
            Texts(name, vectors=vectors).load(None)


def test_a_user_is_never_shown(tmp_path, vectors):
    content = '{"text": "cat", "label": "a", "who": ["Jane Roe"]}\n'
    with pytest.raises(DataError, match="'who' is of type list") as error:
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
    prepared = PreparedRun(config)
    assert any("240 texts of at most 100 words" in line for line in facts(prepared))
    lacking = (
        "0 of 240 texts are empty or have no word with a vector; 33.3 % of the words have none"
    )
    assert f"my: {lacking}" in prepared.notices()
    assert lacking in facts(prepared)
    assert all(path.suffix == ".svg" for path in pictures(prepared, tmp_path / "pictures"))
    experiment = Experiment(prepared, tmp_path / "run")
    assert [record.round for record in experiment.run()] == [0, 1, 2]
    assert 0 <= experiment.result().accuracy <= 1
    assert experiment.folder.joinpath("result.json").is_file()


def test_an_image_backbone_is_refused_before_the_first_round(tmp_path, vectors):
    source = {"name": "texts", "path": made(tmp_path, vectors, CSV).path, "vectors": vectors}
    split = {"base": ["a"], "novel": ["b"]}
    dealt = {"name": "iid", "clients": 1}
    config = Config.of({"data": source, "split": split, "partition": dealt})  # Conv4 is the default
    with pytest.raises(ConfigError, match=r"Conv4 takes images, but the data are text"):
        PreparedRun(config)


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
