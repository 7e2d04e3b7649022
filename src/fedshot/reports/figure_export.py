"""Matplotlib figures as SVG text; matplotlib's global settings are neither used nor changed.

Text, axes and grid are drawn in `INK`, a grey that is legible on white and on black.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedshot.core.text import printable

INK = "#767b85"
# Based on Okabe and Ito's palette for colour-blind readers; the contrast of each colour is at least
# 3:1 on white and on #15181d.
PALETTE = ("#2b7cc0", "#d55e00", "#0a9471", "#b8609a", "#a07a0c", "#6f7fd0", "#8a6d5a")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))

_STYLE = {
    "svg.hashsalt": "fedshot",
    "svg.fonttype": "none",  # text stays text, for search, screen readers, styles
    "text.parse_math": False,  # a "$" in a name is a dollar
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def picture(title: str, size: tuple[float, float], draw: Callable[[Axes], None]) -> str:
    """Return the SVG of a figure of `size` inches with one pair of axes, on which `draw` draws."""
    return drawing(title, size, lambda figure: draw(figure.add_subplot()))


def drawing(title: str, size: tuple[float, float], draw: Callable[[Figure], None]) -> str:
    """Return the SVG of a figure of `size` inches, on which `draw` draws."""
    out = io.StringIO()
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        # The SVG contains the characters; the font is on the reader's machine.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing")
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        metadata = {"Title": printable(title), "Date": None, "Creator": None}
        figure.savefig(out, format="svg", metadata=metadata)
    return out.getvalue()
