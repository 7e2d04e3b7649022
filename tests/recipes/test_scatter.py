"""Scatter plots of two features: points and regions agree with the method's predictions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedshot.config.load import Config
from fedshot.recipes.index import load
from fedshot.recipes.plots import figures
from fedshot.recipes.runner import State
from fedshot.recipes.scatter import scatter_data, scatter_plots
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

SMALL: dict[str, Any] = {
    "data": {"name": "digits"},
    "split": {"base": ["0-4"], "novel": ["5-9"]},
    "partition": {"name": "iid", "clients": 2},
    "episode": {"way": 5, "shot": 2, "query": 3},
    "model": {"backbone": {"name": "conv4", "width": 8, "features": 2}},
    "method": {"name": "fedfsl_naive", "local_steps": 1},
    "run": {"rounds": 1},
    "test": {"episodes": 5, "shot": 2, "query": 3},
}


def trained(folder: Path, **changes: Any) -> Experiment:
    run = Experiment(PreparedRun(Config.of({**SMALL, **changes})), folder)
    for _ in run.run():
        pass
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return trained(tmp_path_factory.mktemp("scatter") / "run")


def test_regions_and_points_agree_with_the_method_s_predictions(run: Experiment) -> None:
    marks = run.evaluate(run.prepared.test).per_episode
    seen = scatter_data(run, marks)["scatter"]
    assert sorted(seen["classes"]) == ["5", "6", "7", "8", "9"]
    assert seen["accuracy"] == np.sort(marks)[2]
    u = next(u for u, mark in enumerate(marks) if mark == seen["accuracy"])
    eval_episode, server = run.prepared.test.eval_episodes[u], run.chosen()
    weight, bias = np.array(seen["weight"]), np.array(seen["bias"])
    logits = run.method.learner.answer(  # of the supports, asked as queries
        server.w, server.stats, eval_episode._replace(query_x=eval_episode.support_x)
    )
    drawn = np.concatenate([np.array(part) for part in seen["support"]])
    np.testing.assert_allclose(drawn @ weight.T + bias, logits.numpy(), atol=2e-3)
    novel = run.prepared.dataset.y[run.prepared.rows.novel]
    counts = {name: len(part) for name, part in zip(seen["classes"], seen["points"], strict=True)}
    assert counts == {str(c): min(200, int((novel == c).sum())) for c in range(5, 10)}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"backbone": {"name": "conv4", "width": 8}}},
        {"method": {"name": "fl_proto", "local_steps": 1}},
        {"method": {"name": "fedmeta", "episodes": 1, "learned_steps": True}},
        {"model": {"backbone": SMALL["model"]["backbone"], "head": {"name": "cosine", "way": 5}}},
    ],
)
def test_other_models_have_no_scatter_plot(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert scatter_data(trained(tmp_path / "run", **changes), [0.0] * 5) == {}


@pytest.mark.slow
def test_the_figure_names_the_method_its_accuracy_and_every_class(run: Experiment) -> None:
    score = run.result().to_json()
    recipe = load("fedfsl-fig6")
    first = {"test": score, **scatter_data(run, score["per_episode"])}
    result = SimpleNamespace(first=first, seeds={0: first, 1: first}, score=score)
    cells = recipe.cells("small")
    states = [State(cells[0], result=result), State(cells[1])]  # type: ignore[arg-type]
    drawn = scatter_plots(recipe, states)
    assert f"FedFSL-MI, {100 * score['accuracy']:.1f}" in drawn
    assert "confusion matrix, %" in drawn
    assert "FedFSL-MI-Adv" not in drawn  # nothing is finished of it
    assert scatter_plots(recipe, states) == drawn
    assert figures(recipe, states[1:]) == []
