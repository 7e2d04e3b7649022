"""Plots of a partition: the number of examples of each class, in total and at each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedshot.core.text import count, joined, shortened
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Ints
from fedshot.data.partitions.partition import Partition
from fedshot.reports.figure_export import INK, PALETTE, drawing, picture

_BUBBLES = 12  # maximum number of classes drawn as bubbles; more classes are a heat map
_NAMED = 40  # maximum number of classes whose names fit beside an axis
_CLIENTS = 50  # maximum number of clients shown


def partition_picture(partition: Partition, labels: Ints, class_names: Sequence[str]) -> str:
    """Return the SVG of a plot of the number of images of each class at each client.

    Up to 12 classes are drawn as bubbles, more classes as a heat map. Classes that no client has
    are left out, and only the first 50 clients are shown.

    Args:
        partition: the rows of the dataset that each client has.
        labels: class number of every row of the dataset, `dataset.y`.
        class_names: names by class number.
    """
    held, table = class_counts(partition, labels, _CLIENTS)
    shown = range(len(table))
    names = [class_names[c] for c in held]
    cut = f", first {_CLIENTS} of {len(partition):,} shown" if len(partition) > _CLIENTS else ""
    few = len(held) <= _BUBBLES

    def draw(ax: Axes) -> None:
        (_bubbles if few else _heat_map)(ax, table)
        ax.set_yticks(shown[:: 1 if len(shown) <= 25 else 5])
        ax.set_ylabel(f"client{cut}")
        _class_ticks(ax, names, "x")
        ax.set_xlabel("class" if few else f"class ({count(len(held), 'class', 'classes')})")
        if few:
            _totals(ax, table)

    height = 1.1 + (0.22 if few else 0.115) * max(len(shown), 4)
    title = f"Images of each class at each client{cut}"
    return picture(title, (4.2 if few else 5.0, min(max(height, 2.4), 9.0)), draw)


def class_counts(partition: Partition, labels: Ints, most: int) -> tuple[list[int], Ints]:
    """Return the classes that any client has, and the counts [clients, classes] of their examples.

    The counts are those of the first `most` clients.
    """
    held, positions = np.unique(labels, return_inverse=True)
    table = [
        np.bincount(positions[partition[k]], minlength=len(held))
        for k in range(min(len(partition), most))
    ]
    used = np.isin(held, labels[partition.indices])
    return held[used].tolist(), np.array(table, dtype=np.int64).reshape(len(table), len(held))[
        :, used
    ]


def class_histogram(
    labels: Ints, class_names: Sequence[str], split: ClassSplit | None = None
) -> str:
    """Return the SVG of a bar plot of the images of each class, coloured by part of the split."""
    counts = np.bincount(labels, minlength=len(class_names))
    parts = {"images": tuple(range(len(counts)))}
    if split is not None:
        used = {"base": split.base, "validation": split.validation, "novel": split.novel}
        rest = set(parts["images"]).difference(*used.values())
        parts = {name: c for name, c in (used | {"unused": tuple(sorted(rest))}).items() if c}
    order = [c for classes in parts.values() for c in classes]
    place = {c: i for i, c in enumerate(order)}

    def draw(ax: Axes) -> None:
        for i, (name, classes) in enumerate(parts.items()):
            at = [place[c] for c in classes]
            colour = INK if name == "unused" else PALETTE[i]
            ax.barh(at, counts[list(classes)], height=0.75, color=colour, label=name)
        ax.set_ylim(len(order) - 0.4, -0.6)
        ax.set_xlabel("images")
        ax.set_ylabel("class")
        ax.grid(axis="x")
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        _class_ticks(ax, [class_names[c] for c in order], "y")
        if len(parts) > 1:
            ax.figure.legend(loc="outside lower right", ncols=len(parts))

    height = 1.0 + max(0.2 * len(order) if len(order) <= _NAMED else 0.06 * len(order), 1.2)
    return picture("Images of each class", (5.0, min(height, 9.0)), draw)


def one_client_picture(
    held: Mapping[int, Ints], class_names: Sequence[str], notes: Sequence[str] = ()
) -> str:
    """Return the SVG of one client's class counts, for splits among different numbers of clients.

    Args:
        held: number of clients -> the client's number of examples of each class.
        class_names: names of the classes, in the order of these counts.
        notes: lines below the plot, such as why a number of clients is left out.
    """

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, max(len(held), 1), sharex=True, sharey=True, squeeze=False)[0]
        for panel, (clients, counts) in zip(panels, held.items(), strict=False):
            at = np.arange(len(counts))
            if len(counts) <= _NAMED:
                panel.bar(at, counts, width=0.8, color=PALETTE[0])
            else:  # bars thinner than a pixel would be invisible
                panel.vlines(at[counts > 0], 0, counts[counts > 0], color=PALETTE[0], lw=0.8)
                panel.set_xlim(-1, len(counts))
                panel.set_ylim(bottom=0)
            panel.set_title(f"{clients} clients: {counts.sum():,}", loc="left")
            panel.grid(axis="y")
            panel.yaxis.set_major_locator(MaxNLocator(5, integer=True))
            if len(class_names) <= _BUBBLES and sum(map(len, class_names)) <= 24:
                panel.set_xticks(
                    range(len(class_names)), [shortened(name, 16) for name in class_names]
                )
            else:
                panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        if not held:
            panels[0].set_axis_off()
        panels[0].set_ylabel("examples of client 0")
        text = "\n".join(shortened(note, 150) for note in notes)
        figure.supxlabel(f"class\n{text}" if held and text else text or "class", fontsize=8.5)

    title = f"Examples of one client among {joined([str(n) for n in held]) or 'no clients'}"
    return drawing(title, (9.0, 2.6 + 0.16 * len(notes)), draw)


def _bubbles(ax: Axes, table: Ints) -> None:
    rows, columns = np.nonzero(table)
    n = table[rows, columns]
    most = int(n.max()) if len(n) else 1
    ax.scatter(columns, rows, s=190 * n / most, color=PALETTE[0], alpha=0.85, lw=0)
    ax.set_ylim(table.shape[0] - 0.4, -0.6)
    ax.set_xlim(-0.6, table.shape[1] - 0.4)
    ax.grid(axis="y")
    ax.tick_params(length=0)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    ax.set_title(f"area: images; the largest is {most:,}", loc="left", fontsize=8.5)


def _totals(ax: Axes, table: Ints) -> None:
    """Write the number of images of each client to the right of the client's row."""
    x = table.shape[1] - 0.35
    for row, total in enumerate(table.sum(axis=1).tolist()):
        ax.text(x, row, f"{total:,}", va="center", ha="left", fontsize=8.5, color=INK)
    ax.text(x, -0.95, "images", va="bottom", ha="left", fontsize=8.5, color=INK)


