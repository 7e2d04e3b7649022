"""One training for the cells of several recipes, where settings and seed are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedshot.config.load import Config
from fedshot.recipes.plan import marks
from fedshot.recipes.reading import read
from fedshot.recipes.recipe import Recipe
from fedshot.recipes.results import Results, score_of
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

from .example_recipe import changed, facts, finished_cells, runner


def other(**proto: object) -> Recipe:
    """A recipe of another name, whose row `whole` is the row `proto` of the first."""
    tree = changed()
    row = tree["rows"].pop("proto")
    row["settings"]["method"] |= proto
    tree["rows"] = {"whole": row} | tree["rows"]
    return read("other", tree)


def test_a_finished_training_of_another_recipe_is_taken_over(tmp_path: Path) -> None:
    first = read("first", changed()).cells("small", ["proto/one"])[0]
    for seed, accuracy in enumerate((0.5, 0.7)):
        Results(tmp_path).add(first, "small", None, seed, facts(accuracy))
    asked = runner(other(), tmp_path, "whole/one", seeds=2)
    assert list(asked.run()) == [], "nothing is left to train"
    held = Results(tmp_path).of(asked.cells[0], "small", None)
    assert held is not None
    assert held.score["accuracy"] == pytest.approx(0.6)
    assert score_of(held.seeds[1])["per_episode"] == [0.7] * 10
    assert "shares the training of proto/one of first, which has the same settings" in marks(
        asked.cells[0], held
    )


def test_whose_training_it_was_is_kept_when_it_is_taken_over_again(tmp_path: Path) -> None:
    (first,) = finished_cells(read("first", changed()), tmp_path, "proto/one")
    list(runner(other(), tmp_path, "whole/one").run())
    Results(tmp_path).path(first.cell, "small").unlink()
    again = runner(read("third", changed()), tmp_path, "proto/one")
    list(again.run())
    held = again.states["proto/one"].result
    assert held is not None
    assert held.first["shared"] == "proto/one of first"


def test_what_was_trained_on_other_data_is_not_taken_over(tmp_path: Path) -> None:
    finished_cells(read("first", changed()), tmp_path, "proto/one")
    asked = runner(other(), tmp_path, "whole/one")
    asked.check()
    asked._share()
    assert asked.states["whole/one"].result is None, "the digest of the digits is not 'd'"


def test_a_damaged_file_of_another_recipe_stands_in_nobody_s_way(tmp_path: Path) -> None:
    finished_cells(read("first", changed()), tmp_path, "proto/one")
    (tmp_path / "a" / "small").mkdir(parents=True)
    (tmp_path / "a" / "small" / "x.y.json").write_text("{}", encoding="utf-8")
    asked = runner(other(), tmp_path, "whole/one")
    asked._share()
    assert asked.states["whole/one"].result is not None


@pytest.mark.parametrize("what", ["option", "budget", "column", "seed"])
def test_a_training_that_differs_in_anything_is_not(what: str, tmp_path: Path) -> None:
    recipe = read("first", changed())
    cell = recipe.cells("paper" if what == "budget" else "small", ["proto/one"])[0]
    variant = cell.budget.name
    Results(tmp_path).add(cell, variant, None, 1 if what == "seed" else 0, facts())
    asked = runner(
        other(local_steps=3) if what == "option" else other(),
        tmp_path,
        "whole/five" if what == "column" else "whole/one",
    )
    asked._share()
    assert asked.states[asked.cells[0].key].result is None
    assert len(asked._jobs()) == 1


def test_the_name_of_a_run_changes_no_number(tmp_path: Path) -> None:
    """Which is what sharing rests on."""
    told = []
    for recipe in (read("first", changed()), other()):
        cell = recipe.cells("small")[0]
        run = Experiment(PreparedRun(Config.of(cell.settings()), None), tmp_path / recipe.name)
        list(run.run())
        told.append((run.result().per_episode, run.result().tasks))
    assert told[0] == told[1]
