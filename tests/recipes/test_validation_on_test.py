"""Recipes whose looks are at the test: told in pages and figures, costed so, never tuned by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedshot.config.load import Config
from fedshot.core.errors import ConfigError
from fedshot.recipes import cell_worker, plots, results_page, timing
from fedshot.recipes.reading import read
from fedshot.recipes.recipe import Recipe
from fedshot.recipes.runner import RecipeRunner, Request
from fedshot.recipes.tuning import Search
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

from .example_recipe import changed, finished_cells

PEEK = {"run": {"choose": "best_on_test_classes", "validate_every": 1}}
TOLD = "NOT HONEST: the test classes chose the round"


def recipe(**parts: Any) -> Recipe:
    """A curve whose second column looks at the test."""
    tree = changed(kind="curve", axis="shots") | parts
    tree["columns"] = {
        "one": {"label": "1-shot", "x": 1},
        "peek": {"label": "1-shot, the best on the test", "x": 2, "settings": PEEK},
    }
    return read("t", tree)


def test_the_page_says_which_looks_were_at_the_test(tmp_path: Path) -> None:
    states = finished_cells(recipe(), tmp_path, "proto/*")
    one, peek = (results_page._validation(s.result) for s in states if s.result)
    assert one == "30.0 → 40.0"
    assert peek == "30.0 → 40.0 on the test"


def test_a_curve_marks_the_points_that_are_not_honest(tmp_path: Path) -> None:
    one, peek = finished_cells(recipe(), tmp_path, "proto/*")
    assert TOLD in plots.curve(recipe(), [one, peek])
    assert TOLD not in plots.curve(recipe(), [one])
    assert plots._not_honest([(1, one), (2, peek)]) == {TOLD: [(2, 50.0)]}


@pytest.mark.parametrize("own", [False, True])
def test_a_look_at_the_test_takes_as_long_as_the_test(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One question takes a second, and a step none: 3 looks and the test at the end."""
    found = {"step": 0.0, "question": 1.0, "clients": 4, "own": own}
    one, peek = recipe().cells("small", ["proto/*"])
    monkeypatch.setattr(timing, "_held", lambda: {timing.key(c): found for c in (one, peek)})
    before, after = (timing.seconds(c) for c in (one, peek))
    assert before is not None
    assert after is not None
    start = timing._START
    # The first column looks before training and after the last round alone.
    assert before - start == (4 if own else 10 + 2 * 5)
    assert after - start == (4 * (1 + 3) if own else 10 + 3 * 10)


def test_nothing_is_tuned_by_looks_at_the_test(tmp_path: Path) -> None:
    tree = changed()
    tree["settings"] |= {"run": tree["settings"]["run"] | PEEK["run"]}
    made = read("t", tree)
    with pytest.raises(ConfigError, match=f"trials are judged on validation.*{TOLD}"):
        Search.of(made, "small", made.rows["proto"], 2, tmp_path)
    with pytest.raises(ConfigError, match=TOLD):
        RecipeRunner(Request(made, tune=2, results=tmp_path, runs=tmp_path))
    assert RecipeRunner(Request(made, results=tmp_path, runs=tmp_path)).cells
    prepared = PreparedRun(Config.of(made.cells("small")[0].settings()))
    with pytest.raises(ConfigError, match=TOLD):
        cell_worker._tune(Experiment(prepared, tmp_path / "run"), {})
    assert not (tmp_path / "run").exists()
    search = Search.of(recipe(), "small", recipe().rows["proto"], 2, tmp_path)
    assert search.cell.column.key == "one"