def _heat_map(ax: Axes, table: Ints) -> None:
    # Shades of one colour from nearly transparent to opaque are legible on white and on black.
    shades = ListedColormap([(*to_rgb(PALETTE[0]), a) for a in np.linspace(0.25, 1, 256)])
    image = ax.imshow(
        np.ma.masked_equal(table, 0), cmap=shades, norm=Normalize(0, max(int(table.max()), 1)),
        aspect="auto", interpolation="nearest",
    )  # fmt: skip
    ticks = MaxNLocator(5, integer=True)
    bar = ax.figure.colorbar(
        image, ax=ax, label="images (blank: none)", shrink=0.7, aspect=25, ticks=ticks
    )
    bar.outline.set_visible(False)
    for side in ax.spines.values():
        side.set_visible(True)


def _class_ticks(ax: Axes, names: Sequence[str], axis: Literal["x", "y"]) -> None:
    step = max(1, -(-len(names) // _NAMED))
    if axis == "x" and len(names) > _NAMED:
        step = -(-len(names) // 20)
    at = list(range(0, len(names), step))
    texts = [shortened(names[i], 16) for i in at]
    if axis == "y":
        ax.set_yticks(at, texts)
        return
    long = sum(map(len, texts)) > 44
    ax.set_xticks(at, texts, rotation=60 if long else 0, ha="right" if long else "center")
    if long:
        for text in ax.get_xticklabels():
            text.set_rotation_mode("anchor")
