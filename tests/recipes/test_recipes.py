"""Recipes: published numbers as data, fair by construction, results that can be had again."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fedshot
from covering import slow
from fedshot.config import settings as trees
from fedshot.config.load import Config
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.methods.registry import METHODS
from fedshot.recipes import provenance, results_page, tables, timing
from fedshot.recipes.index import content, load, names
from fedshot.recipes.plan import Obstacle, budget_marks, check_cell, comparable, marks
from fedshot.recipes.reading import read
from fedshot.recipes.recipe import Recipe
from fedshot.recipes.results import Results, score_of
from fedshot.recipes.runner import RecipeRunner, Request, State, current
from fedshot.recipes.tuning import SEED, Search
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

from .example_recipe import changed, example, facts, finished_cells, made
from .published_tables import DATA, SPREADS, TABLES

EXPECTED = {
    "digits",
    "robustness",
    "cifar-fs",
    "images-from-scratch",
    *(f"fedfsl-{n}" for n in ("sent140", "mini", "fc100", "fig6", "fig7", "fig8")),
    "fedfsl-k-exclusive",
    *(f"f2l-{n}" for n in ("20news", "huffpost", "fc100", "mini", "fig4", "fig5", "fig6")),
    "f2l-fig4-huffpost",
    "f2l-fig6-5shot",
    "f2l-fig6-huffpost",
    "encoder-20news",
    "encoder-huffpost",
    "f2l-official",
    "f2l-readings",
    "pfedfsl-steps",
    *(f"frl-{n}" for n in ("table1", "table2", "table3", "a1", "b1", "b2", "c1", "c2", "d1")),
    *(f"frl-{n}" for n in ("e1", "e1-order", "e1-ways", "f1", "fig2")),
    *(f"pfedfsl-{n}" for n in ("table1", "table2", "table3", "fig2", "fig3", "fig4", "fig5")),
    *(f"pfedfsl-tuned-{n}" for n in ("mnist", "cifar100")),
}
ELSEWHERE = {"frl-c1", "frl-c2", "fedfsl-fig8", "fedfsl-k-exclusive"}
"""Recipes that also hold numbers which the paper prints in another table."""


@cache
def every_recipe() -> dict[str, Recipe]:
    """Return all recipes by name, read when the first test asks: collection needs none."""
    return {name: load(name) for name in names()}


def swept(value: Any) -> dict[str, Any]:
    """A sweep with such a value on its axis."""
    tree = changed(kind="sweep")
    tree["rows"]["proto"]["at"] = {"m": value}
    return tree


def of_row(key: str, own: Any) -> dict[str, Any]:
    """A recipe whose small budget sets options of one row."""
    tree = changed()
    tree["budgets"]["small"]["rows"] = {key: own}
    return tree


def test_every_table_and_figure_has_a_recipe() -> None:
    assert set(names()) == EXPECTED


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_recipe_reads_and_its_cells_are_configurations(name: str, every: bool) -> None:
    """Every cell; or every budget, column and method at least once, in few cells."""
    recipe = load(name)
    if recipe.kind == "picture":
        assert Config.of(recipe.settings)
        return
    cells = [
        ({f"budget {budget}", f"column {cell.column.key}", f"method {cell.row.method}"}, cell)
        for budget in recipe.budgets
        for cell in recipe.cells(budget)
        if cell.row.method in METHODS
    ]
    seen: set[str] = set()
    while cells:
        at = 0 if every else max(range(len(cells)), key=lambda i: len(cells[i][0] - seen))
        layers, cell = cells.pop(at)
        if not every and layers <= seen:
            break
        seen |= layers
        config = Config.of(cell.settings())
        assert config.run.threads == 1, "bits depend on it"


def test_published_numbers_agree_with_a_second_transcription() -> None:
    for name, table in TABLES.items():
        agrees_with(load(name), table, name)


def agrees_with(recipe: Any, table: Any, name: str) -> None:
    rows = {key: list(row.published) for key, row in recipe.rows.items() if any(row.published)}
    second = {key: row for key, row in table.items() if any(row)}
    if name in ELSEWHERE:  # of its numbers, those of the second transcription
        rows = {
            key: [number if known else None for number, known in zip(rows[key], row, strict=True)]
            for key, row in second.items()
        }
    assert rows == second


def test_published_spreads_agree_with_a_second_transcription() -> None:
    for name, spreads in SPREADS.items():
        rows = load(name).rows
        printed = {key: list(row.spread) for key, row in rows.items() if any(row.published)}
        assert printed == spreads, name


def test_a_published_number_stands_beside_the_papers_own_data_alone() -> None:
    for name in EXPECTED:
        stands_beside_the_papers_own_data(name)


def stands_beside_the_papers_own_data(name: str) -> None:
    recipe = load(name)
    printed = [f"{key}/*" for key, row in recipe.rows.items() if any(row.published)]
    budgets = recipe.budgets if printed else ()
    for cell in (cell for budget in budgets for cell in recipe.cells(budget, printed)):
        if cell.published is None:
            assert cell.spread is None
            continue
        papers = DATA[name]
        place = list(recipe.columns).index(cell.column.key) if len(papers) > 1 else 0
        data = cell.settings()["data"]
        assert (data["name"], data.get("variant")) == papers[place], (cell.budget.name, cell.key)


def test_a_budget_on_other_data_names_them_and_compares_with_no_number(tmp_path: Path) -> None:
    """As `fc100-head` of two recipes of miniImageNet, and `digits` of one of MNIST."""
    tree = changed()
    split = {"base": ["0-2"], "novel": ["3-9"]}
    tree["budgets"]["elsewhere"] = {"exchanges": 4, "settings": {"data": {"name": "mnist"}}}
    tree["budgets"]["otherwise"] = {"exchanges": 4, "settings": {"split": split}}
    recipe = read("t", tree)
    for budget in ("elsewhere", "otherwise"):
        cells = recipe.cells(budget)
        assert not any(cell.published or cell.spread for cell in cells)
        states = finished_cells(recipe, tmp_path, budget=budget)
        text = tables.as_text(recipe, budget, states, width=300)
        told = "mnist" if budget == "elsewhere" else "digits"
        assert f"A test; here on {told}, budget {budget}" in text
        assert "Published on other data, and so not shown: nothing." in text
        rows = [line for line in text.splitlines() if "-shot" in line]
        assert all(row.split()[2] == "-" and "+" not in row for row in rows)
    for name, budget in (("fedfsl-fig8", "fc100-head"), ("fedfsl-k-exclusive", "fc100-head")):
        title = load(name).title_of(load(name).cells(budget))
        assert title.endswith("miniImageNet; here on cifar100 (variant fc100)")
    assert load("fedfsl-fig8").title_of(load("fedfsl-fig8").cells("small")).endswith("miniImageNet")


def test_a_papers_recipe_leaves_nothing_to_defaults() -> None:
    """A table of one's own may: a paper's has source, both budgets and published numbers."""
    for name in EXPECTED:
        leaves_nothing_to_defaults(name)


def leaves_nothing_to_defaults(name: str) -> None:
    held = content(name)
    assert {"title", "source", "kind", "measure", "settings"} <= held.keys()
    if held["kind"] != "picture":
        assert {"paper", "small"} <= held["budgets"].keys()
    assert all("label" in column for column in held.get("columns", {}).values())
    needs = {"label"} if held["source"].startswith("no paper") else {"label", "published"}
    assert all(needs <= row.keys() for row in held.get("rows", {}).values())


def test_the_recipes_of_fedfsls_two_tables_differ_in_their_data_alone() -> None:
    mini, fc100 = load("fedfsl-mini"), load("fedfsl-fc100")
    assert mini.columns == fc100.columns
    assert all(row.settings == fc100.rows[k].settings for k, row in mini.rows.items())
    for budget in ("paper", "head"):
        assert mini.budget(budget) == fc100.budget(budget)


def test_a_row_cannot_have_data_clients_or_tests_of_its_own() -> None:
    for place, own in (
        ("partition.clients", {"partition": {"clients": 3}}),
        ("test.episodes", {"test": {"episodes": 9}}),
        ("run.cohort", {"run": {"cohort": 2}}),
        ("model.backbone.name", {"model": {"backbone": {"name": "mlp"}}}),
    ):
        tree = changed()
        tree["rows"]["proto"]["settings"] |= own
        with pytest.raises(ConfigError, match=f"row proto sets {place}; a row may set only method"):
            read("t", tree)


def test_on_features_of_a_frozen_encoder_a_row_chooses_its_layers() -> None:
    tree = changed()
    tree["settings"]["model"]["encoder"] = {"name": "transformers", "path": "vit"}
    tree["rows"]["proto"]["settings"] |= {"model": {"backbone": {"name": "mlp", "hidden": []}}}
    cell = read("t", tree).cells("paper", ["proto/one"])[0]
    assert cell.settings()["model"]["backbone"] == {"name": "mlp", "hidden": []}


def test_rounds_are_exchanges_over_those_of_one_round() -> None:
    tree = changed()
    tree["rows"]["local"]["exchanges"] = 4
    tree["budgets"]["small"]["exchanges"] = 4
    proto, local = (c for c in read("t", tree).cells("paper") if c.column.key == "one")
    assert proto.settings()["run"]["rounds"] == 10
    assert local.settings()["run"]["rounds"] == 2


def test_layers_lie_over_each_other_and_a_null_takes_away() -> None:
    tree = changed()
    tree["columns"]["one"]["settings"] = {"episode": {"query": None, "shot": 2}}
    settings = read("t", tree).cells("small")[0].settings(seed=7)
    assert settings["episode"] == {"way": 3, "shot": 2}
    assert settings["model"]["backbone"] == {"name": "mlp", "hidden": [4]}
    assert settings["model"]["head"] == {"name": "none"}
    assert (settings["seed"], settings["name"]) == (7, "t.proto.one")


def test_a_budget_sets_options_of_single_rows_over_theirs() -> None:
    tree = changed()
    tree["rows"]["proto"]["settings"]["method"]["local_steps"] = 4
    tree["budgets"]["small"]["rows"] = {"proto": {"method": {"local_steps": 2}}}
    found = {
        (row, budget): read("t", tree).cells(budget, [f"{row}/one"])[0].settings()["method"]
        for row in ("proto", "local")
        for budget in ("small", "paper")
    }
    assert found["proto", "small"]["local_steps"] == 2
    assert found["proto", "paper"]["local_steps"] == 4
    assert found["local", "small"] == found["local", "paper"], "the other row's are its own"


def test_half_of_the_rounds_are_half_of_them_in_every_budget() -> None:
    """Meta-Baseline classifies in the first half, says the recipe."""
    for budget in (recipe := load("cifar-fs")).budgets:
        settings = recipe.cells(budget, ["meta-baseline/iid-1"])[0].settings()
        assert settings["method"]["classify_rounds"] * 2 == settings["run"]["rounds"]


def test_cells_are_chosen_by_pattern_and_a_slip_is_told() -> None:
    recipe = example()
    assert [c.key for c in recipe.cells("small", ["proto/*"])] == ["proto/one", "proto/five"]
    assert [c.key for c in recipe.cells("small", ["*/five"])] == ["proto/five", "local/five"]
    with pytest.raises(
        ConfigError, match=r"no cell of t matches 'prot/one'. Did you mean 'proto/one'"
    ):
        recipe.cells("small", ["prot/one"])
    with pytest.raises(ConfigError, match="Did you mean 'f2l-fc100'"):
        load("f2l-fc10")


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (changed(kind="pie"), "kind is 'pie'; expected one of table, curve, sweep"),
        (changed(extra=1), "recipe t has 'extra'. Valid"),
        (changed(against=[]), "against is empty. Name one of megabytes, rounds"),
        (changed(against=["round"]), "recipe t: against has 'round'. Did you mean 'rounds'"),
        (changed(budgets={}), "needs rows, columns and budgets, at least one of each"),
        (changed(kind="curve"), "every column needs an x"),
        (changed(axis="m"), "is a table and has axis, which is for a curve. Leave it out, or set"),
        (changed(kind="sweep", against=["rounds"]), "is a sweep and has against, which is for a t"),
        (
            changed(columns={"one": {"label": "1", "x": 1}, "five": {"label": "5"}}),
            "is a table and has x in a column, which is for a curve",
        ),
        (changed(kind="sweep"), "is a sweep, and row proto has no at"),
        (swept("1e-5"), "row proto: at is {'m': '1e-5'}; expected axes and numbers"),
        (changed(columns={"one": {"label": "1"}}), "row proto has 2 numbers for 1 columns"),
        (of_row("locla", {}), "budget small sets options of row 'locla', .* Did you mean 'local'"),
        (of_row("local", {"episode": {"way": 2}}), "row local sets episode.way; a row may set"),
        (of_row("local", {"method": "fl_proto"}), "row local names a method, but a row is one"),
        (of_row("local", {"method": {"name": "fl_proto"}}), "row local names a method, but a row"),
        (of_row("local", None), "rows is {'local': None}; expected keys of rows"),
        ([], "expected keys and values"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(tree: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read("t", tree)


def test_what_sets_a_budget_apart_is_told_from_the_settings_themselves() -> None:
    small, paper = (example().cells(budget)[0] for budget in ("small", "paper"))
    assert budget_marks(small) == [
        "2 of 10 communication rounds",
        "backbone: mlp (hidden [4]), not mlp (hidden [8])",
    ]
    assert budget_marks(paper) == []


def test_what_a_budget_alone_sets_is_told_beside_its_default() -> None:
    tree = changed()
    tree["budgets"]["small"]["settings"]["episode"] = {"shot": 2}
    tree["budgets"]["paper"]["settings"] = {"episode": {"queries": "exact"}}
    told = budget_marks(read("t", tree).cells("small")[0])
    assert "episode.shot: 2, not 1" in told
    assert not [text for text in told if "queries" in text], "the default, said or not"


def test_marks_tell_subsets_clients_and_troubles(tmp_path: Path) -> None:
    cell = example().cells("paper")[0]
    told = facts(
        data={"name": "digits", "digest": "d", "examples": 700, "published": 1797},
        clients=[3, 4],
        made=[made("0123+")],
        faults=2,
        round=0,
    )
    told["test"]["transductive"] = True
    result = Results(tmp_path).add(cell, "paper", None, 0, told)
    assert marks(cell, result) == [
        "data: 700 of 1,797 examples",
        "3 of 4 clients can form an episode",
        "round 0 (before training)",
        "transductive: predictions may depend on other queries",
        "2 replies rejected or lost",
        "trained with code that was not committed",
    ]


def test_rows_that_sat_other_episodes_are_named(tmp_path: Path) -> None:
    one, _, two, _ = example().cells("small")
    other = facts()
    other["test"]["tasks"] = "xyz"
    results = Results(tmp_path)
    held = {
        "proto": results.add(one, "small", None, 0, facts()),
        "local": results.add(two, "small", None, 0, other),
    }
    assert comparable(held) == ["rows differ in their test episodes at seed 0"]


def test_an_episode_that_cannot_be_formed_is_an_obstacle_and_so_is_a_method_to_come() -> None:
    tree = changed()
    tree["columns"]["one"]["settings"] = {"episode": {"shot": 500}}
    tree["rows"]["new"] = {"label": "N", "settings": {"method": {"name": "xyz"}},
                           "published": [1, 2]}  # fmt: skip
    cells = {cell.key: cell for cell in read("t", tree).cells("small")}
    found, seen = check_cell(cells["proto/one"], None)
    assert found is not None
    assert seen is None
    assert found.kind == "too little data"
    assert "3-way 500-shot" in found.reason
    nothing, seen = check_cell(cells["proto/five"], None)
    assert nothing is None
    assert seen is not None
    assert seen["clients"] == [4, 4]
    words = "there is no method 'xyz'. For a method of your own, set FEDSHOT_METHODS=my_method.py"
    none_yet = Obstacle("no method", words)
    assert check_cell(cells["new/one"], None) == (none_yet, None)


def test_missing_data_are_an_obstacle_and_nothing_is_filled_in(tmp_path: Path) -> None:
    cell = load("f2l-huffpost").cells("small", ["fl-proto/iid-1"])[0]
    found, _ = check_cell(cell, str(tmp_path))
    assert found is not None
    assert found.kind == "no data"
    state = State(cell, obstacle=found)
    letters = tables.Marks()
    assert tables.cells(state, letters)[3] == "no data"


def test_a_result_comes_back_as_it_went_in(tmp_path: Path) -> None:
    cell = example().cells("small")[0]
    results = Results(tmp_path)
    results.add(cell, "small", None, 0, facts(0.5))
    results.add(cell, "small", None, 1, facts(0.7))
    found = results.of(cell, "small", None)
    assert found is not None
    assert sorted(found.seeds) == [0, 1]
    assert found.seeds[1]["right"] == [7] * 10
    assert score_of(found.seeds[1])["per_episode"] == [0.7] * 10
    assert found.score["accuracy"] == pytest.approx(0.6, abs=1e-15)
    assert found.command() == "fedshot reproduce t --cells 'proto/one' --budget small --seeds 2"


def test_accuracies_that_are_no_counts_are_kept_as_they_are(tmp_path: Path) -> None:
    told = facts()
    told["test"]["per_episode"] = [1 / 3] * 10
    result = Results(tmp_path).add(example().cells("small")[0], "small", None, 0, told)
    assert score_of(result.first)["per_episode"] == [1 / 3] * 10


def test_every_method_has_the_same_trials_of_what_all_share() -> None:
    recipe = example()
    rows = recipe.rows.values()
    one, two = (Search.of(recipe, "small", row, 6, Path()).trials for row in rows)
    assert one[0] == two[0] == {}
    assert len(one) == len(two) == 6
    lr = "method.optimizer.lr"
    assert [t[lr] for t in one[1:]] == [t[lr] for t in two[1:]]
    assert all(1e-4 <= t[lr] <= 1e-2 for t in one[1:])
    assert len({t[lr] for t in one[1:]}) == 5
    assert {t["method.local_steps"] for t in two[1:]} <= {1, 2, 3}


def test_tuning_without_a_space_is_refused() -> None:
    tree = changed(tune={})
    recipe = read("t", tree)
    with pytest.raises(ConfigError, match="recipe t has no search space"):
        Search.of(recipe, "small", recipe.rows["proto"], 2, Path())


def test_the_best_trial_on_validation_classes_is_chosen(tmp_path: Path) -> None:
    recipe = example()
    row = recipe.rows["proto"]
    search = Search.of(recipe, "small", row, 3, tmp_path)
    looks = ((0.9, 0.4), (0.2, 0.6), (0.2, 0.6))  # before training, and at the chosen round
    told = [facts(validation=[[0, a, 0], [2, b, 0]]) for a, b in looks]
    assert search.write(told) == search.read() == search.trials[1]
    other = Search.of(recipe, "small", row, 4, tmp_path)
    assert other.read() is None, "other trials were asked for"
    tree = changed()
    tree["settings"]["episode"]["query"] = 4
    now = Search.of(read("t", tree), "small", row, 3, tmp_path)
    assert now.read() is None, "the recipe has changed since"
    kept = json.loads(search.file.read_text())["trials"]
    assert [trial["best_validation"] for trial in kept] == [0.4, 0.6, 0.6]


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
def test_a_long_budget_may_be_tuned_in_a_short_one(tmp_path: Path) -> None:
    tree = changed()
    tree["budgets"]["paper"]["trials_as"] = "small"
    request = Request(
        read("t", tree), "paper", ("*/one",), seeds=1, tune=2, runs=tmp_path, results=tmp_path
    )
    bench = RecipeRunner(request)
    bench.check()
    jobs = {e.job.key: e.job for e in bench.run()}
    rounds = {(job.do, job.settings["run"]["rounds"]) for job in jobs.values()}
    assert rounds == {("tune", 2), ("train", 10)}
    assert all(state.result for state in bench.states.values())
    shown, left = current("t", "paper-tune2", Results(tmp_path).readable("t"), request.recipe)
    assert (len(shown), left) == (2, [])
    told = marks(shown[0].cell, shown[0].result)
    assert any(mark.startswith("tuned with 2 trials of budget small: ") for mark in told)
    row = request.recipe.rows["proto"]
    small, paper = (Search.of(request.recipe, budget, row, 2, tmp_path) for budget in
                    ("small", "paper"))  # fmt: skip
    assert small == paper


def test_the_cell_of_trials_is_looked_at_and_not_its_like_in_the_long_budget(
    tmp_path: Path,
) -> None:
    tree = changed()
    tree["budgets"]["paper"]["trials_as"] = "small"
    tree["budgets"]["small"]["settings"]["partition"] = {"name": "iid", "clients": 4000}
    request = Request(read("t", tree), budget="paper", tune=2, runs=tmp_path, results=tmp_path)
    bench = RecipeRunner(request)
    bench.check()
    for state in bench.states.values():
        assert state.obstacle is not None
        assert "in which it is tuned: cannot divide" in state.obstacle.reason


def test_trials_of_a_long_budget_live_where_those_of_the_short_one_do(tmp_path: Path) -> None:
    tree = changed()
    tree["budgets"]["paper"]["trials_as"] = "small"
    recipe, found = read("t", tree), []
    for budget in ("small", "paper"):
        bench = RecipeRunner(
            Request(recipe, budget=budget, tune=2, runs=tmp_path, results=tmp_path)
        )
        cell = bench._search(recipe.rows["proto"]).cell
        found.append(bench._job(cell, SEED, "tune", {}).folder)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("there", "text"),
    [
        (
            "smal",
            "budget paper: trials_as is 'smal', a budget that does not exist. Did you mean 'small'",
        ),
        ("paper", "budget paper: trials_as is 'paper'; expected another budget, and one"),
    ],
)
def test_trials_in_a_budget_that_is_none_are_refused(there: str, text: str) -> None:
    tree = changed()
    tree["budgets"]["paper"]["trials_as"] = there
    with pytest.raises(ConfigError, match=text):
        read("t", tree)


def test_what_a_budget_sets_for_a_row_is_that_of_rows_trained_as_it() -> None:
    tree = changed()
    tree["rows"]["other"] = deepcopy(tree["rows"]["proto"]) | {"trained_as": "proto"}
    tree["budgets"]["small"]["rows"] = {"proto": {"method": {"local_steps": 2}}}
    recipe = read("t", tree)
    for row in ("proto", "other"):
        assert recipe.cells("small", [f"{row}/one"])[0].settings()["method"]["local_steps"] == 2


def test_a_search_may_not_undo_what_a_budget_sets_for_a_row() -> None:
    tree = changed()
    tree["budgets"]["small"]["rows"] = {"proto": {"method": {"optimizer": {"lr": 0.1}}}}
    text = "budget small, row proto sets method.optimizer.lr, and a search for method.optimizer.lr"
    with pytest.raises(ConfigError, match=text):
        read("t", tree)


def test_the_table_tells_the_data_the_budget_and_the_difference(tmp_path: Path) -> None:
    recipe = example()
    results = Results(tmp_path)
    states = [State(cell, result=results.add(cell, "paper", None, 0, facts(0.525)), wanted=2)
              for cell in recipe.cells("paper")]  # fmt: skip
    text = tables.as_text(recipe, "paper", states)
    assert "A test, budget paper" in text
    assert "Data: digits, 1,797 examples (d)." in text
    line = next(line for line in text.splitlines() if "Local" in line and "1-shot" in line)
    assert line.split() == [
        "Local", "1-shot", "40.00", "±", "1.50", "52.50", "±", "?", "+12.50", "1", "a",
    ]  # fmt: skip
    assert "a: 1 of 2 seeds so far" in text


def test_the_success_of_a_backdoor_is_a_column_beside_the_accuracy(tmp_path: Path) -> None:
    recipe, results = example(), Results(tmp_path)
    cells = recipe.cells("paper", ["proto/*"])
    states = finished_cells(recipe, tmp_path, "proto/*", budget="paper")
    assert "backdoor" not in tables.as_text(recipe, "paper", states).lower()
    for seed, share in ((0, 1.0), (1, 0.5)):
        one = facts(attack={"liars": [3], "backdoor": share})
        states[0].result = results.add(cells[0], "paper", None, seed, one)
    assert [one["backdoor"] for one in json.loads(tables.as_json(states))] == [0.75, None]
    assert "75.0" in tables.as_text(recipe, "paper", states, width=200)
    page = results_page.pages(tmp_path, {"t": recipe})["results/t.md"]
    head, _, *lines = [line.split("|") for line in page.splitlines() if line.startswith("|")]
    at = head.index(" backdoor succeeds ")
    assert [line[at].strip() for line in lines] == ["75.0", ""]


def test_the_zeros_of_a_model_are_columns_beside_the_accuracy(tmp_path: Path) -> None:
    recipe, results = example(), Results(tmp_path)
    cell, other = recipe.cells("paper", ["proto/*"])
    dense = facts(metrics={"zeros": 0.005, "near_zero": 0.5})
    states = [State(cell, result=results.add(cell, "paper", None, 2, dense))]
    assert "zeros" not in tables.as_text(recipe, "paper", states).lower(), "no model is sparse"
    for seed, zeros in ((0, 0.3), (1, 0.4), (2, 0.35)):
        one = facts(metrics={"loss": 1.0, "zeros": zeros, "near_zero": 0.5})
        state = State(cell, result=results.add(cell, "paper", None, seed, one))
    states = [state, State(other, result=results.add(other, "paper", None, 0, facts()))]
    assert [one["zeros"] for one in json.loads(tables.as_json(states))] == [
        pytest.approx(0.35),
        None,
    ]
    for text in (
        tables.as_text(recipe, "paper", states, width=200),
        results_page.pages(tmp_path, {"t": recipe})["results/t.md"],
    ):
        assert re.search(r"35\.0\W+50\.0", text)
        assert "Zeros: percent of the weights" in text


def test_what_sets_seeds_apart_from_each_other_is_told(tmp_path: Path) -> None:
    cell = example().cells("paper")[0]
    results = Results(tmp_path)
    results.add(cell, "paper", None, 0, facts())
    other = facts(made=[made("0123"), made("4567", after=3)])
    other["test"] |= {"tasks": "xyz", "transductive": True}
    other["data"] = {"name": "digits", "digest": "e", "examples": 700, "published": 1797}
    assert marks(cell, results.add(cell, "paper", None, 1, other)) == [
        "data: 700 of 1,797 examples",
        "transductive: predictions may depend on other queries",
        "NOT ONE CELL: its seeds differ in their test episodes",
        "NOT ONE CELL: its seeds differ in their data",
        "stopped, and resumed with other code or on another machine",
    ]


def test_what_a_recipe_or_a_row_never_does_as_the_paper_is_a_mark_in_every_budget() -> None:
    tree = changed(deviations=["10 test episodes, not 600"])
    tree["rows"]["local"]["deviations"] = ["one client answers, not all"]
    for budget in ("paper", "small"):
        cells = {cell.key: marks(cell) for cell in read("t", tree).cells(budget)}
        assert cells["local/one"][:2] == [
            "10 test episodes, not 600",
            "one client answers, not all",
        ]
        assert cells["proto/one"][0] == "10 test episodes, not 600"
        assert "one client answers, not all" not in cells["proto/one"]


F2L_RECIPES = sorted(name for name in EXPECTED if name.startswith("f2l-"))
TRANSFER, ORDER = "(MI) is normalised over the whole support", "is first-order; eq. (4)"


@pytest.mark.parametrize(
    "name",
    ["f2l-fc100", "f2l-official", *slow(*sorted({*F2L_RECIPES} - {"f2l-fc100", "f2l-official"}))],
)
def test_f2l_recipes_tell_what_the_paper_says_otherwise(name: str) -> None:
    """By the settings of each row; what the paper does not say is under `open`."""
    recipe = load(name)
    assert {"transformer", "attention", "head"} <= recipe.open.keys()
    assert not {"transfer", "local tests"} & recipe.open.keys()
    for cell in {cell.row.key: cell for cell in recipe.cells("paper")}.values():
        told, method = " ".join(marks(cell)), Config.of(cell.settings()).settings["method"]
        strict = method["name"] == "f2l" and method["mode"] == "strict"
        assert (ORDER in told) == strict
        assert (TRANSFER in told) == (strict and method["lambda_mi"] != 0)
        alone = method["name"] == "fsl_local" and method["test_clients"] == "round_robin"
        assert ("goes to one client in turn" in told) == alone
        assert ("drawn from all novel examples together" in told) == (
            method.get("mode") != "official"
        )


def test_no_row_of_a_paper_has_the_methods_name_by_a_head_that_is_ours() -> None:
    """F2L's paper says a fully-connected layer; one of prototypes is marked beside all numbers."""
    for recipe in every_recipe().values():
        for row in (row for row in recipe.rows.values() if row.method == "f2l"):
            if row.settings["method"].get("head_start") == "prototypes":
                assert "ours" in recipe.title + row.label, (recipe.name, row.key)
            elif recipe.name.startswith("f2l-") and any(row.published):
                assert "head is learned from zero, our reading" in row.deviations[0]


