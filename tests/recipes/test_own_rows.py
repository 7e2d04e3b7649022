"""Rows of one's own in a published table: added by a file, held to what all rows are held to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedshot.config import Config
from fedshot.errors import ConfigError
from fedshot.recipes import Recipe
from fedshot.recipes.own_rows import OWN_ROWS, joined, load
from fedshot.recipes.plan import marks

METHOD = {"method": {"name": "fedbabu"}}


def tuned(place: str, space: Any) -> Any:
    return {"mine": {"settings": METHOD, "tune": {place: space}}}


ROWS = """
babu:
  settings: {method: {name: fedbabu}}
slow:
  label: F2L, slow
  settings: {method: {name: f2l, inner_lr: 0.001}}
  exchanges: 2
"""


def test_rows_of_a_folder_of_results_join_the_recipe(tmp_path: Path) -> None:
    bare = load("f2l-huffpost", tmp_path)
    assert bare == Recipe.load("f2l-huffpost")
    (tmp_path / "f2l-huffpost").mkdir()
    (tmp_path / "f2l-huffpost" / OWN_ROWS).write_text(ROWS, encoding="utf-8")
    recipe = load("f2l-huffpost", tmp_path)
    assert list(recipe.rows) == [*bare.rows, "babu", "slow"]
    assert bare == Recipe.load("f2l-huffpost"), "the recipe itself is as it was"
    babu, slow = recipe.cells("paper", ["babu/iid-1", "slow/iid-1"])
    assert babu.row.label == "babu"
    assert babu.published is None
    assert marks(babu)[0] == "a row that was added to the recipe"
    theirs = recipe.cells("paper", ["f2l/iid-1"])[0]
    assert "added" not in " ".join(marks(theirs))
    mine, other = babu.settings(), theirs.settings()
    for section in ("data", "split", "partition", "episode", "test"):
        assert mine.get(section) == other.get(section)
    assert Config.of(mine).settings["method"]["name"] == "fedbabu"
    assert babu.settings()["run"]["rounds"] == 2 * slow.settings()["run"]["rounds"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"../up": {"settings": METHOD}}, "row '../up': its key names files; expected up to 60"),
        ({"a.b": {"settings": METHOD}}, "row 'a.b': its key names files"),
        ({7: {"settings": METHOD}}, "row 7: its key names files"),
        ({"f2l": {"settings": METHOD}}, "f2l-huffpost has a row of that key. Choose another"),
        ({"mine": None}, "row 'mine' is None; expected keys and values"),
        ({"mine": {}}, "row 'mine' names no method"),
        ({"mine": {"settings": {"method": {}}}}, "row 'mine' names no method"),
        ({"mine": {"setting": METHOD}}, "row 'mine' has 'setting'. Did you mean 'settings'?"),
        ({"mine": {"settings": METHOD | {"seed": 1}}}, "row mine sets seed; a row may set"),
        ({"mine": {"settings": METHOD | {"test": {"shot": 5}}}}, "sets test.shot"),
        ({"mine": {"settings": METHOD, "exchanges": 0}}, "exchanges is 0; expected 1 or more"),
        ({"mine": {"settings": METHOD, "exchanges": 1.5}}, "exchanges is 1.5; expected 1 or more"),
        ({"mine": {"settings": METHOD, "published": [1.0]}}, "has 1 numbers, 4 columns"),
        ({"mine": {"settings": METHOD, "published": ["x"] * 4}}, "published is ['x'"),
        ({"mine": {"settings": METHOD, "label": 7}}, "label is 7; expected text"),
        ({"mine": {"settings": METHOD, "departs": "x"}}, "departs is 'x'; expected a list"),
        (tuned("seed", {"choice": [1]}), "sets seed; a row may"),
        (tuned("method.rounds", [1]), "method.rounds is [1]; expected {log"),
        (tuned("method.lr", {"log": [0, 1]}), "method.lr is {'log': [0, 1]}; expected {log"),
        (tuned("method.lr", {"log": ["1e-3", 1]}), "write 0.001"),
        (tuned("method.lr", {"linear": [1, 0]}), "expected {log"),
        (tuned("method.lr", {"normal": [0, 1]}), "expected {log"),
        ({"mine": {"settings": METHOD, "trained_as": "nobody"}}, "is trained as 'nobody'"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_are_refused(rows: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        joined(Recipe.load("f2l-huffpost"), rows, "rows.yaml")
    assert words in str(refused.value)


def test_a_picture_takes_no_rows() -> None:
    with pytest.raises(ConfigError, match="a picture without rows"):
        joined(Recipe.load("pfedfsl-fig5"), {"mine": {"settings": METHOD}}, "rows.yaml")
