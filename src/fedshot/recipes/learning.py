"""What exchanges buy: accuracy on validation classes against the bytes, or rounds, that went by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fedshot.config import settings as trees
from fedshot.config.schema import not_honest
from fedshot.recipes.recipe import Recipe
from fedshot.recipes.results import mean
from fedshot.recipes.runner import State
from fedshot.reports.figure_export import DASHES, INK, PALETTE, drawing

_PANEL, _LEGEND, _ABREAST = (3.6, 2.8), 0.22, 2  # inches; inches a line; panels in a row
_LETTER, _KEY = 0.08, 0.6  # inches of a letter of the legend, and of what stands before a label
_MB = 1e6
WIDE = 100  # times the least value: an axis that reaches that far is logarithmic


def shown(states: Sequence[State]) -> list[State]:
    """Return the cells to draw: those that were looked at while they learned, where two were.

    Cells whose looks were at test classes are left out: their curves are no validation. Of rows
    that stand at values of an axis the recipe's first alone has a line, as `swept` are drawn apart.
    """
    held = [s for s in states if s.result and not not_honest(s.result.settings) and _looked(s)]
    held = [state for state in held if _leads(state)]
    columns = [state.cell.column.key for state in held]
    return [state for state in held if columns.count(state.cell.column.key) > 1]


def swept(states: Sequence[State]) -> list[State]:
    """Return the cells of a table that stand at a value of an axis, where two values do."""
    held = [state for state in states if state.result and state.cell.row.at]
    points = {(name, x) for state in held for name, x in state.cell.row.at.items()}
    names = [name for name, _ in points]
    return [s for s in held if any(names.count(name) > 1 for name in s.cell.row.at)]


def learning(recipe: Recipe, states: Sequence[State], by: str = "megabytes") -> str:
    """Return the figure as SVG: a panel for each setting, a line for each method; "" for none.

    Lines are means over seeds; dots on them are the rounds that the validation classes chose, one a
    seed. A method that exchanges nothing is a dotted line at the height of its chosen round.

    Args:
        recipe: whose they are.
        states: its cells.
        by: what the curves are drawn against, one of `AGAINST`; none unless the recipe asks for it.
    """
    held = shown(states) if by in recipe.against else []
    if not held:
        return ""
    columns = list(dict.fromkeys(state.cell.column.key for state in held))
    drawn = {state.cell.row.key for state in held}
    rows = [key for key in recipe.rows if key in drawn]
    abreast = min(_ABREAST, len(columns))
    down = -(-len(columns) // abreast)
    labels = {_label(state) for state in held}
    longest = _KEY + _LETTER * max(map(len, labels))
    beside = abreast if longest <= _PANEL[0] else 1  # labels in a line of the legend
    width = max(_PANEL[0] * abreast, longest)
    height = _PANEL[1] * down + _LEGEND * (-(-len(labels) // beside) + 1)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(down, abreast, squeeze=False)
        lines: dict[int, Any] = {}
        for i, axes in enumerate(grid.flat):
            mine = [s for s in held if i < len(columns) and s.cell.column.key == columns[i]]
            if mine:
                _panel(axes, rows, mine, by, lines)
            else:
                axes.set_axis_off()
        handles = [line for _, line in sorted(lines.items())]
        figure.legend(handles=handles, loc="outside lower center", ncols=beside, labelcolor=INK)

    return drawing(recipe.title_of(state.cell for state in states), (width, height), draw)


def _panel(
    axes: Axes, rows: Sequence[str], states: Sequence[State], by: str, lines: dict[int, Any]
) -> None:
    went_by, label = _AXES[by]
    seen: list[list[float]] = []
    for state in states:
        assert state.result is not None
        i = rows.index(state.cell.row.key)
        colour, dash = PALETTE[i % len(PALETTE)], DASHES[i % len(DASHES)]
        seeds = list(state.result.seeds.values())
        if not _exchanges(state):
            height = 100 * mean([_curve(one)[one["round"]] for one in seeds])
            lines[i] = axes.axhline(
                height, color=colour, linestyle=(0, (1, 3)), linewidth=1.4, label=_label(state)
            )
            continue
        rounds = sorted(set.intersection(*(set(_curve(one)) for one in seeds)))
        x = [mean([went_by(one, r) for one in seeds]) for r in rounds]
        y = [100 * mean([_curve(one)[r] for one in seeds]) for r in rounds]
        lines[i] = axes.plot(
            x, y, color=colour, linestyle=dash, linewidth=1.4, label=_label(state)
        )[0]
        seen.append([value for value in x if value > 0])
        dots = sorted({one["round"] for one in seeds} & set(rounds))
        axes.plot(
            [x[rounds.index(r)] for r in dots], [y[rounds.index(r)] for r in dots],
            linestyle="", marker="o", markersize=4, color=colour, clip_on=False,
        )  # fmt: skip
    axes.set_title(states[0].cell.column.label)
    axes.set_xlabel(label)
    own = trees.at(states[0].cell.settings(), "partition.validation")  # of clients' own classes
    axes.set_ylabel(f"accuracy on validation {'images' if own else 'classes'}, %")
    ends, first = [values[-1] for values in seen if values], 0.0
    if ends and max(ends) >= WIDE * min(ends):
        first = min(values[0] for values in seen if values)
        spread(axes, first, max(ends))
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(number)
    axes.grid(visible=True, axis="y")


def spread(axes: Axes, first: float, last: float) -> None:
    """Make the horizontal axis linear until `first`, from there to `last` logarithmic."""
    axes.set_xscale("symlog", linthresh=first)
    powers = range(math.ceil(math.log10(first)), math.floor(math.log10(last)) + 1)
    axes.set_xticks([0.0, *(10.0**n for n in powers)])  # below `first` they would touch
    axes.xaxis.set_minor_locator(NullLocator())


def number(x: float, _: object) -> str:
    """Return a tick's number; matplotlib's own are in TeX, which is not read here."""
    return f"{x:,.10g}"


def _exchanges(state: State) -> bool:
    assert state.result is not None
    return any(one["bytes_down"] + one["bytes_up"] for one in state.result.seeds.values())


def _leads(state: State) -> bool:
    row, every = state.cell.row, list(state.cell.recipe.rows.values())
    first = {name: one for one in reversed(every) for name in one.at}
    return not row.at or any(first[name] is row for name in row.at)


def _label(state: State) -> str:
    return state.cell.row.label + ("" if _exchanges(state) else " (exchanges nothing)")


def _looked(state: State) -> bool:
    assert state.result is not None
    return all(
        len(one["validation"]) > 1 and one["round"] in _curve(one)
        for one in state.result.seeds.values()
    )


def _curve(seed: Mapping[str, Any]) -> dict[int, float]:
    return {round: accuracy for round, accuracy, _ in seed["validation"]}


def _traffic(seed: Mapping[str, Any], round: int) -> float:
    """Return the megabytes until the end of a round with a look.

    A cell of before they were kept for each look has as many in every round.
    """
    if "traffic" in seed:
        sent = dict(zip(_curve(seed), seed["traffic"], strict=True))
        return float(sent[round]) / _MB
    return float(seed["bytes_down"] + seed["bytes_up"]) / _MB * round / float(seed["rounds"])


def _talks(seed: Mapping[str, Any], round: int) -> float:
    """Return the exchanges until the end of a round; a cell of before they were counted has one."""
    return float(seed.get("exchanges", 1)) * round


_AXES = {
    "megabytes": (_traffic, "MB exchanged, all clients, both ways"),
    "rounds": (_talks, "communication rounds"),
}
