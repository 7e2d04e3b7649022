"""The figures of recipes as SVG: accuracies over axes, and learning curves.

A `State` is a cell (row and column of a recipe's table) with its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any, NamedTuple, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from fedshot.config import settings as trees
from fedshot.config.schema import not_honest
from fedshot.core import storage
from fedshot.core.locks import locked
from fedshot.recipes.recipe import AGAINST, Column, Recipe
from fedshot.recipes.results import CellResult, Results, validation_curve
from fedshot.recipes.runner import State, current
from fedshot.recipes.scatter import scatter_plots, with_scatter_data
from fedshot.reports.figure_export import DASHES, INK, PALETTE, drawing

_SIZE, _SWEEP_WIDTH = (5.6, 3.6), 3.4  # inches of a curve; width of a panel of a sweep
_PANEL, _COLUMNS = (3.6, 2.8), 2  # inches of a panel of learning curves; panels in a row
_NAME = 26  # characters of a line of a method's name
_LEGEND, _LETTER, _KEY = 0.22, 0.08, 0.6  # inches: legend line, letter, sample of a curve
_CAPTION = (
    "Accuracy on the validation classes during training, mean over seeds; a dot is the round that "
    "they chose for the test."
)
_WIDE = 100  # ratio of the largest to the smallest positive value from which an axis is logarithmic


def write(
    folder: Path, recipe: Recipe, variant: str, results: Sequence[CellResult] | None = None
) -> list[Path]:
    """Write a recipe's figures of all finished cells; return the paths of the figures that changed.

    Args:
        folder: the folder of results.
        recipe: the recipe.
        variant: budget and tuning of the cells (rows and columns of the recipe), such as
            "small-tune4".
        results: the cells' results; None to read those in the folder whose files can be read.
    """
    if results is None:
        results = Results(folder).readable(recipe.name, variant)
    states, _ = current(recipe.name, variant, results, recipe)
    written = []
    for figure in figures(recipe, states) if states else ():
        file = folder / recipe.name / f"{variant}{figure.suffix}.svg"
        svg = figure.draw().encode()
        if not (file.exists() and file.read_bytes() == svg):
            with locked(file.with_name(f".{file.name}.lock")):  # other processes may draw it, too
                storage.write_bytes(file, svg, sync=False)
            written.append(file)
    return written


class RecipeFigure(NamedTuple):
    """A figure of a recipe, in the file `VARIANT` + `suffix` + ".svg".

    `title` and `caption` are for the recipe's page, and `draw` returns the SVG.
    """

    suffix: str
    title: str
    draw: Callable[[], str]
    caption: str = ""


def figures(recipe: Recipe, states: Sequence[State]) -> list[RecipeFigure]:
    """Return the figures of finished cells (rows and columns of the recipe)."""
    title = recipe.title_of(state.cell for state in states)
    found: list[RecipeFigure] = []
    if recipe.kind == "curve":
        found.append(RecipeFigure("", title, partial(curve, recipe, states)))
    if recipe.kind == "sweep":
        found.append(RecipeFigure("", title, partial(sweep, recipe, states)))
    if recipe.kind == "scatter" and with_scatter_data(states):
        found.append(RecipeFigure("", title, partial(scatter_plots, recipe, states)))
    if recipe.kind == "table" and with_learning_curves(states):
        for by in recipe.against:
            draw, caption = partial(learning, recipe, states, by), "" if found else _CAPTION
            found.append(RecipeFigure(AGAINST[by], f"{title}, against {by}", draw, caption))
    if recipe.kind == "table" and swept(states):
        found.append(RecipeFigure("-at", f"{title}, along an axis", partial(along, recipe, states)))
    return found


# Accuracies over the values of axes. A point of a line is (x, state).

_Points: TypeAlias = Sequence[tuple[float, State]]


def curve(recipe: Recipe, states: Sequence[State]) -> str:
    """Return the figure of a recipe of kind "curve": a line with 95 % intervals for each row.

    `states` are the recipe's cells with their results. Hollow diamonds are the published numbers. A
    cross marks a result that is not a fair estimate; the legend states the reason.
    """
    labels = {state.cell.row.key: state.cell.row.label for state in states}
    lines = [
        (label, [(_x(s.cell.column), s) for s in states if s.cell.row.key == key])
        for key, label in labels.items()
    ]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        _draw_lines(axes, lines, [_x(column) for column in recipe.columns.values()])
        axes.set_xlabel(recipe.axis or "setting")
        axes.set_ylabel(_y_label(recipe))
        axes.legend(labelcolor=INK)

    return drawing(recipe.title_of(state.cell for state in states), _SIZE, draw)


def sweep(recipe: Recipe, states: Sequence[State], title: str = "") -> str:
    """Return the figure of a recipe of kind "sweep": a panel per axis, with a line per column.

    `states` are cells of the recipe with their results. The axes are those that the `Row.at` of
    their rows names.
    """
    panels = list(dict.fromkeys(name for state in states for name in state.cell.row.at))

    def draw(figure: Figure) -> None:
        every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, name in zip(every, panels, strict=True):
            here = [(s.cell.row.at[name], s) for s in states if name in s.cell.row.at]
            here.sort(key=itemgetter(0))
            lines = [
                (column.label, [point for point in here if point[1].cell.column is column])
                for column in recipe.columns.values()
            ]
            _draw_lines(
                axes, lines, [row.at[name] for row in recipe.rows.values() if name in row.at]
            )
            axes.set_xlabel(name)
        every[0].set_ylabel(_y_label(recipe))
        handles = [axes.get_legend_handles_labels() for axes in every]
        legend = {text: line for pair in handles for line, text in zip(*pair, strict=True)}
        figure.legend(list(legend.values()), list(legend), labelcolor=INK,
                      ncols=min(2, len(panels)), loc="outside lower center")  # fmt: skip

    title = title or recipe.title_of(state.cell for state in states)
    return drawing(title, (_SWEEP_WIDTH * len(panels), _SIZE[1]), draw)


def along(recipe: Recipe, states: Sequence[State]) -> str:
    """Return a figure, drawn by `sweep`, of the cells that `swept` returns."""
    held = swept(states)
    axes = ", ".join(dict.fromkeys(name for state in held for name in state.cell.row.at))
    title = recipe.title_of(state.cell for state in held)
    return sweep(recipe, held, f"{title}: {axes}")


def swept(states: Sequence[State]) -> list[State]:
    """Return the finished cells (rows and columns of a recipe's table) to draw as a sweep.

    `Row.at` gives a row's value on each of its axes. A cell is drawn if its row is on an axis on
    which the finished cells have at least two different values.
    """
    held = [state for state in states if state.result and state.cell.row.at]
    names = [name for name, _ in {point for s in held for point in s.cell.row.at.items()}]
    return [s for s in held if any(names.count(name) > 1 for name in s.cell.row.at)]


def _draw_lines(axes: Axes, lines: Iterable[tuple[str, _Points]], values: Sequence[float]) -> None:
    """Draw lines and published numbers over the x `values`; mark unfair estimates by crosses."""
    for i, (label, points) in enumerate(lines):
        held = [(x, state.result.score) for x, state in points if state.result]
        if held:
            axes.errorbar(
                [x for x, _ in held],
                [100 * score["accuracy"] for _, score in held],
                yerr=[100 * score["interval"] for _, score in held],
                **_style(i), marker="o", markersize=4, capsize=2, label=label,
            )  # fmt: skip
        published = [(x, state.cell.published) for x, state in points if state.cell.published]
        if published:
            axes.plot(
                *zip(*published, strict=True), linestyle="", marker="D", markersize=6,
                markerfacecolor="none", markeredgecolor=_style(i)["color"],
                label=f"{label}, published",
            )  # fmt: skip
    for text, found in _not_honest([point for _, points in lines for point in points]).items():
        axes.plot(
            *zip(*found, strict=True), linestyle="", marker="x",
            markersize=10, markeredgewidth=1.6, color=INK, zorder=4, label=text,
        )  # fmt: skip
    axes.grid(visible=True, axis="y")
    least = min((x for x in values if x > 0), default=1.0)
    if max(values) < _WIDE * least:
        axes.set_xticks(sorted(set(values)))
        return
    if min(values) > 0:
        axes.set_xscale("log")
    else:
        _symlog(axes, least, max(values))
    axes.xaxis.set_major_formatter(_tick)


def _style(i: int) -> dict[str, Any]:
    """Return colour, dashes and width of the `i`-th line."""
    return {"color": PALETTE[i % len(PALETTE)], "linestyle": DASHES[i % len(DASHES)],
            "linewidth": 1.4}  # fmt: skip


def _not_honest(points: _Points) -> dict[str, list[tuple[float, float]]]:
    """Return the points (x, accuracy in percent) that are not fair estimates, keyed by reason."""
    found: dict[str, list[tuple[float, float]]] = {}
    for x, state in points:
        if state.result is not None and (texts := not_honest(state.result.settings)):
            point = (x, 100 * state.result.score["accuracy"])
            found.setdefault("; ".join(texts), []).append(point)
    return found


def _symlog(axes: Axes, first: float, last: float) -> None:
    """Make the x axis linear up to `first` and logarithmic from there."""
    axes.set_xscale("symlog", linthresh=first)
    powers = range(math.ceil(math.log10(first)), math.floor(math.log10(last)) + 1)
    axes.set_xticks([0.0, *(10.0**n for n in powers)])  # below `first` ticks would touch
    axes.xaxis.set_minor_locator(NullLocator())


def _tick(x: float, _: object) -> str:
    return f"{x:,.10g}"  # matplotlib's own formatter writes TeX


def _y_label(recipe: Recipe) -> str:
    split = recipe.settings.get("split") or {}
    own = bool(split.get("base")) and not split.get("novel")
    whose = "the clients' own" if own else "novel"
    return f"accuracy on {whose} classes, %"


def _x(column: Column) -> float:
    assert column.x is not None, "every column of a curve has x"
    return column.x


# Headline cells of a paper.


def published_and_ours(title: str, columns: Mapping[str, Sequence[State]]) -> str:
    """Return a chart that compares fedshot's accuracies with the published ones.

    It has a panel for each column of finished cells, and a line for each method. A dot is fedshot's
    accuracy with its 95 % interval, a hollow diamond the published accuracy.
    """
    every = [state for states in columns.values() for state in states]
    labels = list(dict.fromkeys(state.cell.row.label for state in every))

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
        for axes, states in zip(panels, columns.values(), strict=True):
            place = [-labels.index(state.cell.row.label) for state in states]
            scores = [state.result.score for state in states if state.result]
            axes.errorbar(
                [100 * score["accuracy"] for score in scores], place,
                xerr=[100 * score["interval"] for score in scores],
                linestyle="", marker="o", markersize=5, color=PALETTE[0], label="fedshot",
            )  # fmt: skip
            theirs = [(s.cell.published, y) for s, y in zip(states, place, strict=True)
                      if s.cell.published is not None]  # fmt: skip
            if theirs:
                axes.plot(
                    *zip(*theirs, strict=True), linestyle="", marker="D", markersize=5.5,
                    markerfacecolor="none", markeredgecolor=PALETTE[1], label="published",
                )  # fmt: skip
            axes.set_title(fill(states[0].cell.column.label, _NAME))
            axes.set_xlabel("accuracy, %")
            axes.grid(visible=True, axis="x")
            axes.tick_params(axis="y", length=0)
            axes.set_yticks(
                [-i for i in range(len(labels))], [fill(label, _NAME) for label in labels]
            )
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, ncols=2, loc="outside lower center", labelcolor=INK)

    return drawing(title, (_SIZE[0], 1.1 + 0.34 * len(labels)), draw)


# Learning curves: accuracy on validation classes against the bytes or the rounds so far.


def with_learning_curves(states: Sequence[State]) -> list[State]:
    """Return the cells (rows and columns of a recipe's table) to draw as learning curves.

    Cells that validate on test classes, or have no validation curve, are left out. Of the rows that
    `Row.at` places on the same axis, only the first is kept. A column is drawn only if at least two
    of its cells remain.
    """
    held = [s for s in states if s.result and not not_honest(s.result.settings)]
    held = [s for s in held if _is_validated(s) and _is_first(s)]
    columns = [state.cell.column.key for state in held]
    return [state for state in held if columns.count(state.cell.column.key) > 1]


def learning(recipe: Recipe, states: Sequence[State], by: str) -> str:
    """Return the learning curves, one panel per column, one line per row.

    Lines are means over seeds; a dot marks the chosen round of a seed. A method that exchanges no
    messages is a dotted line at the accuracy of its chosen round. `by` is the x axis, a key of
    `AGAINST`.
    """
    held = with_learning_curves(states)
    columns = list(dict.fromkeys(state.cell.column.key for state in held))
    finished = {state.cell.row.key for state in held}
    rows = [key for key in recipe.rows if key in finished]
    across = min(_COLUMNS, len(columns))
    down = -(-len(columns) // across)
    labels = {_label(state) for state in held}
    longest = _KEY + _LETTER * max(map(len, labels))
    ncols = across if longest <= _PANEL[0] else 1
    width = max(_PANEL[0] * across, longest)
    height = _PANEL[1] * down + _LEGEND * (-(-len(labels) // ncols) + 1)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(down, across, squeeze=False)
        lines: dict[int, Any] = {}
        for axes, key in zip_longest(grid.flat, columns):
            if key is None:
                axes.set_axis_off()
            else:
                _panel(axes, rows, [s for s in held if s.cell.column.key == key], by, lines)
        handles = [line for _, line in sorted(lines.items())]
        figure.legend(handles=handles, loc="outside lower center", ncols=ncols, labelcolor=INK)

    return drawing(recipe.title_of(state.cell for state in states), (width, height), draw)


def _panel(
    axes: Axes, rows: Sequence[str], states: Sequence[State], by: str, lines: dict[int, Any]
) -> None:
    """Draw the learning curves of one column; put each row's line in `lines` for the legend.

    `states` are the cells of the column with their results; `by` is the x axis.
    """
    x_of, label = _AXES[by]
    ends: list[tuple[float, float]] = []  # smallest positive and last x of each line
    for state in states:
        i = rows.index(state.cell.row.key)
        style, seeds = _style(i) | {"label": _label(state)}, state.finished
        every = [validation_curve(one) for one in seeds]
        if not _exchanges(state):
            chosen = fmean([one[seed["round"]] for one, seed in zip(every, seeds, strict=True)])
            lines[i] = axes.axhline(100 * chosen, **style | {"linestyle": (0, (1, 3))})
            continue
        rounds = sorted(set.intersection(*map(set, every)))
        x = [fmean([x_of(one, r) for one in seeds]) for r in rounds]
        y = [100 * fmean([one[r] for one in every]) for r in rounds]
        (lines[i],) = axes.plot(x, y, **style)
        ends += [(min(positive), x[-1])] if (positive := [v for v in x if v > 0]) else []
        dots = [rounds.index(r) for r in sorted({one["round"] for one in seeds} & set(rounds))]
        axes.plot(
            [x[n] for n in dots], [y[n] for n in dots],
            linestyle="", marker="o", markersize=4, color=style["color"], clip_on=False,
        )  # fmt: skip
    axes.set_title(states[0].cell.column.label)
    axes.set_xlabel(label)
    own = trees.at(states[0].cell.settings(), "partition.validation")
    axes.set_ylabel(f"accuracy on validation {'images' if own else 'classes'}, %")
    last = [end for _, end in ends]
    if last and max(last) >= _WIDE * min(last):
        _symlog(axes, min(first for first, _ in ends), max(last))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4))  # labels such as 10,000 need room
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(_tick)
    axes.grid(visible=True, axis="y")


def _is_validated(state: State) -> bool:
    return all(
        len(one["validation"]) > 1 and one["round"] in validation_curve(one)
        for one in state.finished
    )


def _is_first(state: State) -> bool:
    """Whether a state's row is on no axis of `Row.at`, or is the first row on one of its axes."""
    row, every = state.cell.row, list(state.cell.recipe.rows.values())
    first = {name: one for one in reversed(every) for name in one.at}
    return not row.at or any(first[name] is row for name in row.at)


def _exchanges(state: State) -> bool:
    return any(one["bytes_down"] + one["bytes_up"] for one in state.finished)


def _label(state: State) -> str:
    return state.cell.row.label + ("" if _exchanges(state) else " (exchanges nothing)")


def _traffic(seed: Mapping[str, Any], round: int) -> float:
    """Return the megabytes sent and received up to a validated round of one seed's training run.

    Older results store only the total, from which the number is estimated.
    """
    if "traffic" in seed:
        return float(dict(zip(validation_curve(seed), seed["traffic"], strict=True))[round]) / 1e6
    return float(seed["bytes_down"] + seed["bytes_up"]) / 1e6 * round / float(seed["rounds"])


def _communication_rounds(seed: Mapping[str, Any], round: int) -> float:
    """Return the communication rounds up to a round; older results count one per round."""
    return float(seed.get("exchanges", 1)) * round


_AXES = {
    "megabytes": (_traffic, "MB exchanged, all clients, both ways"),
    "rounds": (_communication_rounds, "communication rounds"),
}
