"""What clients and classes hold: who has how many images of what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, overload

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize, to_rgb
from matplotlib.ticker import MaxNLocator

from fedshot.core.text import count, joined, shortened
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Ints
from fedshot.data.partitions.partition import Partition
from fedshot.reports.figure_export import INK, PALETTE, Format, picture

_BUBBLES = 12  # classes above which a heat map is easier to read
_NAMED = 40  # classes above which only some names fit beside an axis


@overload
def partition_picture(
    partition: Partition,
    labels: Ints,
    class_names: Sequence[str],
    clients: Sequence[int] | None = ...,
    max_clients: int = ...,
    *,
    format: Literal["svg"] = ...,
) -> str: ...
@overload
def partition_picture(
    partition: Partition,
    labels: Ints,
    class_names: Sequence[str],
    clients: Sequence[int] | None = ...,
    max_clients: int = ...,
    *,
    format: Literal["png"],
) -> bytes: ...
def partition_picture(
    partition: Partition,
    labels: Ints,
    class_names: Sequence[str],
    clients: Sequence[int] | None = None,
    max_clients: int = 50,
    *,
    format: Format = "svg",
) -> str | bytes:
    """Draw how many images of each class each client holds.

    Up to twelve classes as bubbles, more as a heat map. Classes of which nobody holds an image are
    left out.

    Args:
        partition: row numbers of each client.
        labels: the class number of every row of the dataset, `dataset.y`.
        class_names: by class number.
        clients: which to show; all of them by default.
        max_clients: show the first of them only.
        format: "svg" or "png".
    """
    asked = list(range(len(partition)) if clients is None else clients)
    shown = asked[:max_clients]
    held = np.unique(labels[partition.indices]).tolist()
    table = np.array(
        [np.bincount(labels[partition[k]], minlength=len(class_names))[held] for k in shown],
        dtype=np.int64,
    ).reshape(len(shown), len(held))
    names = [class_names[c] for c in held]
    cut = f", first {len(shown)} of {len(asked):,} shown" if len(shown) < len(asked) else ""
    few = len(held) <= _BUBBLES

    def draw(ax: Axes) -> None:
        (_bubbles if few else _heat_map)(ax, table)
        _client_ticks(ax, shown)
        ax.set_ylabel(f"client{cut}")
        _class_ticks(ax, names, "x")
        ax.set_xlabel("class" if few else f"class ({count(len(held), 'class', 'classes')})")
        if few:
            _totals(ax, table)

    height = 1.1 + (0.22 if few else 0.115) * max(len(shown), 4)
    title = f"Images of each class at each client{cut}"
    return picture(title, (4.2 if few else 5.0, min(max(height, 2.4), 9.0)), draw, format)


@overload
def class_histogram(
    labels: Ints,
    class_names: Sequence[str],
    split: ClassSplit | None = ...,
    *,
    format: Literal["svg"] = ...,
) -> str: ...
@overload
def class_histogram(
    labels: Ints,
    class_names: Sequence[str],
    split: ClassSplit | None = ...,
    *,
    format: Literal["png"],
) -> bytes: ...
def class_histogram(
    labels: Ints,
    class_names: Sequence[str],
    split: ClassSplit | None = None,
    *,
    format: Format = "svg",
) -> str | bytes:
    """Draw how many images each class has; with a split, what each class is for."""
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
    return picture("Images of each class", (5.0, min(height, 9.0)), draw, format)


def one_client_picture(
    held: Mapping[int, Ints], class_names: Sequence[str], notes: Sequence[str] = ()
) -> str:
    """Draw what one client holds when the same data is dealt to few or to many, as SVG.

    Args:
        held: by number of clients, how many examples of each class the client has.
        class_names: in the order of those counts.
        notes: what to say below, such as which numbers of clients are left out, and why.
    """

    def draw(ax: Axes) -> None:
        figure = ax.figure
        ax.remove()
        panels = figure.subplots(1, max(len(held), 1), sharex=True, sharey=True, squeeze=False)[0]
        for panel, (clients, counts) in zip(panels, held.items(), strict=False):
            at = np.arange(len(counts))
            if len(counts) <= _NAMED:
                panel.bar(at, counts, width=0.8, color=PALETTE[0])
            else:  # bars thinner than a pixel would fade away
                panel.vlines(at[counts > 0], 0, counts[counts > 0], color=PALETTE[0], lw=0.8)
                panel.set_xlim(-1, len(counts))
                panel.set_ylim(bottom=0)
            panel.set_title(f"{clients} devices: {counts.sum():,}", loc="left")
            panel.grid(axis="y")
            panel.yaxis.set_major_locator(MaxNLocator(5, integer=True))
            _few_classes(panel, class_names)
        if not held:
            panels[0].set_axis_off()
        panels[0].set_ylabel("examples of client 0")
        text = "\n".join(shortened(note, 150) for note in notes)
        figure.supxlabel(f"class\n{text}" if held and text else text or "class", fontsize=8.5)

    title = f"Examples of one client, dealt to {joined([str(n) for n in held]) or 'nobody'}"
    svg = picture(title, (9.0, 2.6 + 0.16 * len(notes)), draw, "svg")
    assert isinstance(svg, str)
    return svg


def _few_classes(ax: Axes, names: Sequence[str]) -> None:
    """Name the classes in a small panel where they are few and short, else number them."""
    if len(names) <= _BUBBLES and sum(map(len, names)) <= 24:
        ax.set_xticks(range(len(names)), [shortened(name, 16) for name in names])
    else:
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))


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
    """Write how many images each client has to the right of its row."""
    x = table.shape[1] - 0.35
    for row, total in enumerate(table.sum(axis=1).tolist()):
        ax.text(x, row, f"{total:,}", va="center", ha="left", fontsize=8.5, color=INK)
    ax.text(x, -0.95, "images", va="bottom", ha="left", fontsize=8.5, color=INK)


def _heat_map(ax: Axes, table: Ints) -> None:
    most = max(int(table.max()), 1)
    colours = _fade(PALETTE[0])
    image = ax.imshow(
        np.ma.masked_equal(table, 0),
        cmap=colours,
        norm=Normalize(0, most),
        aspect="auto",
        interpolation="nearest",
    )
    ax.figure.colorbar(
        image,
        ax=ax,
        label="images (blank: none)",
        shrink=0.7,
        aspect=25,
        ticks=MaxNLocator(5, integer=True),
    ).outline.set_visible(False)
    for side in ax.spines.values():
        side.set_visible(True)


def _fade(colour: str) -> ListedColormap:
    """Return one colour from nearly clear to full, so that it works on light and on dark."""
    alphas = np.linspace(0.25, 1, 256)
    return ListedColormap([(*to_rgb(colour), a) for a in alphas])


def _client_ticks(ax: Axes, clients: Sequence[int]) -> None:
    step = 1 if len(clients) <= 25 else 5
    at = range(0, len(clients), step)
    ax.set_yticks(list(at), [str(clients[i]) for i in at])


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
