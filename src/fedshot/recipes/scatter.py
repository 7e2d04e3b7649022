"""Plots of models with two-dimensional features: novel examples and decision regions.

The classifier is the model of the chosen round, adapted to the support of the test episode with
the median accuracy. The accuracies and confusion matrices beside each plot are of the whole test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedshot.data.episodes.episode import examples
from fedshot.evaluation.episodic_test import total_confusion
from fedshot.learners.learner import EvalEpisode
from fedshot.learners.maml import Maml
from fedshot.nn.heads import LinearHead
from fedshot.runs.experiment import Experiment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedshot.recipes.recipe import Recipe
    from fedshot.recipes.runner import State

_KEPT, _DRAWN = 200, 120  # number of examples per class in the result, and in the figure
_DIGITS = 4  # decimals of a coordinate
_WIDTH, _HEIGHT = 6.6, 3.1  # inches of a row of the figure


def scatter_data(run: Experiment, accuracies: Sequence[float]) -> dict[str, Any]:
    """Return {"scatter": ...}, the data of a plot, for a model with two features; else `{}`.

    The server's model must also adapt by MAML and have a linear head. `accuracies` are the
    accuracies of the test episodes.
    """
    method, found = run.method, run.method.server_model(run.server)
    if found is None or not isinstance(learner := found.learner, Maml):
        return {}
    if learner.model.out_features != 2 or not isinstance(learner.model.head, LinearHead):
        return {}
    test, chosen = run.prepared.test, method.server_model(run.chosen())
    assert chosen is not None
    u = int(np.argsort(accuracies, kind="stable")[len(accuracies) // 2])
    episode, rows = test.eval_episodes[u], []
    for number in episode.classes.tolist():
        every = np.flatnonzero(run.prepared.dataset.y == number)
        rows.append(every[np.isin(every, run.prepared.rows.novel)][:_KEPT])
    x = torch.cat([episode.support_x, examples(run.prepared.dataset, np.concatenate(rows))])
    query = EvalEpisode(episode.support_x, episode.support_y, x, episode.classes)
    adapted, h = learner.adapt_at_test(chosen.params, chosen.stats, query)
    n, way = len(episode.support_y), len(episode.classes)
    return {
        "scatter": {
            "accuracy": accuracies[u],
            "classes": [test.class_names[number] for number in episode.classes.tolist()],
            "points": [_rounded(part) for part in torch.split(h[n:], [len(r) for r in rows])],
            "support": [_rounded(h[:n][episode.support_y == i]) for i in range(way)],
            "weight": _rounded(adapted["head"]["weight"][:way]),
            "bias": _rounded(adapted["head"]["bias"][:way]),
        }
    }


def _rounded(values: torch.Tensor) -> list[Any]:
    found: list[Any] = np.round(values.detach().double().numpy(), _DIGITS).tolist()
    return found


def with_scatter_data(states: Sequence[State]) -> list[State]:
    """Return the states (cells of a recipe's table, with results) that have the data for a plot."""
    return [state for state in states if state.result and "scatter" in state.result.first]


def scatter_plots(recipe: Recipe, states: Sequence[State]) -> str:
    """Return a recipe's figure as SVG: for each cell a plot and a confusion matrix.

    A cell is one row and column of the recipe's table, and a state is a cell with its results. The
    plot is that of the cell's first seed.
    """
    from fedshot.reports.figure_export import drawing

    held = with_scatter_data(states)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(len(held), 2, squeeze=False)
        for (left, right), state in zip(grid, held, strict=True):
            assert state.result is not None
            score = state.result.score
            text = f"{100 * score['accuracy']:.1f} ± {100 * score['interval']:.1f} %"
            left.set_title(f"{state.cell.row.label}, {text}")
            _regions(left, state.result.first["scatter"])
            right.set_title("confusion matrix, %")
            _confusion(right, total_confusion(one["test"] for one in state.finished))

    title = recipe.title_of(state.cell for state in states)
    return drawing(title, (_WIDTH, _HEIGHT * len(held)), draw)


def _regions(axes: Axes, data: dict[str, Any]) -> None:
    """Draw novel examples over the regions in which the model predicts each class.

    `data` holds the data of the plot; classes are sorted by name.
    """
    from fedshot.reports.figure_export import INK, PALETTE

    order = np.argsort(data["classes"])
    points = [np.array(data["points"][i][:_DRAWN]).reshape(-1, 2) for i in order]
    stars = [np.array(data["support"][i]).reshape(-1, 2) for i in order]
    ends = np.percentile(np.concatenate(points), (0.5, 99.5), axis=0)
    ends = np.concatenate([ends, *stars])
    margin = 0.06 * np.ptp(ends, axis=0) + 1e-9
    low, high = ends.min(axis=0) - margin, ends.max(axis=0) + margin
    x, y = np.meshgrid(*(np.linspace(low[i], high[i], 240) for i in (0, 1)))
    weight, bias = np.array(data["weight"])[order], np.array(data["bias"])[order]
    chosen = (np.stack([x, y], -1) @ weight.T + bias).argmax(-1)
    axes.contourf(x, y, chosen, levels=np.arange(len(order) + 1) - 0.5,
                  colors=PALETTE[: len(order)], alpha=0.22)  # fmt: skip
    for i, (part, star) in enumerate(zip(points, stars, strict=True)):
        name, colour = data["classes"][order[i]], PALETTE[i]
        axes.scatter(part[:, 0], part[:, 1], s=5, color=colour, linewidths=0, label=name)
        axes.scatter(star[:, 0], star[:, 1], s=90, marker="*", color=colour,
                     edgecolors=INK, linewidths=0.8, zorder=3)  # fmt: skip
    axes.set_xlim(low[0], high[0])
    axes.set_ylim(low[1], high[1])
    axes.set_xlabel("first feature; stars are the support")
    axes.set_ylabel("second feature")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=len(order), markerscale=2,
                handletextpad=0.1, columnspacing=0.8)  # fmt: skip


def _confusion(axes: Axes, total: Mapping[str, Mapping[str, int]]) -> None:
    """Draw a confusion matrix in percent of each row (class)."""
    from fedshot.reports.figure_export import INK

    names = sorted(total)
    counts = np.array([[total[y].get(predicted, 0) for predicted in names] for y in names])
    shares = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=130, alpha=0.85)
    for (i, j), share in np.ndenumerate(shares):
        axes.text(j, i, f"{share:.0f}", ha="center", va="center",
                  color="white" if share > 60 else INK)  # fmt: skip
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