def test_a_method_of_second_order_says_where_it_is_first() -> None:
    """FedFSL's paper argues for second; the tables of others have it, too."""
    for recipe in every_recipe().values():
        for row in (row for row in recipe.rows.values() if row.method.startswith("fedfsl")):
            first = f"{row.key}/{next(iter(recipe.columns))}"
            cells = [cell for budget in recipe.budgets for cell in recipe.cells(budget, [first])]
            every = [trees.at(cell.settings(), "method.inner") or {} for cell in cells]
            if any(inner.get("order") == "first" and inner.get("steps") for inner in every):
                told = " ".join([*recipe.deviations, *row.deviations])
                assert "first order" in told or "order" in recipe.open, (recipe.name, row.key)


def test_what_recipes_cite_of_each_other_is_there() -> None:
    """A recipe that is named in brackets as the place of a finding has stored cells."""
    root = Path(__file__).parents[2] / "results"
    for recipe in every_recipe().values():
        for text in (*recipe.open.values(), *recipe.deviations):
            for row, name, column in re.findall(r"\(row (\w+) of ([\w-]+), ([\w, -]+)\)", text):
                cited = every_recipe()[name]
                (key,) = (r.key for r in cited.rows.values() if r.label == row)
                (place,) = (c.key for c in cited.columns.values() if c.label == column)
                assert (root / name / "paper" / f"{key}.{place}.json").exists(), (row, name, column)
            for name in re.findall(r"\(([a-z0-9]+(?:-[a-z0-9]+)+)\)", text):
                assert name not in every_recipe() or list((root / name).glob("*/*.json")), name


