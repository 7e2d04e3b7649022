"""Rows and tables of one's own: found beside their results, held to what all recipes are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedshot.config import settings as trees
from fedshot.config.load import Config
from fedshot.config.settings import parse
from fedshot.core.errors import ConfigError
from fedshot.recipes import plots, timing
from fedshot.recipes.index import load, names
from fedshot.recipes.plan import budget_marks, data_marks, marks
from fedshot.recipes.reading import joined, read
from fedshot.recipes.runner import RecipeRunner, Request, current

METHOD = {"method": {"name": "fedbabu"}}
ROWS = """
babu:
  settings: {method: {name: fedbabu}}
slow:
  label: F2L, slow
  settings: {method: {name: f2l, inner_lr: 0.001}}
  exchanges: 2
"""
TABLE = """
title: A table of ours
settings:
  data: {name: digits}
  split: {base: ["0-3"], validation: ["4-5"], novel: ["6-9"]}
  test: {way: 2}
columns: {one: {settings: {episode: {shot: 1}}}, five: {settings: {episode: {shot: 5}}}}
rows:
  proto: {settings: {method: fl_proto}}
  maml: {settings: {method: {name: fedmeta}}}
tune: {method.optimizer.lr: {log: [0.0001, 0.01]}}
budgets: {quick: {exchanges: 4}, long: {exchanges: 40}}
"""


CHOICE = {"choice": [1, 2]}


def tuned(place: str, space: Any) -> Any:
    return {"mine": {"settings": METHOD, "tune": {place: space}}}


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_of_a_folder_of_results_join_the_recipe(tmp_path: Path) -> None:
    bare = load("f2l-huffpost", tmp_path)
    assert bare == load("f2l-huffpost")
    written(tmp_path / "f2l-huffpost" / "rows.yaml", ROWS)
    recipe = load("f2l-huffpost", tmp_path)
    assert list(recipe.rows) == [*bare.rows, "babu", "slow"]
    assert bare == load("f2l-huffpost"), "the recipe itself is as it was"
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
        ([], "rows.yaml holds []; expected keys and values"),
        ({"../up": {"settings": METHOD}}, "the key of a row is '../up'; expected up to 60"),
        ({7: {"settings": METHOD}}, "the key of a row is 7; expected up to 60 letters"),
        ({"f2l": {"settings": METHOD}}, "f2l-huffpost has a row 'f2l'. Choose another"),
        ({"F2L": {"settings": METHOD}}, "f2l-huffpost has a row 'F2L'. Choose another"),
        ({"A": {"settings": METHOD}, "a": {"settings": METHOD}}, "differ only in capital letters"),
        (tuned("method.name", {"choice": ["f2l", "frl"]}), "would search for method.name"),
        ({"mine": None}, "row mine is null; expected keys and values. A null removes"),
        ({"mine": {}}, "row mine names no method"),
        ({"mine": {"settings": {"method": ["f2l"]}}}, "row mine names no method"),
        ({"mine": {"settings": METHOD | {"seed": 1}}}, "row mine sets seed; a row may set"),
        ({"mine": {"settings": METHOD | {"test": {"shot": 5}}}}, "sets test.shot"),
        ({"mine": {"settings": METHOD, "exchanges": 0}}, "exchanges is 0; expected a whole"),
        (
            {"mine": {"settings": METHOD, "stops_after": 1, "exchanges": 2}},
            "takes 2 exchanges for one round, and stops_after is 1",
        ),
        ({"mine": {"settings": METHOD, "published": [1.0]}}, "has 1 numbers for 4 columns"),
        ({"mine": {"settings": METHOD, "published": ["x"] * 4}}, "published is ['x'"),
        ({"mine": {"settings": METHOD, "deviations": "x"}}, "deviations is 'x'; expected a list"),
        (tuned("seed", {"choice": [1]}), "sets seed; a row may"),
        (tuned("method.rounds", [1]), "tune is {'method.rounds': [1]}; expected options"),
        (tuned("method.lr", {"log": [0, 1]}), "method.lr is {'log': [0, 1]}; expected {log"),
        (tuned("method.inner_lr", {"log": [0.1, 1]}), "row mine, tune: 'method.inner_lr' belongs"),
    ],
)
def test_rows_that_cannot_be_are_refused(rows: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        joined(load("f2l-huffpost"), rows, "rows.yaml")
    assert words in str(refused.value)


def test_a_space_that_none_can_be_drawn_from_is_refused() -> None:
    for space in (
        {"log": [1, float("inf")]}, {"log": ["1e-3", 1]}, {"linear": [1, 0]}, {"normal": [0, 1]},
        {"log": [1, 2], "linear": [1, 2]},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"expected \{log"):
            joined(load("f2l-huffpost"), tuned("method.lr", space), "rows.yaml")


def test_a_picture_takes_no_rows() -> None:
    with pytest.raises(ConfigError, match="a picture without rows"):
        joined(load("pfedfsl-fig5"), {"mine": {"settings": METHOD}}, "rows.yaml")


def test_a_table_of_ones_own_is_known_where_its_results_are(tmp_path: Path) -> None:
    written(tmp_path / "ours" / "recipe.yaml", TABLE)
    assert set(names(tmp_path)) == {*names(), "ours"}
    with pytest.raises(ConfigError, match="there is no recipe 'ours'"):
        load("ours")
    with pytest.raises(ConfigError, match="there is no recipe"):
        load("../ours", tmp_path / "f2l-huffpost")
    recipe = load("ours", tmp_path)
    assert (recipe.kind, recipe.default_budget) == ("table", "quick")
    cells = recipe.cells(recipe.default_budget)
    assert [cell.key for cell in cells] == ["proto/one", "proto/five", "maml/one", "maml/five"]
    for cell in cells:
        run = Config.of(cell.settings()).run
        assert (run.rounds, run.threads) == (4, 1), "several cells at once"
        assert cell.published is None
        assert budget_marks(cell) == [], "no paper whose budget another would depart from"
        assert not cell.row.own


def test_shorthand_and_defaults_can_be_timed_and_run(tmp_path: Path) -> None:
    text = TABLE.replace("  test: {way: 2}\n", "  partition: iid\n  run: {threads: null}\n")
    written(tmp_path / "ours" / "recipe.yaml", text.replace("quick", "two-cores"))
    recipe = load("ours", tmp_path)
    for cell in recipe.cells("two-cores"):
        assert timing.key(cell)
        assert timing.short(cell)["run"]["cohort"] == 1
        assert cell.settings()["run"]["threads"] == 1
    often = read("t", trees.parse(TABLE + "kind: table\n", origin="t"))
    often = replace(often, settings=often.settings | {"run": {"validate_every": "often"}})
    with pytest.raises(ConfigError, match="validate_every"):
        Config.of(often.cells("quick")[0].settings())


def test_a_budget_may_have_a_dash_in_its_name(tmp_path: Path) -> None:
    recipe = read("t", trees.parse(TABLE.replace("quick", "two-cores"), origin="t"))
    left = current("t", "two-cores-tune2", [], recipe)
    assert left == ([], [])
    assert plots.write(tmp_path, recipe, "two-cores") == []


def test_trials_of_a_method_that_is_not_here_hold_up_nobody(tmp_path: Path) -> None:
    rows = {"mine": {"settings": {"method": {"name": "nowhere"}}}}
    recipe = joined(load("digits"), rows, "rows.yaml")
    written(tmp_path / "digits" / "small-tune2" / "mine.tune.json", "{}")
    bench = RecipeRunner(Request(recipe, tune=2, runs=tmp_path, results=tmp_path))
    assert bench.tuned["mine"] is None


def test_a_table_like_another_has_what_differs_and_no_published_numbers(tmp_path: Path) -> None:
    text = """
    like: f2l-huffpost
    title: F2L on our texts
    settings: {data: {name: folder, path: texts, dim: null}, test: {episodes: 50}}
    columns: {iid-1: null, iid-5: {label: 5 examples}}
    rows:
      fl-maml: null
      fl-proto: {published: [40.5, null, null]}
      ours: {settings: {method: {name: fedbabu}}}
    """
    written(tmp_path / "ours" / "recipe.yaml", text)
    recipe, base = load("ours", tmp_path), load("f2l-huffpost")
    assert list(recipe.rows) == [*(key for key in base.rows if key != "fl-maml"), "ours"]
    assert list(recipe.columns) == ["iid-5", "noniid-1", "noniid-5"]
    assert recipe.columns["iid-5"] == replace(base.columns["iid-5"], label="5 examples")
    assert recipe.settings["data"] == {"name": "folder", "path": "texts", "cut": 44}
    assert recipe.settings["test"] == base.settings["test"] | {"episodes": 50}
    assert (recipe.source, recipe.budgets) == ("no paper", base.budgets)
    assert recipe.rows["fl-proto"].published == (40.5, None, None)
    assert {row.published for key, row in recipe.rows.items() if key != "fl-proto"} == {(None,) * 3}
    assert {row.spread for row in recipe.rows.values()} == {(None,) * 3}


def test_like_names_a_whole_recipe_of_fedshot(tmp_path: Path) -> None:
    file = written(tmp_path / "ours" / "recipe.yaml", "{like: f2l-hufpost, title: T}")
    with pytest.raises(ConfigError, match=r"not a recipe of fedshot. Did you mean 'f2l-huffpost'"):
        load("ours", tmp_path)
    file.write_text("{like: f2l-fc100, title: T}", encoding="utf-8")
    with pytest.raises(ConfigError, match="Set like to 'f2l-huffpost'"):
        load("ours", tmp_path)
    file.write_text("like: [f2l-fc100]", encoding="utf-8")
    with pytest.raises(ConfigError, match="which is not a recipe of fedshot"):
        load("ours", tmp_path)
    file.write_text("{like: f2l-huffpost}", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no title"):
        load("ours", tmp_path)


def test_rows_beside_a_table_of_ones_own_are_not_passed_over(tmp_path: Path) -> None:
    file = written(tmp_path / "ours" / "recipe.yaml", TABLE)
    (file.parent / "rows.yaml").write_text(ROWS, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"Move its rows into"):
        load("ours", tmp_path)


def test_fedshots_own_recipes_are_not_taken_the_place_of(tmp_path: Path) -> None:
    written(tmp_path / "digits" / "recipe.yaml", TABLE)
    assert names(tmp_path) == names()
    with pytest.raises(ConfigError, match="call the file rows"):
        load("digits", tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("title: A table of ours", "", "recipe t has no title"),
        ("  data: {name: digits}\n", "", "recipe t names no data. Set settings.data.name"),
        ("  data: {name: digits}\n", "  data: [1]\n", "data is [1]; expected a name, or keys"),
        ("  data: {name", "  run: fast\n  data: {name", "run is 'fast'; expected keys and values"),
        ("  data: {name", "  seed: 7\n  data: {name", "sets seed, which differs between runs"),
        ("five: {settings: {", "five: {settings: {name: x, ", "column five sets name"),
        ("method.optimizer.lr: {", "run.cohort: {", "tune sets run.cohort; a row may set"),
        (
            "method.optimizer.lr: {",
            "method.optimiser.lr: {",
            "recipe t, tune: there is no option 'method.optimiser.lr'. Did you mean 'method.optimi",
        ),
        ("method.optimizer.lr: {", "method: {", "would search for method, but a row is one"),
        (
            "proto: {settings: {method: fl_proto}}",
            "proto: {settings: {method: fl_proto}, tune: {method.optimizer: {choice: [1]}}}",
            "row proto would search for method.optimizer in its own space",
        ),
        (
            "{settings: {method: fl_proto}}",
            "{settings: {method: fl_proto}, exchanges: 5}",
            "row proto takes 5 exchanges for one round, and budget quick has 4",
        ),
        ("quick: {exchanges: 4}", "quick-tune4: {exchanges: 4}", "cannot be called 'quick-tune4'"),
        ("columns: {one:", "columns: {Tune:", "a column cannot be called 'Tune'"),
        ("five: {settings", "five: {x: .nan, settings", "x is nan; expected a finite number"),
        ("quick: {exchanges: 4}", "quick: {}", "budget quick has no exchanges"),
        ("quick: {exchanges: 4}", "quick: {exchanges: x}", "exchanges is 'x'; expected a whole"),
        ("quick: {exchanges: 4}", "quick: {exchanges: 0}", "exchanges is 0; expected a whole"),
        ("columns: {one:", "columns: {o/e:", "the key of a column is 'o/e'"),
        ("columns: {one: {settings", "columns: {one: {setting", "Did you mean 'settings'"),
        ("budgets: {quick", "budgets: {..", "the key of a budget is '..'"),
        ("proto: {settings", "proto: {label: 5, settings", "label is 5; expected text, in quotes"),
        (
            "proto: {settings: {method: fl_proto}}",
            "proto: {settings: {method: fl_proto}, tune: {method.optimizer.lr: {log: [1, 2]}}}",
            "row proto would search for method.optimizer.lr in its own space",
        ),
        ("{log: [0.0001, 0.01]}", "{log: [0.01, 1e-4]}", "is {'log': [0.01, 0.0001]}; expected"),
    ],
)
def test_a_table_that_cannot_be_is_refused(old: str, new: str, words: str, tmp_path: Path) -> None:
    assert old in TABLE
    written(tmp_path / "t" / "recipe.yaml", TABLE.replace(old, new))
    with pytest.raises(ConfigError) as refused:
        load("t", tmp_path)
    assert words in str(refused.value)


def test_a_tuned_option_may_be_of_one_row_or_of_a_method_that_is_not_loaded() -> None:
    tree = parse(TABLE.replace("method.optimizer.lr", "method.inner_lr"), origin="t")
    tree["rows"]["frl"] = {"settings": {"method": "frl"}}
    assert list(read("t", tree).tune) == ["method.inner_lr"]
    tree["rows"] = {"own": {"settings": {"method": "not_loaded"}, "tune": {"method.x": CHOICE}}}
    assert list(read("t", tree).rows) == ["own"]


@pytest.mark.parametrize(
    ("name", "told"), [("parts", []), ("sent140", ["the whole set is larger"])]
)
def test_ones_own_data_are_whole(name: str, told: list[str]) -> None:
    data = {"name": name, "digest": "d", "examples": 70, "published": None}
    found = data_marks([{"data": data, "clients": [3, 3]}])
    assert [mark.rpartition("; ")[2] for mark in found] == told
