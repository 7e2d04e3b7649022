"""Times of cells: measured, kept, refused for what is not here, and reckoned from."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedshot.config import settings as trees
from fedshot.recipes import timing
from fedshot.recipes.overview import overview, overview_text
from fedshot.recipes.recipe import Cell

from .example_recipe import changed, example


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHOT_CACHE", str(tmp_path))
    timing._held.cache_clear()


def cells(**parts: Any) -> list[Cell]:
    return example(**parts).cells("small")


def one(method: dict[str, Any] | None = None, **settings: Any) -> Cell:
    tree = changed()
    if method is not None:
        tree["rows"]["proto"]["settings"] = {"method": method}
    tree["settings"] = trees.merged(tree["settings"], settings)
    return cells(**tree)[0]


def test_what_was_measured_is_kept_and_reckoned_with() -> None:
    proto, *_ = every = cells()
    assert timing.seconds(proto) is None
    assert len(timing.unknown(every, None)) == 4
    found = timing.measure(proto, None)
    assert found["step"] > 0
    assert found["question"] > 0
    assert found["clients"] == 4
    timing.keep(proto, found)
    assert len(timing.unknown(every, None)) == 3
    # 2 rounds of 4 clients and a step each; 10 test episodes, and twice 5 for validation.
    work = timing._START + 8 * timing.steps(proto.settings()) * found["step"]
    assert timing.seconds(proto) == pytest.approx(work + 20 * found["question"])


def test_a_cell_that_cannot_be_formed_says_why_until_the_data_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    greedy = one(test={"shot": 500})
    found = timing.measure(greedy, None)
    assert "500-shot" in found["refused"]
    timing.keep(greedy, found)
    assert timing.refused(greedy, None) == found["refused"]
    assert timing.seconds(greedy) is None
    assert timing.unknown([greedy], None) == []
    monkeypatch.setattr(timing, "examples", lambda *_: 10**6)
    assert timing.refused(greedy, None) is None
    assert timing.unknown([greedy], None) == [greedy]


def test_a_measured_cell_whose_options_became_invalid_says_which() -> None:
    proto = one()
    timing.keep(proto, {"clients": 4, "step": 0.1, "question": 0.1})
    assert timing.refused(proto, None) is None
    invalid = one(run={"validate_every": 0})
    assert timing.key(invalid) == timing.key(proto)
    assert "run.validate_every is 0" in str(timing.refused(invalid, None))
    assert timing.unknown([invalid], None) == []


def test_absent_data_is_not_timed(tmp_path: Path) -> None:
    absent = one(data={"name": "cifar10"})
    assert timing.refused(absent, str(tmp_path)) == "no data: cifar10"
    assert timing.unknown([absent], str(tmp_path)) == []


def test_sizes_of_numbers_cost_no_time_but_zeros_and_counts_may() -> None:
    def key(**options: Any) -> str:
        return timing.key(one(method={"name": "fedfsl_mi", **options}))

    assert key(lambda_mi=0.5) == key(lambda_mi=0.2)
    assert key(lambda_mi=0.5) != key(lambda_mi=0.0)
    assert key(local_steps=5) == key(local_steps=50)
    assert key(episodes_per_step=1) != key(episodes_per_step=2)


def test_how_much_a_client_holds_costs_time_but_not_who_holds_what() -> None:
    def key(**partition: Any) -> str:
        return timing.key(one(partition=partition))

    dealt = {"name": "clusters", "clients": 4, "clusters": 2, "way": 2, "alpha": 1.0}
    assert key(**dealt, shot=1) != key(**dealt, shot=2)
    assert key(name="dirichlet", clients=4, alpha=1.0) == key(name="iid", clients=4)


def test_the_list_reckons_the_cells_that_can_be_formed() -> None:
    greedy = {"label": "more than there is", "settings": {"test": {"shot": 500}}}
    tree = changed()
    tree["columns"]["greedy"] = greedy
    for row in tree["rows"].values():
        row["published"] = [None, None, None]
        row.pop("spread", None)
    recipe = example(**tree)
    line = overview(recipe, "small", 3, None, 1)
    assert (line.cells, line.seconds, line.refused) == (6, None, {})
    for cell in timing.unknown(recipe.cells("small"), None):
        timing.keep(cell, timing.measure(cell, None))
    line = overview(recipe, "small", 3, None, 1)
    assert sum(line.refused.values()) == 2
    able = [s for cell in recipe.cells("small") if (s := timing.seconds(cell)) is not None]
    assert len(able) == 4
    assert line.seconds == pytest.approx(3 * sum(able))


def test_the_list_says_for_how_many_cells_its_time_is() -> None:
    recipe = example()
    options = argparse.Namespace(budget="small", seeds=3)
    line = overview(recipe, "small", 3, None, 1)
    assert "not measured" in overview_text([line], options)
    part = replace(line, seconds=60.0, refused={"no data: x": 1})
    assert "for 3 of 4" in overview_text([part], options)
    assert "60 s" in overview_text([part], options)
    none = overview_text([replace(line, refused={"no data: x": 4})], options)
    assert "none can be formed" in none
