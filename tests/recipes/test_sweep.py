"""Figures of parameters: which results stand in which panel, and on what scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedshot.config.load import Config
from fedshot.recipes import plots
from fedshot.recipes.index import load, names
from fedshot.recipes.reading import read
from fedshot.recipes.recipe import Recipe
from fedshot.recipes.runner import State

from .example_recipe import changed, finished_cells

PLACES = {
    "lambda_MI, weight of the transfer": "lambda_mi",
    "lambda_KD, weight of the distillation": "lambda_kd",
    "m, models a client gets": "m",
    "iota, weight of l1": "iota",
    "R, delay": "delay",
    "R at test, distance": "test_rounds",
    "R at test, GPAL": "test_rounds",
}


def recipe(at: dict[str, dict[str, float]]) -> Recipe:
    """A sweep of FL-Proto: a row for each of `at`."""
    tree = changed(kind="sweep")
    proto = tree["rows"]["proto"]
    tree["rows"] = {key: proto | {"at": values} for key, values in at.items()}
    return read("t", tree)


def drawn(
    monkeypatch: pytest.MonkeyPatch,
    made: Recipe,
    held: list[State],
    draw: Callable[[Recipe, list[State]], str] = plots.sweep,
) -> list[Any]:
    """Return (axis, [(label, x values of its line)], scale) of each panel."""
    panels: dict[int, list[tuple[str, list[float]]]] = {}
    scales: dict[int, str] = {}
    real, real_scale = Axes.errorbar, Axes.set_xscale

    def errorbar(self: Axes, x: Any, *args: Any, **options: Any) -> Any:
        panels.setdefault(id(self), []).append((options["label"], list(x)))
        return real(self, x, *args, **options)

    def set_xscale(self: Axes, scale: str, **options: Any) -> None:
        scales[id(self)] = scale
        real_scale(self, scale, **options)

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    monkeypatch.setattr(Axes, "set_xscale", set_xscale)
    text = draw(made, held)
    assert "<svg" in text
    assert "$" not in text
    return [(lines, scales.get(key)) for key, lines in panels.items()]


def test_a_row_stands_in_every_panel_that_it_names_in_the_order_of_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe({"both": {"a": 5, "b": 0.01}, "low": {"a": 1}, "far": {"b": 10.0}})
    held = finished_cells(made, tmp_path, "*/one", "low/five")
    assert drawn(monkeypatch, made, held) == [
        ([("1-shot", [1, 5]), ("5-shot", [1])], None),
        ([("1-shot", [0.01, 10.0])], "log"),
    ]


def test_an_axis_without_cells_has_no_panel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe({"low": {"a": 1}, "high": {"a": 2}, "far": {"b": 10.0}})
    counts: list[int] = []
    real = Figure.subplots

    def subplots(self: Figure, rows: int, columns: int, **options: Any) -> Any:
        counts.append(columns)
        return real(self, rows, columns, **options)

    monkeypatch.setattr(Figure, "subplots", subplots)
    plots.along(made, finished_cells(made, tmp_path, "low/one", "high/one"))
    assert counts == [1]


@pytest.mark.parametrize(
    ("values", "scale"), [((0, 1, 99), None), ((0, 1, 100), "symlog"), ((1, 100), "log")]
)
def test_an_axis_is_logarithmic_where_its_values_reach_far(
    values: tuple[float, ...], scale: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe({f"r{i}": {"a": value} for i, value in enumerate(values)})
    (panel,) = drawn(monkeypatch, made, finished_cells(made, tmp_path, "*/one"))
    assert panel[1] == scale


def test_a_sweep_is_written_from_its_results(tmp_path: Path) -> None:
    made = recipe({"low": {"a": 1}})
    finished_cells(made, tmp_path, "low/one")
    written = plots.write(tmp_path, made, "small")
    assert written == [tmp_path / "t" / "small.svg"]
    assert "1-shot" in written[0].read_text()
    assert plots.write(tmp_path, made, "small") == []


def test_a_table_has_a_second_figure_of_the_rows_that_stand_at_values(tmp_path: Path) -> None:
    tree = changed()
    proto = tree["rows"]["proto"]
    tree["rows"] |= {"proto": proto | {"at": {"a": 1}}, "far": proto | {"at": {"a": 9}}}
    made = read("t", tree)
    one, local = finished_cells(made, tmp_path, "proto/one", "local/one")
    assert [figure.suffix for figure in plots.figures(made, [local, one])] == [""]
    (far,) = finished_cells(made, tmp_path, "far/one")
    assert plots.swept([local, one, far]) == [one, far]
    assert tmp_path / "t" / "small-at.svg" in plots.write(tmp_path, made, "small")
    figure = plots.figures(made, [local, one, far])[-1]
    assert (figure.suffix, figure.title) == ("-at", "A test, along an axis")


def test_rows_of_the_same_label_have_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = changed(kind="curve")
    tree["columns"]["one"]["x"], tree["columns"]["five"]["x"] = 1, 5
    proto = tree["rows"]["proto"]
    tree["rows"] = {"proto": proto, "again": proto}
    made = read("t", tree)
    held = finished_cells(made, tmp_path, "proto/*", "again/one")
    ((lines, _),) = drawn(monkeypatch, made, held, plots.curve)
    assert lines == [("FL-Proto", [1, 5]), ("FL-Proto", [1])]


def test_the_panels_of_a_sweep_are_the_settings_of_its_rows() -> None:
    """The value that a row is drawn at is the one that it trains with."""
    recipes = [load(name) for name in names()]
    sweeps = [made for made in recipes if any(row.at for row in made.rows.values())]
    assert [made.name for made in sweeps] == ["f2l-fig5", "frl-e1", "pfedfsl-fig2"]
    for made in sweeps:
        for cell in {cell.row.key: cell for cell in made.cells("paper")}.values():
            options = Config.of(cell.settings()).settings["method"]
            for axis, value in cell.row.at.items():
                held = options[PLACES[axis]]
                assert (0.5 if held is None else held) == value, (made.name, cell.key)
