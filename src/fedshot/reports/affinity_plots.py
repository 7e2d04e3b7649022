"""Affinity matrices of clients as heat maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedshot.core.text import count
from fedshot.reports.figure_export import INK, picture

_NUMBERED = 30  # maximum number of client numbers that fit beside an axis


def affinity_picture(q: NDArray[np.float64], groups: Sequence[int] | None = None) -> str:
    """Return the SVG of an affinity matrix; row i shows how much the others' models help client i.

    Args:
        q: affinity matrix [clients, clients]; the diagonal is ignored.
        groups: the group of each client; clients are sorted by group, with lines between groups.
    """
    n = len(q)
    order = list(range(n)) if groups is None else sorted(range(n), key=lambda i: (groups[i], i))
    itself = np.eye(n, dtype=bool)
    shown = np.ma.masked_array(np.where(itself, 0.0, q), itself)[np.ix_(order, order)]
    most = float(np.abs(shown).max()) or 1.0

    def draw(ax: Axes) -> None:
        norm = TwoSlopeNorm(0.0, -most, most)
        image = ax.imshow(shown, cmap="PuOr", norm=norm, interpolation="nearest")
        label = "affinity (blank: the client itself)"
        bar = ax.figure.colorbar(image, ax=ax, label=label, shrink=0.8, ticks=MaxNLocator(5))
        bar.outline.set_visible(False)
        for (i, before), after in zip(enumerate(order), order[1:], strict=False):
            if groups is not None and groups[before] != groups[after]:
                ax.axhline(i + 0.5, color=INK, lw=0.8)
                ax.axvline(i + 0.5, color=INK, lw=0.8)
        at = list(range(0, n, max(1, -(-n // _NUMBERED))))
        ax.set_xticks(at, [str(order[i]) for i in at], fontsize=6.5)
        ax.set_yticks(at, [str(order[i]) for i in at], fontsize=6.5)
        ax.set_xlabel("model of client")
        ax.set_ylabel("client that receives it")

    title = f"Affinities of {count(n, 'client')}"
    return picture(title, (4.9, 4.0), draw)