def test_the_figures_of_f2l_have_the_small_budget_of_its_table() -> None:
    def small(name: str) -> Any:
        return load(name).budget("small")

    for name in ("f2l-fig4", "f2l-fig6", "f2l-fig6-5shot"):
        assert small(name) == small("f2l-fc100")
    for name in ("f2l-fig4-huffpost", "f2l-fig5", "f2l-fig6-huffpost"):
        assert small(name) == small("f2l-huffpost")


def test_two_columns_of_f2l_s_code_differ_in_what_is_not_honest_alone() -> None:
    cells = {cell.column.key: cell for cell in load("f2l-official").cells("paper", ["f2l/*"])}
    sized, code = (dict(trees.flat(cells[key].settings())) for key in ("sized", "code"))
    differ = {place for place in sized.keys() | code.keys() if sized.get(place) != code.get(place)}
    assert differ == {"name", "run.choose", "test.first_client_only"}


def test_a_tuned_cell_says_so(tmp_path: Path) -> None:
    cell = example().cells("paper")[0]
    chosen = {"method.optimizer.lr": 0.005}
    result = Results(tmp_path).add(cell, "paper-tune4", chosen, 0, facts())
    assert marks(cell, result) == ["tuned with 4 trials: lr 0.005"]
    assert result.command().endswith("--budget paper --seeds 1 --tune 4")


