"""Whose models did whom good: an affinity matrix as a heat map, and the groups that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedshot.core.text import count
from fedshot.reports.figure_export import INK, Format, picture

_NUMBERED = 30  # clients above which only some numbers fit beside an axis


def affinity_groups(q: NDArray[np.float64], groups: int) -> list[int]:
    """Return the group of each client: average linkage on the mean of Q_ij and Q_ji.

    The diagonal, minus infinity, plays no part. Groups are numbered as their first clients are.
    """
    from sklearn.cluster import AgglomerativeClustering

    both = _finite(q)
    both = (both + both.T) / 2
    away = both.max() - both
    np.fill_diagonal(away, 0.0)
    found = AgglomerativeClustering(groups, metric="precomputed", linkage="average").fit(away)
    number: dict[int, int] = {}
    return [number.setdefault(int(label), len(number)) for label in found.labels_]


@overload
def affinity_picture(
    q: NDArray[np.float64], groups: Sequence[int] | None = ..., *, format: Literal["svg"] = ...
) -> str: ...
@overload
def affinity_picture(
    q: NDArray[np.float64], groups: Sequence[int] | None = ..., *, format: Literal["png"]
) -> bytes: ...
def affinity_picture(
    q: NDArray[np.float64], groups: Sequence[int] | None = None, *, format: Format = "svg"
) -> str | bytes:
    """Draw an affinity matrix: row i, how much the models of the others did for client i.

    Args:
        q: [clients, clients]; its diagonal plays no part.
        groups: the group of each client; clients of one stand together, and lines part the groups.
        format: "svg" or "png".
    """
    n = len(q)
    order = list(range(n)) if groups is None else sorted(range(n), key=lambda i: (groups[i], i))
    shown = np.ma.masked_array(_finite(q), np.eye(n, dtype=bool))[np.ix_(order, order)]
    most = float(np.abs(shown).max()) or 1.0

    def draw(ax: Axes) -> None:
        norm = TwoSlopeNorm(0.0, -most, most)
        image = ax.imshow(shown, cmap="PuOr", norm=norm, interpolation="nearest")
        ax.figure.colorbar(
            image, ax=ax, label="affinity (blank: oneself)", shrink=0.8, ticks=MaxNLocator(5)
        ).outline.set_visible(False)
        if groups is not None:
            ends = [i for i in range(1, n) if groups[order[i]] != groups[order[i - 1]]]
            for end in ends:
                ax.axhline(end - 0.5, color=INK, lw=0.8)
                ax.axvline(end - 0.5, color=INK, lw=0.8)
        every = max(1, -(-n // _NUMBERED))
        at = list(range(0, n, every))
        ax.set_xticks(at, [str(order[i]) for i in at], fontsize=6.5)
        ax.set_yticks(at, [str(order[i]) for i in at], fontsize=6.5)
        ax.set_xlabel("model of client")
        ax.set_ylabel("client that is sent it")

    title = f"Affinities of {count(n, 'client')}"
    return picture(title, (4.9, 4.0), draw, format)


def _finite(q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a copy with 0 on the diagonal."""
    found = np.array(q, dtype=np.float64)
    np.fill_diagonal(found, 0.0)
    return found
