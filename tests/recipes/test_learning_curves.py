"""What exchanges buy, as a figure: which cells it shows, and where their lines and dots lie."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedshot.recipes import plots, results_page
from fedshot.recipes.reading import read
from fedshot.recipes.recipe import Recipe
from fedshot.recipes.results import Results
from fedshot.recipes.runner import State

from .example_recipe import changed, example, facts

MB = 1_000_000
LOOKS = [[0, 0.3, 0.1], [2, 0.4, 0.1], [4, 0.6, 0.1]]
TRAINED: dict[str, Any] = {"rounds": 4, "bytes_down": MB, "bytes_up": 3 * MB}
TOLD = TRAINED | {"validation": LOOKS, "round": 4}


def state(folder: Path, key: str, *seeds: dict[str, Any], made: Recipe | None = None) -> State:
    (cell,) = (made or example()).cells("small", [key])
    for seed, told in enumerate(seeds):
        result = Results(folder).add(cell, "small", None, seed, facts(**told))
    return State(cell, result=result)


def panels(
    states: list[State],
    monkeypatch: pytest.MonkeyPatch,
    made: Recipe | None = None,
    by: str = "megabytes",
) -> list[Axes]:
    """The axes as they were drawn."""
    kept: list[Figure] = []
    real = plots.drawing

    def drawing(title: str, size: tuple[float, float], draw: Any) -> Any:
        return real(title, size, lambda figure: (kept.append(figure), draw(figure)))

    monkeypatch.setattr(plots, "drawing", drawing)
    assert plots.learning(made or example(), states, by).startswith("<?xml")
    return kept[0].axes


def test_lines_are_means_over_seeds_against_the_bytes_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower = [[0, 0.1, 0.1], [2, 0.4, 0.1], [4, 0.2, 0.1]]
    proto = state(
        tmp_path, "proto/one",
        TOLD, TRAINED | {"validation": lower, "round": 2},
    )  # fmt: skip
    local = state(tmp_path, "local/one", {"validation": LOOKS, "round": 2, "rounds": 4,
                                          "bytes_down": 0, "bytes_up": 0})  # fmt: skip
    (axes,) = panels([proto, local], monkeypatch)
    line, dots, level = axes.lines
    assert list(line.get_xdata()) == [0, 2, 4]
    assert list(line.get_ydata()) == pytest.approx([20, 40, 40])
    assert list(dots.get_xdata()) == [2, 4]
    assert list(dots.get_ydata()) == pytest.approx([40, 40])
    assert list(level.get_ydata()) == pytest.approx([40, 40])
    assert level.get_label() == "Local (exchanges nothing)"
    assert line.get_label() == "FL-Proto"


def test_bytes_that_were_kept_for_each_look_place_its_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method of two phases exchanges more in the rounds of one."""
    two = state(tmp_path, "proto/one", TOLD | {"traffic": [0, 3 * MB, 4 * MB]})
    before = state(tmp_path, "local/one", TOLD)
    (axes,) = panels([two, before], monkeypatch)
    assert [list(line.get_xdata()) for line in axes.lines[::2]] == [[0, 3, 4], [0, 2, 4]]


def test_a_panel_for_each_setting_in_which_two_methods_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [state(tmp_path, key, TOLD) for key in ("proto/one", "proto/five", "local/one")]
    assert [s.cell.key for s in plots.with_learning_curves(every)] == ["proto/one", "local/one"]
    assert [axes.get_title() for axes in panels(every, monkeypatch)] == ["1-shot"]
    assert plots.with_learning_curves(every[:2]) == []
    assert plots.figures(example(), every[:2]) == []


@pytest.mark.parametrize("told", [{"validation": []}, {"validation": LOOKS[:1], "round": 0}])
def test_what_was_not_looked_at_has_no_line(tmp_path: Path, told: dict[str, Any]) -> None:
    one = state(tmp_path, "proto/one", TRAINED | told)
    other = state(tmp_path, "local/one", TOLD)
    assert plots.with_learning_curves([one, other]) == []


def test_of_rows_along_an_axis_the_first_has_a_line(tmp_path: Path) -> None:
    tree = changed()
    proto = tree["rows"]["proto"]
    tree["rows"] |= {"proto": proto | {"at": {"a": 1}}, "far": proto | {"at": {"a": 9}}}
    made = read("t", tree)
    every = [state(tmp_path, f"{row}/one", TOLD, made=made) for row in ("far", "local", "proto")]
    assert [s.cell.row.key for s in plots.with_learning_curves(every)] == ["local", "proto"]


def test_looks_at_the_test_are_no_validation(tmp_path: Path) -> None:
    tree = changed()
    tree["columns"]["one"]["settings"] = {"run": {"choose": "best_on_test_classes"}}
    made = read("t", tree)
    both = [state(tmp_path, key, TOLD, made=made) for key in ("proto/one", "local/one")]
    assert plots.with_learning_curves(both) == []


def test_the_page_links_to_the_figure_where_there_is_one(tmp_path: Path) -> None:
    both = [state(tmp_path, key, TOLD) for key in ("proto/one", "local/one")]
    page = results_page.pages(tmp_path, {"t": example()})["results/t.md"]
    assert "![A test, against megabytes](../../results/t/small.svg)" in page
    assert plots.figures(example(), both[:1]) == []
    written = plots.write(tmp_path, example(), "small")
    assert written == [tmp_path / "t" / "small.svg"]
    assert "FL-Proto" in written[0].read_text()


@pytest.mark.slow
def test_an_axis_shows_methods_that_exchange_a_hundredth_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for times, scale in ((90, "linear"), (110, "symlog")):
        dear = {"bytes_down": times * MB, "bytes_up": times * 3 * MB}
        both = [
            state(tmp_path, "proto/one", TOLD | dear),
            state(tmp_path, "local/one", TOLD),
        ]
        (axes,) = panels(both, monkeypatch)
        assert axes.get_xscale() == scale
        assert axes.get_xlim()[0] == 0


@pytest.mark.slow
def test_curves_against_rounds_count_every_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = example(against=["rounds"])
    talks = state(tmp_path, "proto/one", TOLD | {"exchanges": 5}, made=made)
    early = state(tmp_path, "local/one", TOLD, made=made)  # of before they were counted
    (axes,) = panels([talks, early], monkeypatch, made, "rounds")
    assert [list(line.get_xdata()) for line in axes.lines[::2]] == [[0, 10, 20], [0, 2, 4]]
    assert axes.get_xlabel() == "communication rounds"
    (figure,) = plots.figures(made, [talks, early])  # the recipe does not ask for megabytes
    assert (figure.suffix, figure.title) == ("-rounds", "A test, against rounds")
    assert plots.write(tmp_path, made, "small") == [tmp_path / "t" / "small-rounds.svg"]


def test_every_figure_of_the_pages_of_results_is_there() -> None:
    docs = Path(__file__).parents[2] / "docs"
    figures = re.compile(r"!\[[^]]*\]\(([^)]*)\)")
    for page in (docs / "results.md", *docs.glob("results/*.md")):
        text = page.read_text(encoding="utf-8")
        assert all((page.parent / link).is_file() for link in figures.findall(text))
        assert len(text.encode()) <= (20_000 if page.parent == docs else 40_000), page