def test_a_row_may_stop_early_with_as_many_looks_and_says_so(tmp_path: Path) -> None:
    tree = changed()
    tree["rows"]["local"] |= {"stops_after": 20, "exchanges": 2}
    tree["budgets"]["paper"] = {"exchanges": 100, "settings": {"run": {"validate_every": 50}}}
    cells = {cell.key: cell for cell in read("t", tree).cells("paper")}
    proto, local = cells["proto/one"], cells["local/one"]
    assert proto.settings()["run"]["rounds"] == 100
    run = local.settings()["run"]
    assert (run["rounds"], run["validate_every"]) == (10, 5)  # 20 of 100, in rounds of 2, 2 looks
    told = "stops after 20 communication rounds; other rows have 100"
    assert marks(local, Results(tmp_path).add(local, "paper", None, 0, facts())) == [told]
    assert marks(proto, Results(tmp_path).add(proto, "paper", None, 0, facts())) == []
    short = {cell.key: cell for cell in read("t", tree).cells("small")}["local/one"]
    assert (short.exchanges, short.settings()["run"]["rounds"]) == (2, 1)  # the budget is shorter


def test_an_option_that_came_later_counts_as_its_default_and_as_nothing_else(
    tmp_path: Path,
) -> None:
    cell = example().cells("small")[0]
    results = Results(tmp_path)
    path = results.add(cell, "small", None, 0, facts()).path
    assert path is not None
    tree = json.loads(path.read_text(encoding="utf-8"))
    assert tree["settings"]["method"].pop("local_steps") == 10
    path.write_text(json.dumps(tree), encoding="utf-8")
    assert results.of(cell, "small", None) is not None
    other = changed()
    other["rows"]["proto"]["settings"]["method"] = {"name": "fl_proto", "local_steps": 7}
    assert results.of(read("t", other).cells("small")[0], "small", None) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda tree: tree.update(seeds={}), r"proto\.one\.json is damaged: seeds is {}"),
        (lambda tree: tree["seeds"].update({"0": {}}), "seeds.0 has no 'test'"),
        (lambda tree: tree.update(recipe="other"), "it holds other, small, proto/one"),
        (lambda tree: tree.update(cell="a/b"), "it holds t, small, a/b"),
    ],
)
def test_a_file_that_is_not_what_its_place_says_is_named(
    tmp_path: Path, change: Any, text: str
) -> None:
    results = Results(tmp_path)
    path = results.add(example().cells("small")[0], "small", None, 0, facts()).path
    assert path is not None
    tree = json.loads(path.read_text(encoding="utf-8"))
    change(tree)
    path.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(CheckpointError, match=text):
        results.every()


