"""Figures: accuracy by round, and what the clients hold.

Each returns SVG text, or PNG bytes with `format="png"`. They are sized to be read at the width of a
phone and of a column of print.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, overload

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedshot.reports.canvas import DASHES, INK, PALETTE, Format, picture
from fedshot.reports.holdings import class_histogram, partition_picture
from fedshot.reports.runs import Run
from fedshot.reports.sheet import contact_sheet
from fedshot.reports.words import shortened

__all__ = [
    "Series",
    "accuracy_curve",
    "class_histogram",
    "contact_sheet",
    "partition_picture",
]


@dataclass(frozen=True)
class Series:
    """One curve.

    Args:
        label: the method's name for people.
        rounds: where accuracy was measured.
        accuracies: in [0, 1], one for each round.
        intervals: half-widths of 95 % intervals, or None when they are not known.
        episodes: which episodes were answered: "test", "validation" or "training".
    """

    label: str
    rounds: Sequence[int]
    accuracies: Sequence[float]
    intervals: Sequence[float] | None = None
    episodes: str = "test"

    def __post_init__(self) -> None:
        n = len(self.rounds)
        if len(self.accuracies) != n or (self.intervals is not None and len(self.intervals) != n):
            raise ValueError(f"{self.label!r}: one accuracy (and interval) for each of {n} rounds")

    @classmethod
    def of_run(cls, run: Run) -> Series | None:
        """Return a run's accuracy on validation episodes, else on its clients' training episodes.

        None when the run recorded neither.
        """
        scored = [r for r in run.records if r["validation"]]
        if len(scored) > 1:
            scores = [r["validation"] for r in scored]
            return cls(
                run.label,
                [r["round"] for r in scored],
                [s["accuracy"] for s in scores],
                [s["interval"] for s in scores],
                "validation",
            )
        told = [r for r in run.records if "accuracy" in r["metrics"]]
        if not told:
            return None
        accuracies = [r["metrics"]["accuracy"] for r in told]
        return cls(run.label, [r["round"] for r in told], accuracies, None, "training")


@overload
def accuracy_curve(
    series: Sequence[Series],
    floors: Mapping[str, float] | None = ...,
    *,
    size: tuple[float, float] = ...,
    format: Literal["svg"] = ...,
) -> str: ...
@overload
def accuracy_curve(
    series: Sequence[Series],
    floors: Mapping[str, float] | None = ...,
    *,
    size: tuple[float, float] = ...,
    format: Literal["png"],
) -> bytes: ...
def accuracy_curve(
    series: Sequence[Series],
    floors: Mapping[str, float] | None = None,
    *,
    size: tuple[float, float] = (6.2, 3.4),
    format: Format = "svg",
) -> str | bytes:
    """Draw accuracy against rounds, its 95 % interval shaded.

    `floors` are dashed lines, by name; they belong here only if they sat the same episodes.
    """
    narrow = size[0] < 5
    kinds = sorted({s.episodes for s in series}) or ["test"]

    def draw(ax: Axes) -> None:
        ends = [_curve(ax, s, i) for i, s in enumerate(series)]
        ends += [_floor(ax, name, value) for name, value in (floors or {}).items()]
        ax.set_xlabel("communication round")
        ax.set_ylabel(f"accuracy on {' and '.join(kinds)} episodes")
        ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g} %"))
        ax.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
        ax.grid(axis="y")
        ax.margins(x=0.02, y=0.08)
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, 0.0), min(high, 1.012))  # room for a line at 100 %
        heights = None if narrow else _apart(ax, [y for _, y, _ in ends], size[1])
        if heights is None:
            ax.figure.legend(loc="outside lower left", ncols=1 if narrow else 3)
        else:
            _label_ends(ax, ends, heights)

    return picture("Accuracy by communication round", size, draw, format)


def _curve(ax: Axes, s: Series, i: int) -> tuple[str, float, str]:
    colour = PALETTE[i % len(PALETTE)]
    x, y = np.asarray(s.rounds), np.asarray(s.accuracies, dtype=float)
    if s.intervals is not None:
        half = np.asarray(s.intervals, dtype=float)
        ax.fill_between(
            x, np.clip(y - half, 0, 1), np.clip(y + half, 0, 1), color=colour, alpha=0.18, lw=0
        )
    # Dashes tell the curves apart in grey print, or where two are nearly of a colour.
    dash: Any = DASHES[i % len(DASHES)]
    name = shortened(s.label, 28)
    marker = "o" if len(x) <= 25 else None
    ax.plot(x, y, color=colour, lw=1.6, ls=dash, marker=marker, ms=3, label=name)
    return name, float(y[-1]) if len(y) else 0.0, colour


def _floor(ax: Axes, name: str, value: float) -> tuple[str, float, str]:
    shown = shortened(name, 28)
    line = ax.axhline(value, color=INK, lw=1.1, ls=(0, (4, 3)), label=shown)
    line.set_zorder(1)
    return shown, value, INK


def _apart(ax: Axes, ends: Sequence[float], inches: float) -> list[float] | None:
    """Return a height for each name, so that none touches another.

    None when a name would stand too far from the end of its line.
    """
    low, high = ax.get_ylim()
    gap = 0.17 * (high - low) / (inches - 0.7)  # 0.17 inches, a line of text, in data units
    at = dict(sorted(enumerate(ends), key=lambda end: end[1]))
    for _ in range(50):
        for below, above in pairwise(at):
            push = max(0.0, gap - (at[above] - at[below]))
            at[below] -= push / 2
            at[above] += push / 2
    heights = [at[i] for i in range(len(ends))]
    far = max((abs(y - end) for y, end in zip(heights, ends, strict=True)), default=0.0)
    return heights if far < 1.2 * gap else None


def _label_ends(ax: Axes, ends: Sequence[tuple[str, float, str]], heights: Sequence[float]) -> None:
    for (name, _, colour), y in zip(ends, heights, strict=True):
        ax.annotate(
            name,
            (1.015, y),
            xycoords=ax.get_yaxis_transform(),
            color=colour,
            va="center",
            annotation_clip=False,
        )
