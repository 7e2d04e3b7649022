"""The floor below a table: what the raw pixels reach on its test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.neighbors import NearestCentroid

from fedshot.config.load import Config
from fedshot.recipes.cell_worker import class_means as measured
from fedshot.recipes.results import Results
from fedshot.recipes.results_page import pages
from fedshot.recipes.runner import State
from fedshot.recipes.tables import as_text, class_means
from fedshot.runs.prepare import PreparedRun
from recipes.example_recipe import example, facts
from system.runs import OWN, SMALL, merged

POOLED: dict[str, Any] = {"method": {"name": "fl_proto", "local_steps": 2}}
OF_CLIENTS = merged(OWN, {"method": {"name": "fedavg"}})
OF_GROUPS: dict[str, Any] = {
    "method": {"name": "frl_fedavg"},
    "model": {"head": {"name": "linear", "way": 5}},
    "test": {"shot": 4, "query": 4, "group": {"clients": 2, "by": "iid"}},
}


@pytest.mark.filterwarnings("ignore::UserWarning:sklearn", "ignore::RuntimeWarning:sklearn")
@pytest.mark.parametrize(
    "change", [POOLED, OF_CLIENTS, OF_GROUPS], ids=["pooled", "clients", "groups"]
)
def test_the_floor_is_the_nearest_centroid_of_scikit_learn(change: dict[str, Any]) -> None:
    prepared = PreparedRun(Config.of(merged(SMALL | {"method": {}}, change)))
    right = []
    for u, eval_episode in enumerate(prepared.test.eval_episodes):
        one = NearestCentroid().fit(eval_episode.support_x.flatten(1), eval_episode.support_y)
        said = one.predict(eval_episode.query_x.flatten(1).numpy())
        right.append(float(np.mean(said == prepared.test.labels(u).numpy())))
    found = measured(prepared, {})["pixels"]
    assert found["accuracy"] == pytest.approx(np.mean(right), abs=1e-12)
    assert found["interval"] > 0


def test_a_table_and_the_page_tell_it_once_for_each_column(tmp_path: Path) -> None:
    recipe = example()
    kept = Results(tmp_path)
    states = []
    for cell in recipe.cells("paper"):
        told = {
            "pixels": {"accuracy": 0.5 if cell.column.key == "one" else 0.625, "interval": 0.01}
        }
        if cell.row.key == "local":
            told = {"pixels": {}} if cell.column.key == "one" else {}  # finished before, or texts
        states.append(State(cell, result=kept.add(cell, "paper", None, 0, facts() | told)))
    line = "Raw pixels, nearest class mean, on the same test: "
    (found,) = class_means(states)
    assert found.startswith(line)
    assert found.count("50.00 ± 1.00") == found.count("62.50 ± 1.00") == 1
    assert line in as_text(recipe, "paper", states, width=300)
    assert found in pages(tmp_path, {"t": recipe})["results/t.md"]


def test_a_table_of_texts_has_none(tmp_path: Path) -> None:
    (cell, *_) = example().cells("paper")
    result = Results(tmp_path).add(cell, "paper", None, 0, facts() | {"pixels": {}})
    assert class_means([State(cell, result=result), State(cell)]) == []