def test_results_of_no_cell_are_named_on_the_page_and_stale_ones_are_not_shown(
    tmp_path: Path,
) -> None:
    results = Results(tmp_path)
    cells = load("digits").cells("small")
    results.add(cells[0], "small", None, 0, facts())
    results.add(example().cells("small")[0], "small", None, 0, facts())
    path = results.add(cells[1], "small", None, 0, facts()).path
    assert path is not None
    path.write_text(path.read_text(encoding="utf-8").replace('"rounds": 6', '"rounds": 5'))
    text = "\n".join(results_page.pages(tmp_path, every_recipe()).values())
    assert text.count("| Local |") == 1
    assert "- t/small: there is no such recipe or budget" in text
    assert "- digits/small, local/iid-5: out of date, run.rounds was 5, is 6" in text


def test_two_writers_of_one_cell_lose_no_seed(tmp_path: Path) -> None:
    cell = example().cells("small")[0]
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(Results(tmp_path).add, cell, "small", None, s, facts())
                for s in range(24)]  # fmt: skip
        for job in jobs:
            job.result()
    found = Results(tmp_path).of(cell, "small", None)
    assert found is not None
    assert sorted(found.seeds) == list(range(24))


def test_code_whose_state_git_cannot_tell_counts_as_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {"rev-parse": "0123456789abcdef", "status": None}
    monkeypatch.setattr(provenance, "_git", lambda *words: answers[words[0]])
    provenance.revision.cache_clear()
    try:
        assert provenance.revision() in ("0123456789ab+", f"version {fedshot.__version__}")
    finally:
        provenance.revision.cache_clear()


