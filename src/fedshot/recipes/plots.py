"""The figures of recipes: curves over axes, planes of two features, and what exchanges buy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedshot.config.schema import not_honest
from fedshot.core import storage
from fedshot.core.locks import locked
from fedshot.recipes.current import current
from fedshot.recipes.learning import WIDE, learning, number, spread, swept
from fedshot.recipes.plane import planes
from fedshot.recipes.recipe import AGAINST, Recipe
from fedshot.recipes.results import Results
from fedshot.recipes.runner import State
from fedshot.reports.figure_export import DASHES, INK, PALETTE, drawing, picture

_SIZE, _PANEL = (5.6, 3.6), 3.4  # inches; the width of one panel of several


def path(folder: Path, recipe: Recipe, figure: str) -> Path:
    """Return where a recipe's figure is kept, by the figure's name."""
    return folder / recipe.name / f"{figure}.svg"


def curve(recipe: Recipe, states: Sequence[State]) -> str:
    """Return the figure as SVG: a line for each row that has results, its 95 % intervals as bars.

    Hollow diamonds are the published numbers, where the paper gives them as numbers. A cross lies
    on what is no honest result, and the legend says why.
    """

    def draw(axes: Axes) -> None:
        drawn = {state.cell.row.key: state.cell.row.label for state in states}  # colours in turn
        for i, (key, label) in enumerate(drawn.items()):
            mine = [(_x(state), state) for state in states if state.cell.row.key == key]
            _line(axes, i, label, mine)
        _finish(axes, [(_x(state), state) for state in states])
        axes.set_xlabel(recipe.axis or "setting")
        axes.set_ylabel(_measured(recipe))
        _scale(axes, [column.x for column in recipe.columns.values() if column.x is not None])
        axes.legend(labelcolor=INK)

    return picture(recipe.title_of(state.cell for state in states), _SIZE, draw)


def sweep(recipe: Recipe, states: Sequence[State]) -> str:
    """Return the figure as SVG: a panel for each axis, in it a line for each column, as in `curve`.

    An axis is logarithmic where its values, zero apart, lie a hundredfold apart or further.
    """
    return _sweep(recipe, states, recipe.title_of(state.cell for state in states))


def along(recipe: Recipe, states: Sequence[State]) -> str:
    """Return a table's second figure as SVG, the panels of its rows that have `at`; "" for none."""
    held = swept(states)
    title = recipe.title_of(state.cell for state in held)
    return _sweep(recipe, held, f"{title}: {_axes(held)}") if held else ""


def _axes(states: Sequence[State]) -> str:
    return ", ".join(dict.fromkeys(name for state in states for name in state.cell.row.at))


def _sweep(recipe: Recipe, states: Sequence[State], title: str) -> str:
    panels = list(dict.fromkeys(name for row in recipe.rows.values() for name in row.at))

    def draw(figure: Figure) -> None:
        every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, name in zip(every, panels, strict=True):
            here = sorted(
                [(s.cell.row.at[name], s) for s in states if name in s.cell.row.at],
                key=lambda one: one[0],
            )
            for i, column in enumerate(recipe.columns.values()):
                mine = [one for one in here if one[1].cell.column.key == column.key]
                _line(axes, i, column.label, mine)
            _finish(axes, here)
            axes.set_xlabel(name)
            _scale(axes, [row.at[name] for row in recipe.rows.values() if name in row.at])
        every[0].set_ylabel(_measured(recipe))
        shown = {text: line for axes in every
                 for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}  # fmt: skip
        figure.legend(list(shown.values()), list(shown), labelcolor=INK, ncols=min(2, len(panels)),
                      loc="outside lower center")  # fmt: skip

    return drawing(title, (_PANEL * len(panels), _SIZE[1]), draw)


def _line(axes: Axes, i: int, label: str, points: Sequence[tuple[float, State]]) -> None:
    """Draw the `i`-th line of a figure, and the published numbers beside it."""
    colour = PALETTE[i % len(PALETTE)]
    held = [(x, state.result.score) for x, state in points if state.result]
    if held:
        axes.errorbar(
            [x for x, _ in held],
            [100 * score["accuracy"] for _, score in held],
            yerr=[100 * score["interval"] for _, score in held],
            color=colour, linestyle=DASHES[i % len(DASHES)], marker="o", markersize=4,
            capsize=2, linewidth=1.4, label=label,
        )  # fmt: skip
    told = [(x, state.cell.published) for x, state in points if state.cell.published]
    if told:
        axes.plot(
            [x for x, _ in told], [y for _, y in told], linestyle="", marker="D", markersize=6,
            markerfacecolor="none", markeredgecolor=colour, label=f"{label}, published",
        )  # fmt: skip


def _finish(axes: Axes, points: Sequence[tuple[float, State]]) -> None:
    """Draw the crosses on what is no honest result, and the grid."""
    for text, found in _not_honest(points).items():
        axes.plot(
            [x for x, _ in found], [y for _, y in found], linestyle="", marker="x",
            markersize=10, markeredgewidth=1.6, color=INK, zorder=4, label=text,
        )  # fmt: skip
    axes.grid(visible=True, axis="y")


def _scale(axes: Axes, values: Sequence[float]) -> None:
    least = min((x for x in values if x > 0), default=1.0)
    if max(values) >= WIDE * least:
        if min(values) > 0:
            axes.set_xscale("log")
        else:
            spread(axes, least, max(values))
        axes.xaxis.set_major_formatter(number)
    else:
        axes.set_xticks(sorted(set(values)))


def _measured(recipe: Recipe) -> str:
    split = recipe.settings.get("split") or {}
    own = bool(split.get("base")) and not split.get("novel")
    whose = "the clients' own" if own else "novel"
    return f"accuracy on {whose} classes, %"


def _not_honest(points: Sequence[tuple[float, State]]) -> dict[str, list[tuple[float, float]]]:
    """Return the points that are no honest results, by what makes them so."""
    found: dict[str, list[tuple[float, float]]] = {}
    for x, state in points:
        if state.result is not None:
            texts = not_honest(state.result.settings)
            if texts:
                point = (x, 100 * state.result.score["accuracy"])
                found.setdefault("; ".join(texts), []).append(point)
    return found


def _x(state: State) -> float:
    x = state.cell.column.x
    assert x is not None, "a curve's columns have one"
    return x


def write(folder: Path, recipe: Recipe, variant: str) -> list[Path]:
    """Write the figures of all that is finished and return the paths of those that changed.

    Nothing is written for a kind of recipe without figures, nor where nothing is finished.
    """
    held = Results(folder).readable(recipe.name, variant)
    states, _ = current(recipe.name, variant, held, recipe)
    written = []
    for end, draw in _FIGURES.get(recipe.kind, {}).items() if states else ():
        text, file = draw(recipe, states), path(folder, recipe, f"{variant}{end}")
        if text and not (file.exists() and file.read_bytes() == text.encode()):
            with locked(file.with_name(f".{file.name}.lock")):  # who ends as we do draws it, too
                storage.write_bytes(file, text.encode(), sync=False)
            written.append(file)
    return written


_FIGURES: dict[str, dict[str, Callable[[Recipe, Sequence[State]], str]]] = {
    "curve": {"": curve},
    "plane": {"": planes},
    "sweep": {"": sweep},
    "table": {end: partial(learning, by=by) for by, end in AGAINST.items()} | {"-at": along},
}
