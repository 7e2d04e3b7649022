"""Claims of papers: their status follows from known differences, and they name what exists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedshot.recipes import claims, results_page
from fedshot.recipes.claims import Claim, Status, check_claim
from fedshot.recipes.index import load
from fedshot.recipes.results import Results
from fedshot.recipes.runner import State

from .example_recipe import example, facts

CLAIM = Claim("proto is above local", "t", "paper", "proto", ("local",))
FRONT = claims.load()
MINUS = "\N{MINUS SIGN}"


def cells(folder: Path, gains: dict[str, float], queries: int = 100) -> dict[str, State]:
    """Finished cells of 40 episodes in which proto gains so much over local, by column.

    The gain of an episode differs by 0.1 from the mean: the half-width of its interval is 0.032.
    """
    recipe, found = example(), {}
    for column, gain in gains.items():
        base = np.tile([0.3, 0.5, 0.3, 0.5], 10)
        ours = base + gain + np.tile([0.1, 0.1, -0.1, -0.1], 10)
        for row, values in (("local", base), ("proto", ours)):
            one = facts(float(values.mean()), queries=queries)
            one["test"] |= {"episodes": 40, "per_episode": [round(v, 2) for v in values.tolist()]}
            (cell,) = recipe.cells("paper", [f"{row}/{column}"])
            found[cell.key] = State(cell, result=Results(folder).add(cell, "paper", None, 0, one))
    return found


@pytest.mark.parametrize(
    ("gains", "status", "above", "below"),
    [
        ({"one": 0.05, "five": 0.1}, "reproduced", 2, 0),
        ({"one": 0.05}, "reproduced", 1, 0),
        ({"one": 0.05, "five": 0.02}, "not shown", 1, 0),
        ({"one": 0.05, "five": -0.05}, "not shown", 1, 1),
        ({"one": 0.0, "five": 0.03}, "not shown", 0, 0),
        ({"one": -0.02, "five": -0.05}, "contradicted", 0, 1),
        ({}, "not run", 0, 0),
    ],
)
def test_a_status_follows_from_the_paired_differences(
    tmp_path: Path, gains: dict[str, float], status: Status, above: int, below: int
) -> None:
    found = check_claim(CLAIM, cells(tmp_path, gains))
    assert found.status == status
    assert (found.count("above"), found.count("below")) == (above, below)
    for one, gain in zip(found.differences, gains.values(), strict=True):
        assert one.paired
        assert one.difference == pytest.approx(gain)
        assert one.interval == pytest.approx(2.0227 * 0.1 * np.sqrt(40 / 39) / np.sqrt(40), 1e-3)


def test_a_claim_has_the_published_differences_and_the_columns_that_it_names(
    tmp_path: Path,
) -> None:
    held = cells(tmp_path, {"one": 0.05, "five": 0.1})
    assert check_claim(CLAIM, held).published == (10.0,), "the paper has no number for proto/five"
    five = check_claim(Claim("", "t", "paper", "proto", ("local",), ("five",)), held)
    assert [round(one.difference, 6) for one in five.differences] == [0.1]
    assert five.published == ()
    del held["local/one"]
    assert len(check_claim(CLAIM, held).differences) == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_an_untrained_model_shows_nothing(tmp_path: Path, sign: int) -> None:
    """Validation chose round 0 of the method: what the claim is about was not at work."""
    held = cells(tmp_path, {"one": 0.05 * sign, "five": 0.1 * sign})
    for one in held["proto/one"].finished:
        one["round"] = 0
    found = check_claim(CLAIM, held)
    assert (found.status, len(found.differences), found.untrained) == ("not shown", 2, 1)


def test_cells_of_different_data_are_not_compared(tmp_path: Path) -> None:
    held = cells(tmp_path, {"one": 0.05, "five": 0.1})
    for one in held["proto/one"].finished:
        one["data"] |= {"digest": "e", "examples": 700}
    found = check_claim(CLAIM, held)
    assert [round(one.difference, 6) for one in found.differences] == [0.1]
    assert found.published == (), "the paper has no number for proto/five"


@pytest.mark.parametrize("name", FRONT.papers)
def test_a_paper_names_what_exists(name: str) -> None:
    paper = FRONT.papers[name]
    assert 3 <= len(paper.claims) <= 5
    for shown in (paper, FRONT.leaderboard):
        recipe = load(shown.recipe)
        assert set(shown.columns) <= set(recipe.columns)
        assert set(shown.rows) <= set(recipe.rows)
        assert shown.variant.partition("-tune")[0] in recipe.budgets
    for one in paper.claims:
        recipe = load(one.recipe)
        assert {one.better, *one.worse} <= set(recipe.rows), one.claim
        assert set(one.columns) <= set(recipe.columns), one.claim
        assert one.variant.partition("-tune")[0] in recipe.budgets, one.claim


def test_a_leaderboard_ranks_and_tells_which_methods_are_level(tmp_path: Path) -> None:
    held = list(cells(tmp_path, {"one": 0.05, "five": 0.02}).values())
    table = results_page._Table(held[0].cell.recipe, "paper", held)
    shown = claims.Selection("it", "t", "paper", ("one", "five"))
    boards = results_page._leaderboard({("t", "paper"): table}, shown, "")
    assert [line[0] for line in boards["1-shot"]] == ["FL-Proto", "Local"]
    assert [line[2] for line in boards["1-shot"]] == ["leader", f"below, {MINUS}5.00 ± 3.24"]
    assert boards["5-shot"][1][2].startswith(f"not distinguishable, {MINUS}2.00")


def test_a_paper_without_finished_headline_cells_has_neither_a_chart_nor_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = cells(tmp_path, {"one": 0.05})
    recipes = {"t": held["proto/one"].cell.recipe}
    for columns, drawn in ((("one",), True), (("five",), False)):
        paper = claims.Paper(
            title="It", source="", recipe="t", variant="paper", columns=columns, claims=(CLAIM,)
        )
        front = claims.Front({"it": paper}, claims.Selection("Ours", "t", "paper", ("one",)))
        monkeypatch.setattr(claims, "load", lambda front=front: front)
        pages = results_page.pages(tmp_path, recipes)
        text = pages["results.md"]
        assert ("results/it.svg" in pages, "](results/it.svg)" in text) == (drawn, drawn)
        assert ("| method | 1-shot: published | ours |" in text) == drawn
        assert "What fedshot finds about 1 paper, and which method leads on Ours." in text
        assert "## Leaderboard: Ours\n" in text


def test_pages_link_to_cells_only_where_cells_have_pages(tmp_path: Path) -> None:
    made = cells(tmp_path, {"one": 0.05})
    recipes = {"t": made["proto/one"].cell.recipe}
    (tmp_path / "t" / "notes.md").write_text("**It is a test.**\n", encoding="utf-8")
    without = results_page.pages(tmp_path, recipes)
    assert "proto.one" not in "".join(without.values())
    assert "## Notes\n\n**It is a test.**\n" in without["results/t.md"]
    pages = results_page.pages(tmp_path, recipes, cells=True)
    assert pages.keys() - without.keys() == {
        "results/t/paper/proto.one.md", "results/t/paper/local.one.md",
    }  # fmt: skip
    assert "](./t/paper/proto.one.md)" in pages["results/t.md"]
    page = pages["results/t/paper/proto.one.md"]
    for text in (
        f"**45.00 ± 4.58 %**; published 50.00, difference {MINUS}5.00",
        "fedshot reproduce t --cells 'proto/one' --budget paper --seeds 1",
        "| 0 | 45.00 ± 10.00 | 2 of 2 | &lt;0.01 | &lt;0.01 | 1.00 | 0123 |",
        '<polyline points="0.0,190.0 560.0,0.0"',
        "| data.name | digits |",
        "[All numbers of this cell](../../../../results/t/paper/proto.one.json)",
    ):
        assert text in page