def test_who_trained_a_run_is_kept_with_it(tmp_path: Path) -> None:
    here, there = ({k: v for k, v in made(c).items() if k != "after_round"} for c in ("a", "b"))
    assert provenance.note(tmp_path, -1, here) == [{"after_round": -1, **here}]
    assert provenance.note(tmp_path, 4, here) == [{"after_round": -1, **here}]
    assert provenance.note(tmp_path, 7, there)[1] == {"after_round": 7, **there}
    assert [one["commit"] for one in provenance.history(tmp_path)] == ["a", "b"]


def test_commits_that_leave_the_code_alone_are_one_version_of_it(tmp_path: Path) -> None:
    cell = example().cells("paper")[0]
    results = Results(tmp_path)
    same = [made(commit) | {"code": "c"} for commit in ("0123", "4567")]
    results.add(cell, "paper", None, 0, facts(made=same))
    found = results.add(cell, "paper", None, 1, facts(made=same[1:]))
    assert marks(cell, found) == []
    found = results.add(cell, "paper", None, 2, facts(made=[made("89ab") | {"code": "d"}]))
    assert marks(cell, found) == ["seeds trained by several versions of the code"]
    assert provenance.note(tmp_path / "run", -1, same[0])[-1]["commit"] == "0123"
    assert len(provenance.note(tmp_path / "run", 5, same[1])) == 1


