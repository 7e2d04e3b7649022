"""Comparisons of runs."""

from __future__ import annotations

import json

import pytest

import fedshot as fs
from fedshot.api.comparing import write_report
from fedshot.cli.main import main


def test_a_comparison_has_the_numbers_of_the_command(first, second, capsys):
    found = fs.compare(first, str(second.path))
    assert main(["compare", str(first.path), str(second.path), "--json"]) == 0
    assert found.to_json() == json.loads(capsys.readouterr().out)
    assert main(["compare", str(first.path), str(second.path)]) == 0
    assert found.sentences[0] in capsys.readouterr().out
    difference = first.result.accuracy - second.result.accuracy
    table = found.to_pandas().set_index("label")
    assert table["difference"]["second"] == pytest.approx(difference)
    assert table["paired"]["second"]
    assert table["remark"].tolist() == [row["remark"] for row in found.to_json()["rows"]]
    assert table["remark"]["first"]
    assert table["baseline"].tolist() == [False, False, True]


def test_it_is_shown_as_text_and_as_html(first, second):
    found = fs.compare(first, second)
    assert found.sentences[0] in str(found)
    assert "Paired over the same 20 episodes" in found._repr_html_()


def test_runs_on_other_data_are_not_ranked(first, small, arrays, tmp_path):
    other = fs.train(
        small, data=arrays, method="fl_proto", clients=4, way=2, rounds=1, out=tmp_path / "other",
        progress=False,
    )  # fmt: skip
    found = fs.compare(first, other)
    assert found.warning.startswith("the results are on different data: ")
    assert found.sentences == ["first and other are not ranked: their data differ."]
    assert found.table["other"]["outcome"] is None


def test_runs_with_other_tests_are_not_ranked(first, small, tmp_path):
    def tested(name, **changes):
        options = {"data": "digits", "method": "fl_proto", "clients": 4, "way": 2, "rounds": 1}
        return fs.train(small, **{**options, **changes}, out=tmp_path / name, progress=False)

    split = {"base": ["0-4"], "validation": ["8", "9"], "novel": ["5", "6", "7"]}
    shot, classes = tested("shot", **{"test.shot": 3}), tested("classes", split=split)
    found = fs.compare(first, shot, classes)
    assert found.warning == ""
    assert found.sentences == [
        "first and shot are not ranked: their tests differ (2-way 1-shot, and 2-way 3-shot).",
        "first and classes are not ranked: their tests differ (other classes).",
    ]
    assert [row["outcome"] for row in found.table][:3] == [None, None, None]
    page = write_report(
        [first.path, shot.path], to=tmp_path / "page.html", title=None, with_data=False,
        data_dir=None, notify=lambda _: None,
    )  # fmt: skip
    said = page.read_text()
    assert "The 2 results are not ranked. " in said
    assert "their tests differ (" in said


def test_what_the_command_refuses_is_refused(first, tmp_path):
    with pytest.raises(fs.ConfigError, match="is given; expected two runs"):
        fs.compare(first)
    with pytest.raises(fs.ConfigError, match=r"Write fedshot\.compare\(\*runs\)"):
        fs.compare([first, first])
    with pytest.raises(fs.ConfigError, match="no runs are given"):
        fs.compare()
    with pytest.raises(fs.CheckpointError, match="holds no run"):
        fs.compare(first, tmp_path)
