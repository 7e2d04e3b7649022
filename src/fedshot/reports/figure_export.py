"""From a drawing to SVG or PNG: no global state of matplotlib is read or left changed.

Text, axes and grid have one mid-tone, `INK`, which is legible on white and on black.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Literal, TypeAlias

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedshot.core.text import printable

Format: TypeAlias = Literal["svg", "png"]

INK = "#767b85"
# After Okabe and Ito's palette for colour-blind readers, each at least 3:1 on white and on #15181d.
PALETTE = ("#2b7cc0", "#d55e00", "#0a9471", "#b8609a", "#a07a0c", "#6f7fd0", "#8a6d5a")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))

_STYLE = {
    "svg.hashsalt": "fedshot",
    "svg.fonttype": "none",  # text stays text: it can be searched, read aloud and restyled
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


def picture(
    title: str, size: tuple[float, float], draw: Callable[[Axes], None], format: Format
) -> str | bytes:
    """Return what `draw` puts on one pair of axes of `size` inches, as SVG text or PNG bytes."""
    return drawing(title, size, lambda figure: draw(figure.add_subplot()), format)


def drawing(
    title: str, size: tuple[float, float], draw: Callable[[Figure], None], format: Format
) -> str | bytes:
    """Return what `draw` puts on a figure of `size` inches, as SVG text or PNG bytes."""
    out = io.BytesIO()
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        # SVG names its characters and the reader's machine has the font.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing")
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        if format == "svg":
            metadata = {"Title": printable(title), "Date": None, "Creator": None}
            figure.savefig(out, format="svg", metadata=metadata)
        else:
            figure.savefig(out, format="png", dpi=160, facecolor="white", metadata={"Software": ""})
    return out.getvalue().decode("utf-8") if format == "svg" else out.getvalue()