def test_what_stands_in_files_is_text_on_the_page(tmp_path: Path) -> None:
    tree = changed()
    tree["rows"]["proto"]["label"] = "<img src=x onerror=alert(1)> | [x](javascript:y)"
    recipe = read("t", tree)
    results = Results(tmp_path)
    results.add(recipe.cells("paper", ["proto/*"])[0], "paper", None, 0,
                facts(made=[made("<script>alert(2)</script>")]))  # fmt: skip
    text = "\n".join(results_page.pages(tmp_path, {"t": recipe}, cells=True).values())
    assert "<img" not in text
    assert "<script" not in text
    assert r"&lt;img src=x onerror=alert(1)&gt; \| [x]\(javascript:y)" in text


def test_names_of_classes_are_text_in_the_confusion_matrix_of_a_cell(tmp_path: Path) -> None:
    names = ("<script>x</script>", "a|b", "c\nd", "e\\|f")
    one = facts()
    one["test"]["confusion"] = {name: dict.fromkeys(names, 1) for name in names}
    recipe = example()
    Results(tmp_path).add(recipe.cells("paper", ["proto/one"])[0], "paper", None, 0, one)
    page = results_page.pages(tmp_path, {"t": recipe}, cells=True)["results/t/paper/proto.one.md"]
    assert "<script" not in page
    shown = sorted(["&lt;script&gt;x&lt;/script&gt;", r"a\|b", "c d", r"e\\\|f"])
    head, rule, *rows = page.partition("## Confusion")[2].splitlines()[2:8]
    assert head == f"| true class | {' | '.join(shown)} |"
    assert rule == "|---|---:|---:|---:|---:|"
    assert rows == [f"| {name} | 25 | 25 | 25 | 25 |" for name in shown]


