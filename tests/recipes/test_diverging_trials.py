"""A trial whose training diverges has lost; the others choose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedshot.config.load import Config
from fedshot.core.errors import ConfigError, DivergenceError
from fedshot.recipes import cell_worker
from fedshot.recipes.reading import read
from fedshot.recipes.runner import RecipeRunner, Request
from fedshot.recipes.tuning import SEED, Search
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

from .example_recipe import changed, facts

LOST: dict[str, Any] = {"diverged": "round 2: 0 of 4 clients gave a usable reply"}
RAISED = "method.optimizer.lr"


def searched(*values: float) -> Any:
    return read("t", changed(tune={RAISED: {"choice": list(values)}}))


def test_the_best_of_the_trials_that_hold_is_chosen(tmp_path: Path) -> None:
    recipe = searched(0.001, 0.01)
    search = Search.of(recipe, "small", recipe.rows["proto"], 3, tmp_path)
    told = [
        facts(validation=[[0, 0.9, 0], [2, a, 0]]) | lost
        for a, lost in ((0.8, LOST), (0.3, {}), (0.4, {}))
    ]
    assert search.write(told) == search.read() == search.trials[2]
    kept = json.loads(search.file.read_text())["trials"]
    assert [t["best_validation"] for t in kept] == [None, 0.3, 0.4]
    assert [t.get("diverged") for t in kept] == [LOST["diverged"], None, None]


def test_nothing_is_chosen_where_all_diverge(tmp_path: Path) -> None:
    recipe = searched(0.001)
    search = Search.of(recipe, "small", recipe.rows["proto"], 2, tmp_path)
    with pytest.raises(ConfigError, match=f"all 2 trials of proto/one diverge.*{LOST['diverged']}"):
        search.write([facts(**LOST), facts(**LOST)])
    assert not search.file.exists()


def test_a_training_that_diverges_is_told_as_a_trial_and_raised_elsewhere(tmp_path: Path) -> None:
    recipe = searched(0.001)
    (cell,) = recipe.cells("small", ["proto/one"])
    settings = cell.settings(chosen={RAISED: 1e30})
    told = cell_worker._tune(Experiment(PreparedRun(Config.of(settings)), tmp_path / "trial"), {})
    assert "training diverges: lower the step sizes" in told["diverged"]
    assert [round for round, *_ in told["validation"]] == [0]
    with pytest.raises(DivergenceError):
        list(Experiment(PreparedRun(Config.of(settings)), tmp_path / "run").run())


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_row_has_its_cells_unless_all_its_trials_diverge(
    all_of_them: bool, tmp_path: Path
) -> None:
    tree = changed(tune={RAISED: {"choice": [1e30]}})
    if all_of_them:
        tree["rows"]["proto"]["settings"]["method"]["optimizer"] = {"lr": 1e30}
    request = Request(
        read("t", tree), patterns=("proto/one",), seeds=1, tune=2, runs=tmp_path, results=tmp_path
    )
    bench = RecipeRunner(request)
    bench.check()
    list(bench.run())
    for state in bench._of_row("proto"):
        assert bool(state.result) is not all_of_them
        if all_of_them:
            assert "all 2 trials of proto/one diverge" in state.failed[SEED]
        else:
            assert state.result is not None
            assert state.result.tuned == {}
