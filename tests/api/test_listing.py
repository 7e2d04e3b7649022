"""Tables of methods, datasets and options."""

from __future__ import annotations

import re
import sys

import pytest

import fedshot as fs
from fedshot.api.listing import Listing
from fedshot.methods.registry import METHODS


def test_each_method_has_a_summary_and_a_paper():
    rows = {row["name"]: row for row in fs.methods()}
    assert rows.keys() == METHODS.keys()
    # Other tests register methods of their own.
    rows = {name: rows[name] for name in METHODS if METHODS[name].__module__.startswith("fedshot.")}
    assert all(row["summary"] and row["paper"] for row in rows.values())
    assert max(len(row["paper"]) for row in rows.values()) < 160
    assert all(re.fullmatch(r"[A-Z].*[\w)]|ours", row["paper"]) for row in rows.values())
    inside = re.compile(r"\b(?i:section|algorithm|appendi|eqs?\b|because)|\.\s[a-z]")
    assert [row["paper"] for row in rows.values() if inside.search(row["paper"])] == []
    paper = "Wang et al., Federated Few-shot Learning, KDD 2023"
    assert fs.methods()["fl_proto"]["paper"] == paper


def test_options_are_found_by_the_name_of_a_kind_and_by_key_path():
    by_name, by_path = fs.options("fl_proto"), fs.options("method", "fl_proto")
    assert list(by_name) == list(by_path)
    assert by_name["method.local_steps"]["default"] == 10
    assert fs.options("run")["run.rounds"]["default"] == 100
    assert "conv4" in fs.options("model.backbone").names
    with pytest.raises(fs.ConfigError, match="Did you mean 'fl_proto'"):
        fs.options("fl_prot")
    with pytest.raises(fs.ConfigError, match="Did you mean 'run' or 'krum'"):
        fs.options("rum")
    with pytest.raises(fs.ConfigError, match="there is no method 'x'"):
        fs.options("method", "x")


def test_datasets_say_where_they_are(tmp_path):
    assert fs.datasets(str(tmp_path))["cifar100"]["available"] == "missing: `fedshot data get NAME`"
    assert fs.datasets()["digits"]["available"] == "included"


def test_a_table_prints_its_values_as_they_are():
    table = Listing([{"name": "[red]", "summary": "<b>\x1b[31m"}])
    assert "[red]" in repr(table)
    assert "\x1b" not in repr(table)
    assert "&lt;b&gt;" in table._repr_html_()
    assert "[red]" in table
    assert "blue" not in table
    with pytest.raises(KeyError, match="there is no row 'blue'"):
        table["blue"]


def test_without_pandas_the_extra_is_named(monkeypatch, first):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fs.ConfigError, match=r"fedshot\[pandas\]"):
        _ = first.history
