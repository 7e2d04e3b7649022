"""pFedFSL's recipes, held against what the paper says of each table and figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshot.config.load import Config
from fedshot.core.errors import DataError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.partitions.partition import ClientSplit
from fedshot.recipes import plots
from fedshot.recipes.index import load, names
from fedshot.recipes.tuning import Search

from .example_recipe import finished_cells

EVERY = [name for name in names() if name.startswith("pfedfsl-")]
TUNED = [name for name in EVERY if name.startswith("pfedfsl-tuned-")]
REALISTIC = {"clients": 30, "clusters": 5, "way": 5, "shot": 5, "alpha": 1.0, "name": "clusters"}


def partitions(name: str) -> list[dict[str, Any]]:
    recipe = load(name)
    return [cell.settings()["partition"] for cell in recipe.cells("paper")]


def dealt(config: Config, dataset: Dataset) -> ClientSplit:
    key = Key(config.test.seed).at("partition")  # as a run deals where nothing is novel
    return config.partition.assign(dataset, np.arange(len(dataset)), key, config.episode)


def classes_of(counts: list[int]) -> Dataset:
    y = np.repeat(np.arange(len(counts)), counts).astype(np.int64)
    names = tuple(str(c) for c in range(len(counts)))
    return Dataset("made", np.zeros((len(y), 1, 1, 1), np.uint8), y, names)


@pytest.mark.parametrize("name", ["pfedfsl-fig2", "pfedfsl-table3", "pfedfsl-fig4"])
def test_parameters_ablation_and_convergence_are_of_the_realistic_setting(name: str) -> None:
    for partition in partitions(name):
        assert {key: partition[key] for key in REALISTIC} == REALISTIC


def test_the_number_of_clients_steps_from_10_to_100_in_the_realistic_setting_of_mnist() -> None:
    recipe = load("pfedfsl-fig3")
    assert [column.x for column in recipe.columns.values()] == list(range(10, 101, 10))
    for cell in recipe.cells("paper"):
        settings = cell.settings()
        assert settings["partition"] == REALISTIC | {"clients": cell.column.x}
        assert settings["data"] == {"name": "mnist"}


def test_the_three_parameters_take_the_papers_values() -> None:
    rows = load("pfedfsl-fig2").rows.values()
    for axis, option, values in (
        ("m, models a client gets", "m", list(range(1, 11))),
        ("R, delay", "delay", list(range(0, 41, 5))),
        ("iota, weight of l1", "iota", [1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2]),
    ):
        told = [row.settings["method"][option] for row in rows if axis in row.at]
        assert sorted(told) == values


def test_the_client_of_figure_5_has_the_papers_classes() -> None:
    config = Config.of(load("pfedfsl-fig5").settings)
    data = classes_of([6000] * 10)
    held = dealt(config, data)
    counts = np.bincount(data.y[held.train[6]], minlength=10)
    assert counts.tolist() == [5, 5, 0, 0, 0, 5, 0, 5, 5, 0]


@pytest.mark.parametrize("column", ["cifar100-n20-k20-path", "mini-n20-k20-path"])
def test_the_widest_pathological_columns_can_be_dealt(column: str) -> None:
    (cell,) = load("pfedfsl-table1").cells("paper", [f"pfedfsl/{column}"])
    settings = cell.settings()
    data = classes_of([600] * 100)
    deal = dealt(Config.of(settings), data)
    assert len(deal.train) == 30
    settings["partition"].pop("overlap")
    with pytest.raises(DataError, match="has run out"):
        dealt(Config.of(settings), data)


def test_no_other_column_shares_images_between_clients() -> None:
    shared = {
        (name, cell.column.key)
        for name in EVERY
        if load(name).kind != "picture"
        for cell in load(name).cells("paper")
        if cell.settings()["partition"].get("overlap")
    }
    assert shared == {("pfedfsl-table1", f"{of}-n20-k20-path") for of in ("cifar100", "mini")}


def test_all_clients_take_part_but_in_the_budget_that_reads_the_set_up() -> None:
    for recipe in map(load, EVERY):
        assert recipe.kind == "picture" or "participation" in recipe.open, recipe.name
        for budget in recipe.budgets:
            cohorts = {cell.settings()["run"].get("cohort") for cell in recipe.cells(budget)}
            assert cohorts == ({5} if budget == "five-clients" else {None}), recipe.name
        if "five-clients" in recipe.budgets:
            papers, five = (recipe.budget(key) for key in ("paper", "five-clients"))
            assert papers.exchanges == five.exchanges == 500
            assert papers.settings["model"] == five.settings["model"]


def test_as_many_clients_are_left_out_as_the_recipe_says() -> None:
    recipe, data = load("pfedfsl-table2"), classes_of([1000] * 10)
    for cell in recipe.cells("small", ["pfedfsl/*"]):
        held = dealt(Config.of(cell.settings()), data)
        counts = [np.bincount(data.y[rows]) for rows in held.train]
        left_out = sum(int((n >= 2).sum() < 2) for n in counts)
        assert left_out == {"alpha-01": 12, "alpha-05": 1}.get(cell.column.key, 0)
    assert "12 of 30 with alpha 0.1, 1 of 30 with 0.5" in recipe.open["left out"]


def test_the_curve_by_round_is_drawn_by_round_and_goes_past_the_published_peak() -> None:
    recipe = load("pfedfsl-fig4")
    assert recipe.against == ("rounds",)
    assert recipe.budget("cifar100").exchanges > 120
    assert not recipe.cells("cifar100")[0].on_papers_data


def test_the_rows_that_send_no_zeros_differ_from_others_in_this_alone() -> None:
    rows = load("pfedfsl-table3").rows
    for sparse, dense in (("paper-sparse", "paper"), ("sparse", "full")):
        method = rows[dense].settings["method"]
        assert rows[sparse].settings["method"] == method | {"l1": "proximal"}


def test_the_reading_that_runs_is_told() -> None:
    literals = ("pfedfsl-table1", "pfedfsl-table2", "pfedfsl-fig4", *TUNED)
    told = {key: ["pfedfsl-paper"] for key in literals}
    told["pfedfsl-table3"] = ["paper", "paper-sparse"]
    for name, recipe in ((name, load(name)) for name in EVERY):
        assert recipe.open["mode"].startswith("strict"), name
        methods = {key: row.settings["method"] for key, row in recipe.rows.items()}
        literal = [key for key, method in methods.items() if method.get("mode") == "paper"]
        assert literal == told.get(name, []), name


def test_the_papers_reading_has_the_methods_name_and_ours_is_marked() -> None:
    for name in EVERY:
        is_marked(name, load(name))


def is_marked(name: str, recipe: Any) -> None:
    rows = [row for row in recipe.rows.values() if row.method == "pfedfsl"]
    if name in ("pfedfsl-fig2", "pfedfsl-fig5"):  # of one reading: its title says of which
        assert recipe.title.endswith("pFedFSL, our reading")
        assert all(row.settings["method"].get("mode") is None for row in rows)
        return
    for row in rows:
        literal = row.settings["method"].get("mode") == "paper"
        assert row.label.startswith("pFedFSL")
        assert ("our reading" not in row.label) == literal, row.label


@pytest.mark.parametrize("name", TUNED)
def test_methods_with_steps_of_their_own_are_those_of_table_1(name: str) -> None:
    table, tuned = load("pfedfsl-table1").rows, load(name).rows
    for key in tuned.keys() - {"alone"}:
        assert tuned[key].settings == table[key].settings
        assert tuned[key].label == table[key].label
    assert set(tuned) - {"alone"} == set(table) - {"fedfsl-adv-numbered"}
    alone, whole = (tuned[key].settings["method"] for key in ("alone", "pfedfsl"))
    assert alone | {"m": whole["m"]} == whole


@pytest.mark.parametrize("name", TUNED)
def test_step_sizes_are_chosen_by_images_of_nobodys_training_or_test(name: str) -> None:
    recipe = load(name)
    classes = recipe.settings["model"]["head"]["way"]
    data = classes_of([500] * classes)
    for column in recipe.columns.values():
        (cell,) = recipe.cells("small", [f"pfedfsl/{column.key}"])
        settings = cell.settings()
        assert settings["run"]["choose"] == "validation"
        deal = dealt(Config.of(settings), data)
        assert deal.test is not None
        assert deal.validation is not None
        rows = np.concatenate([part.indices for part in (deal.train, deal.test, deal.validation)])
        assert len(np.unique(rows)) == len(rows)
        own = {key: part for key, part in settings["partition"].items() if key != "validation"}
        label = {"real": "realistic", "path": "pathological"}[column.key]
        (same,) = (
            one.settings["partition"]
            for one in load("pfedfsl-table1").columns.values()
            if one.label == f"MNIST, N = 5, K = 5, {label}"
        )
        assert own == same


def test_tuning_moves_both_step_sizes_of_per_fedavg() -> None:
    for name in EVERY:
        recipe = load(name)
        if "per-fedavg" in recipe.rows:
            row, budget = recipe.rows["per-fedavg"], recipe.default_budget
            for one in Search.of(recipe, budget, row, 3, Path()).trials[1:]:
                assert one.keys() == {"method.optimizer.lr", "method.beta"}


@pytest.mark.parametrize(
    ("name", "told"), [("pfedfsl-tuned-mnist", "images"), ("cifar-fs", "classes")]
)
def test_a_learning_curve_says_what_it_is_judged_by(name: str, told: str, tmp_path: Path) -> None:
    recipe = load(name)
    states = finished_cells(recipe, tmp_path, f"*/{next(iter(recipe.columns))}")
    assert f"accuracy on validation {told}, %" in plots.learning(recipe, states, "megabytes")