@pytest.mark.parametrize("name", [n for n in METHODS if n in ("fl_proto", "fedfsl_naive")])
def test_a_method_talks_to_its_clients_as_often_as_its_rows_say(name: str, tmp_path: Path) -> None:
    """Counted by the ledger, not declared."""
    tree = changed()
    tree["rows"] = {"it": {"label": "it", "settings": {"method": {"name": name}},
                           "published": [None, None]}}  # fmt: skip
    cell = read("t", tree).cells("small")[0]
    run = Experiment(PreparedRun(Config.of(cell.settings())), tmp_path)
    list(run.run())
    rows = [r for r in run.meter.to_json() if r["phase"] == "train" and r["direction"] == "down"]
    parts = {row["part"] for row in rows}
    assert sum(r["messages"] for r in rows) == len(parts) * 4 * cell.settings()["run"]["rounds"]


def test_a_row_with_too_many_rounds_says_so(tmp_path: Path) -> None:
    """By what was counted, whatever its file declares."""
    tree = changed()
    tree["settings"]["partition"] = {"name": "resampled", "clients": 2, "by": "iid"}
    tree["settings"]["test"] |= {"group": {"clients": 2, "by": "iid"}, "shot": 4, "query": 4}
    tree["columns"] = {"one": {"settings": {"episode": {"shot": 4, "query": 4}}}}
    method = {"name": "frl", "variant": "proto", "inner_rounds": 1}
    tree["rows"] = {"it": {"settings": {"method": method}}}
    cell = read("t", tree).cells("small")[0]
    run = Experiment(PreparedRun(Config.of(cell.settings())), tmp_path)
    counted = [record.exchanges for record in run.run()]
    assert counted == [0, 3, 3]
    result = Results(tmp_path).add(cell, "small", None, 0, facts() | {"exchanges": max(counted)})
    assert any(mark.startswith("has 3 exchanges with its clients") for mark in marks(cell, result))
    told = Results(tmp_path).add(cell, "small", None, 0, facts() | {"exchanges": 1})
    assert not any("exchanges with its clients" in mark for mark in marks(cell, told))


@pytest.mark.slow  # its time grows with the results
def test_the_pages_of_results_are_made_of_the_files_of_results() -> None:
    root = Path(__file__).parents[2]
    made = results_page.pages(root / "results", every_recipe())
    pages = {name: text for name, text in made.items() if name.endswith(".md")}
    docs = root / "docs"
    held = {
        path.relative_to(docs).as_posix(): path.read_text(encoding="utf-8")
        for path in (docs / "results.md", *docs.glob("results/*.md"))
    }
    assert held == pages, (
        "docs/results.md is not what `fedshot reproduce results --to docs/results.md` writes"
    )
    assert all((docs / name).is_file() for name in made.keys() - pages.keys())


def test_a_request_that_cannot_be_is_refused() -> None:
    recipe = example()
    for wrong, text in (({"seeds": 0}, "--seeds is 0"), ({"tune": -1}, "--tune is -1"),
                        ({"jobs": 0}, "--jobs is 0")):  # fmt: skip
        with pytest.raises(ConfigError, match=text):
            Request(recipe, **wrong)
    with pytest.raises(ConfigError, match="has no budget 'huge'"):
        RecipeRunner(Request(recipe, budget="huge"))


@pytest.mark.parametrize(("name", "cohort"), [("f2l-fc100", 1), ("frl-table1", None)])
def test_a_cost_is_of_one_client_but_where_all_share_an_episode(
    name: str, cohort: int | None
) -> None:
    for cell in load(name).cells("small"):
        run = timing.short(cell)["run"]
        assert (run["rounds"], run["cohort"]) == (2, cohort)
