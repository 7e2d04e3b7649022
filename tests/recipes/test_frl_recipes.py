"""The recipes of few-round learning against what the methods do: exchanges, and search spaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedshot.methods.base.fedavg_probe import FedAvgProbe
from fedshot.methods.frl.frl import FRL
from fedshot.methods.frl.frl_finetune import FRLFinetune
from fedshot.methods.frl.frl_frozen import FRLFrozen
from fedshot.methods.frl.frl_one_shot import FRLOneShot
from fedshot.methods.frl.frl_personal import FRLPersonal
from fedshot.nn.optim import Optimizer
from fedshot.recipes.index import load, names
from fedshot.recipes.recipe import Row
from methods.frl.oracle import CLASSES, FLAT, SPEC, Run

METHODS: dict[str, Any] = {
    cls.name: cls for cls in (FRL, FedAvgProbe, FRLFinetune, FRLFrozen, FRLOneShot, FRLPersonal)
}


def options(row: Row) -> dict[str, Any]:
    found = dict(row.settings["method"])
    if "optimizer" in found:
        found["optimizer"] = Optimizer(**found["optimizer"])
    return found


def test_a_row_counts_the_exchanges_that_a_round_of_it_takes_in_the_paper(tmp_path: Path) -> None:
    taken: dict[str, int] = {}
    for recipe in (load(name) for name in names() if name.startswith("frl-")):
        for row in recipe.rows.values():
            given = options(row)
            cls = METHODS.get(given.pop("name"))
            if cls is None:  # frl_fedavg: its rounds exchange nothing
                assert row.method == "frl_fedavg"
                continue
            key = f"{row.method} {sorted(given.items(), key=str)}"
            if key not in taken:
                resampled = {"resampled": True} if cls in (FRL, FRLPersonal) else {}
                m = cls(FLAT, SPEC, tuple(range(CLASSES)), **resampled, **given)
                run = Run(m, tmp_path / str(len(taken)))
                run.play()
                taken[key] = len(run.clients._keys)
            anew = cls is FRL and given["variant"] != "linear"  # the paper has no such exchange
            assert row.exchanges == taken[key] - anew, f"{recipe.name}, {row.key}"
    assert sorted(set(taken.values())) == [1, 3, 4, 5]


def test_a_row_has_one_search_space_in_all_recipes() -> None:
    spaces: dict[str, list[Any]] = {}
    for recipe in (load(name) for name in names() if name.startswith("frl-")):
        for row in recipe.rows.values():
            spaces.setdefault(row.key, []).append(dict(recipe.tune) | dict(row.tune))
    for key, found in spaces.items():
        assert all(space == found[0] for space in found), key
        assert found[0], key
    assert "method.gamma" in spaces["gpal"][0]


@pytest.mark.parametrize(("first", "second"), [("frl-table1", "frl-c1"), ("frl-table2", "frl-c2")])
def test_the_rows_against_personalization_sit_the_test_of_the_first_tables(
    first: str, second: str
) -> None:
    one, two = (
        {cell.key: cell.settings() for cell in load(name).cells("paper")}
        for name in (first, second)
    )
    both = [key for key in two if key in one]
    assert len(both) == 12
    for key in both:
        same = [{k: v for k, v in cell[key].items() if k != "name"} for cell in (one, two)]
        assert same[0] == same[1]
