"""The figures of recipes: curves over an axis, planes of two features, and what exchanges buy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from fedshot import storage
from fedshot.recipes.bench import State
from fedshot.recipes.learning import learning
from fedshot.recipes.plane import planes
from fedshot.recipes.recipe import Recipe
from fedshot.recipes.results import Results, outdated
from fedshot.reports.canvas import DASHES, INK, PALETTE, picture
from fedshot.sections import not_honest

_SIZE = (5.6, 3.6)  # inches


def path(folder: Path, recipe: Recipe, variant: str) -> Path:
    """Return where a recipe's figure is kept."""
    return folder / recipe.name / f"{variant}.svg"


def curve(recipe: Recipe, states: Sequence[State]) -> str:
    """Return the figure as SVG: a line for each row that has results, its 95 % intervals as bars.

    Hollow diamonds are the published numbers, where the paper gives them as numbers. A cross lies
    on what is no honest result, and the legend says why.
    """

    def draw(axes: Axes) -> None:
        for i, row in enumerate(recipe.rows.values()):
            mine = [state for state in states if state.cell.row.key == row.key]
            colour = PALETTE[i % len(PALETTE)]
            held = [(_x(s), s.result.score) for s in mine if s.result]
            if held:
                axes.errorbar(
                    [x for x, _ in held],
                    [100 * score["accuracy"] for _, score in held],
                    yerr=[100 * score["interval"] for _, score in held],
                    color=colour, linestyle=DASHES[i % len(DASHES)], marker="o", markersize=4,
                    capsize=2, linewidth=1.4, label=row.label,
                )  # fmt: skip
            told = [(_x(s), s.cell.published) for s in mine if s.cell.published]
            if told:
                axes.plot(
                    [x for x, _ in told], [y for _, y in told], linestyle="", marker="D",
                    markersize=6, markerfacecolor="none", markeredgecolor=colour,
                    label=f"{row.label}, published",
                )  # fmt: skip
        for text, points in _not_honest(states).items():
            axes.plot(
                [x for x, _ in points], [y for _, y in points], linestyle="", marker="x",
                markersize=10, markeredgewidth=1.6, color=INK, zorder=4, label=text,
            )  # fmt: skip
        axes.set_xlabel(recipe.axis or "setting")
        split = recipe.settings.get("split", {})
        own = bool(split.get("base")) and not split.get("novel")
        whose = "the clients' own" if own else "novel"
        axes.set_ylabel(f"accuracy on {whose} classes, %")
        axes.set_xticks([column.x for column in recipe.columns.values() if column.x is not None])
        axes.grid(visible=True, axis="y")
        axes.legend(labelcolor=INK)

    text = picture(recipe.title, _SIZE, draw, "svg")
    assert isinstance(text, str)
    return text


def _not_honest(states: Sequence[State]) -> dict[str, list[tuple[float, float]]]:
    """Return the points that are no honest results, by what makes them so."""
    found: dict[str, list[tuple[float, float]]] = {}
    for state in states:
        if state.result is not None:
            texts = not_honest(state.result.settings)
            if texts:
                point = (_x(state), 100 * state.result.score["accuracy"])
                found.setdefault("; ".join(texts), []).append(point)
    return found


def _x(state: State) -> float:
    x = state.cell.column.x
    assert x is not None, "a curve's columns have one"
    return x


def write(folder: Path, recipe: Recipe, variant: str) -> Path | None:
    """Write the figure of all that is finished and return its path.

    None where there is nothing to write: no figure for this kind of recipe, nothing finished, or
    the file holds this very figure.
    """
    draw = _FIGURES.get(recipe.kind)
    if draw is None:
        return None
    budget = variant.partition("-")[0]
    held = {r.key: r for r in Results(folder).every()
            if (r.recipe, r.variant) == (recipe.name, variant)}  # fmt: skip
    states = [State(c, result=held[c.key]) for c in recipe.cells(budget) if c.key in held]
    states = [s for s in states if s.result and not outdated(s.result, s.cell, s.result.tuned)]
    text = draw(recipe, states) if states else ""
    if not text:
        return None
    file = path(folder, recipe, variant)
    if file.exists() and file.read_bytes() == text.encode():
        return None
    file.parent.mkdir(parents=True, exist_ok=True)
    storage.write_bytes(file, text.encode(), sync=False)
    return file


_FIGURES: dict[str, Callable[[Recipe, Sequence[State]], str]] = {
    "curve": curve,
    "plane": planes,
    "table": learning,
}
