"""The report's figures as plotly JSON: curves, box plots, heat maps and scatter plots.

The page's script sets the colours of text, axes and heat maps, for light and dark schemes. Plotly
interprets some HTML tags in text, so every name from data goes through `_text`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import plotly.graph_objects as go

from fedshot.core.text import distinct, shortened
from fedshot.reports.curves import Line, Series
from fedshot.reports.figure_export import INK, PALETTE
from fedshot.reports.run_views import Map, PartitionTable

Figure: TypeAlias = dict[str, Any]

_DASHES = ("solid", "dash", "dot", "dashdot")
_MARKS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star")
_LEGEND = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0}
_WRITTEN = 12  # maximum number of columns of a heat map with values in its cells
_WIDE = 20  # ratio of the largest to the smallest value from which an axis is logarithmic
_BUTTONS = 28  # pixels of plotly's buttons, which would cover the cells of a heat map
_FEW_ROUNDS = 10
_POINTS = 300  # maximum number of clients drawn as points; of more, only outliers

AXES = {"rounds": "communication round", "megabytes": "MB sent and received, all clients together",
        "seconds": "seconds of training", "hours": "simulated hours"}  # fmt: skip
KINDS = {"peeked": "the test's (NOT HONEST)"}
"""Value of `Series.episodes` -> its name on the page, where the two differ."""


def curves(
    series: Sequence[Series], baselines: Mapping[str, float], axis: str, colours: Mapping[str, int]
) -> Figure:
    """Return a figure of accuracy against the values of an axis; 95 % intervals are shaded.

    Args:
        series: the curves.
        baselines: accuracies on the same episodes, drawn as dashed lines.
        axis: a key of `AXES`.
        colours: label -> index of its colour, the same in all figures.
    """
    figure = go.Figure()
    for s in series:
        x = getattr(s, axis)
        if x is not None:
            _curve(figure, colours[s.label], s, [_number(value) for value in x], axis)
    ends = [x for trace in figure.data for x in trace.x if x is not None] or [0, 1]
    for i, (name, accuracy) in enumerate(baselines.items()):
        line = {"color": INK, "width": 1.3, "dash": _DASHES[1 + i % 3]}
        figure.add_scatter(x=[min(ends), max(ends)], y=[100 * accuracy] * 2, name=_text(name),
                           mode="lines", line=line, hovertemplate="%{y:.2f} %")  # fmt: skip
    kinds = " and ".join(sorted({KINDS.get(s.episodes, s.episodes) for s in series})) or "test"
    unified = axis == "rounds" and len(figure.data) < 16
    figure.update_layout(
        xaxis_title=AXES[axis], xaxis_rangemode="tozero", yaxis_ticksuffix=" %",
        yaxis_title=f"accuracy on {kinds} episodes", legend=_LEGEND,
        hovermode="x unified" if unified else "closest",
    )  # fmt: skip
    if axis == "rounds":
        _whole_rounds(figure)
    return _done(figure, 400 + 11 * len(figure.data), 380 + 13 * len(figure.data))


def _curve(figure: Any, i: int, s: Series, x: Sequence[float | None], axis: str) -> None:
    colour, name = PALETTE[i % len(PALETTE)], _text(s.label)
    y = [_number(100 * value) for value in s.accuracies]
    if s.intervals is not None:
        half = [100 * value for value in s.intervals]
        low = [None if at is None else max(at - h, 0.0) for at, h in zip(y, half, strict=True)]
        high = [None if at is None else min(at + h, 100.0) for at, h in zip(y, half, strict=True)]
        figure.add_scatter(
            x=[*x, *reversed(x)], y=[*high, *reversed(low)], fill="toself", legendgroup=name,
            fillcolor=_clear(colour, 0.17), mode="lines", line={"width": 0}, hoverinfo="skip",
            showlegend=False, name=name,
        )  # fmt: skip
    figure.add_scatter(
        x=x, y=y, name=name, legendgroup=name,
        mode="lines+markers" if len(x) <= 40 else "lines",
        line=_line(i, 2.2),
        marker={"symbol": _MARKS[i % len(_MARKS)], "size": 6},
        customdata=[[r] for r in s.rounds],
        hovertemplate="%{y:.2f} %" if axis == "rounds" else "%{y:.2f} %, round %{customdata[0]}",
    )  # fmt: skip


def training_metric(lines: Mapping[str, Line], metric: str, colours: Mapping[str, int]) -> Figure:
    """Return a figure of one training metric by round, with a line for each method."""
    figure = go.Figure()
    for label, (rounds, values) in lines.items():
        figure.add_scatter(
            x=rounds, y=[_number(value) for value in values], name=_text(label), mode="lines",
            line=_line(colours[label], 2), hovertemplate="%{y:.4g}",
        )  # fmt: skip
    figure.update_layout(
        xaxis_title=AXES["rounds"], xaxis_rangemode="tozero", yaxis_title=_text(metric),
        legend=_LEGEND, showlegend=True, hovermode="x unified" if len(lines) < 16 else "closest",
    )  # fmt: skip
    _whole_rounds(figure)
    return _done(figure, 360 + 11 * len(lines), 340 + 13 * len(lines))


def points(name: str, found: Sequence[tuple[Any, float, float]]) -> Figure:
    """Return a figure of validation accuracy against the option `name`.

    `found` holds a tuple for each point of a sweep: the option's value, the accuracy, and the
    half-width of the accuracy's interval.
    """
    values = [value for value, _, _ in found]
    numbers = all(type(value) in (int, float) for value in values)
    wide = numbers and max(values, default=0) >= _WIDE * min(values, default=1) > 0
    figure = go.Figure()
    figure.add_scatter(
        x=values if numbers else [_text(value) for value in values],
        y=[100 * accuracy for _, accuracy, _ in found], mode="markers",
        error_y={"array": [100 * half for _, _, half in found], "thickness": 1.2, "width": 3},
        marker={"color": PALETTE[0], "size": 8}, hovertemplate="%{x}: %{y:.2f} %",
    )  # fmt: skip
    kind = "log" if wide else "linear" if numbers else "category"
    figure.update_xaxes(type=kind, title=_text(name))
    figure.update_yaxes(ticksuffix=" %", title="accuracy on validation episodes")
    return _done(figure, 380, 340)


def spread(
    clients: Mapping[str, Sequence[tuple[str, float]]],
    worst: Mapping[str, float],
    colours: Mapping[str, int],
) -> Figure:
    """Return a figure of each client's accuracy, one row per method.

    `clients` is label of a method -> (name, accuracy) of its clients. Diamonds mark `worst`, the
    mean accuracy of the worst tenth of the clients.
    """
    figure = go.Figure()
    shown = dict(zip(clients, _distinct(clients, 24), strict=True))
    for label, found in clients.items():
        colour, few = PALETTE[colours[label] % len(PALETTE)], len(found) <= _POINTS
        figure.add_box(
            x=[_number(100 * a) for _, a in found], y=[shown[label]] * len(found),
            text=[f"client {_text(name)}" for name, _ in found],
            orientation="h", boxpoints="all" if few else "outliers", jitter=0.6, pointpos=0,
            marker={"color": colour, "size": 6, "opacity": 0.75}, line={"width": 1.4},
            fillcolor=_clear(colour, 0.14), width=0.6, name=_text(label), showlegend=False,
            hovertemplate="%{text}: %{x:.2f} %<extra></extra>",
        )  # fmt: skip
    figure.add_scatter(
        x=[_number(100 * a) for a in worst.values()], y=[shown[label] for label in worst],
        mode="markers", name="mean of the worst tenth",
        marker={"symbol": "diamond", "size": 13, "color": INK, "line": {"width": 0}},
        hovertemplate="worst tenth %{x:.2f} %<extra></extra>",
    )  # fmt: skip
    figure.update_layout(
        xaxis_title="accuracy of a client", xaxis_ticksuffix=" %", xaxis_nticks=6,
        yaxis_autorange="reversed", yaxis_showgrid=False, showlegend=True, legend=_LEGEND,
    )  # fmt: skip
    height = 190 + 74 * len(clients)
    return _done(figure, height, height)


def contributions(
    clients: Mapping[int, Sequence[tuple[int, float]]], liars: Collection[int], name: str
) -> Figure:
    """Return a figure of the norm or cosine of each client's change of the model by round.

    Args:
        clients: client -> (round, value) for each round with a reply.
        liars: dishonest clients, whose lines are thick and coloured.
        name: what the values are, "norm" or "cosine"; norms have a logarithmic axis.
    """
    figure = go.Figure()
    coloured = sorted(set(liars) & set(clients))
    for client in [*(c for c in clients if c not in coloured), *coloured]:
        i = coloured.index(client) if client in coloured else None
        line = {"color": "#8c8c8c", "width": 1} if i is None else _line(i, 3)
        figure.add_scatter(
            x=[round for round, _ in clients[client]],
            y=[_number(value) for _, value in clients[client]],
            name=f"client {client}" + ("" if i is None else ", dishonest"), line=line,
            mode="lines" if len(clients[client]) > 1 else "markers", showlegend=i is not None,
            hovertemplate="%{fullData.name}: %{y:.3g}<extra></extra>",
        )  # fmt: skip
    figure.update_layout(xaxis_title=AXES["rounds"], yaxis_title=name, legend=_LEGEND)
    if name == "norm":
        norms = [value for values in clients.values() for _, value in values if value > 0]
        wide = bool(norms) and max(norms) > 100 * min(norms)
        figure.update_yaxes(type="log", dtick=1 if wide else math.log10(2))  # else digits alone
    return _done(figure, 380, 340)


def partition(held: PartitionTable) -> Figure:
    """Return a heat map: the number of examples of each class at each client."""
    cut = "" if len(held.clients) == held.total else f", first {len(held.clients)} of {held.total}"
    figure = _heat(
        [[n or None for n in row] for row in held.table],
        _distinct(held.classes, 20),
        _distinct(held.clients, 24),
        "%{z}",
        "client %{y}, class %{x}: %{z} examples<extra></extra>",
        ("base class", f"client{cut}"),
    )
    height = min(150 + 25 * max(len(held.clients), 5), 780)
    return _done(figure, height, height, top=_BUTTONS)


def confusion(counts: Mapping[str, Mapping[str, int]]) -> Figure:
    """Return a heat map of the confusion matrix, in percent of the queries of each true class."""
    names = sorted({*counts, *(guess for row in counts.values() for guess in row)}, key=_natural)
    table = [[counts.get(y, {}).get(guess, 0) for guess in names] for y in names]
    shares = [[100 * n / max(sum(row), 1) for n in row] for row in table]
    shown = _distinct(names, 14)
    hover = "%{y} predicted as %{x}: %{z:.1f} %<extra></extra>"
    figure = _heat(shares, shown, shown, "%{z:.0f}", hover, ("predicted class", "true class"))
    figure.data[0].update(colorbar={"ticksuffix": " %"})
    height = min(170 + 44 * max(len(names), 4), 700)
    return _done(figure, height, min(height, 440), top=_BUTTONS)


def novel_classes(found: Map) -> Figure:
    """Return a scatter plot of examples of novel classes, with a colour and marker for each."""
    figure = go.Figure()
    for i, (name, points) in enumerate(found.points.items()):
        figure.add_scatter(
            x=[x for x, _ in points], y=[y for _, y in points], mode="markers",
            name=_text(name, 24),
            marker={"color": PALETTE[i % len(PALETTE)], "symbol": _MARKS[i % len(_MARKS)],
                    "size": 8, "opacity": 0.8},
            hovertemplate="%{fullData.name}<extra></extra>",
        )  # fmt: skip
    titles = ["first feature", "second feature"]
    if found.shares is not None:
        parts = [f"{100 * share:.0f} % of variance" for share in found.shares]
        titles = [f"principal axis {i + 1}, {part}" for i, part in enumerate(parts)]
    figure.update_layout(xaxis_title=titles[0], yaxis_title=titles[1], legend=_LEGEND,
                         showlegend=True)  # fmt: skip
    figure.update_xaxes(showticklabels=False, zeroline=False)
    figure.update_yaxes(showticklabels=False, zeroline=False)
    return _done(figure, 540, 430)


def _heat(
    z: Sequence[Sequence[float | None]],
    columns: Sequence[str],
    rows: Sequence[str],
    text: str,
    hover: str,
    titles: tuple[str, str],
) -> Any:
    """Return a heat map of `z` [rows, columns]; its axes are categories, even if they are digits.

    `text` and `hover` are plotly's templates of the text in a cell and of its tooltip; `titles` are
    the titles of the x and y axes.
    """
    figure = go.Figure()
    written = len(columns) <= _WRITTEN and len(rows) <= 2 * _WRITTEN
    gap = 2 if max(len(columns), len(rows)) <= 3 * _WRITTEN else 1
    most = max((n for row in z for n in row if n is not None), default=1)
    figure.add_heatmap(
        z=z, x=list(columns), y=list(rows), xgap=gap, ygap=gap, zmin=0, zmax=most or 1,
        texttemplate=text if written else "", hovertemplate=hover, showscale=not written,
        hoverongaps=False,
    )  # fmt: skip
    figure.update_xaxes(type="category", showgrid=False, ticks="", title=titles[0])
    figure.update_yaxes(type="category", showgrid=False, ticks="", title=titles[1],
                        autorange="reversed")  # fmt: skip
    return figure


def _whole_rounds(figure: Any) -> None:
    """Mark each round on the x axis if there are few; plotly would also mark half rounds."""
    last = max((x for trace in figure.data for x in trace.x if x is not None), default=0)
    figure.update_xaxes(dtick=1 if last <= _FEW_ROUNDS else None)


def _done(figure: Any, height: int, narrow: int, top: int = 8) -> Figure:
    """Return a plotly figure as JSON.

    `height` is its height in pixels, `narrow` that on a narrow screen, `top` its upper margin.
    """
    figure.update_layout(
        height=height, meta={"narrow": narrow}, template="none",
        margin={"l": 8, "r": 8, "t": top, "b": 8},
    )  # fmt: skip
    found: Figure = figure.to_plotly_json()
    found["layout"].pop("template", None)
    return found


def _text(name: object, length: int = 40) -> str:
    """Return a name, shortened to `length` and escaped so that plotly shows it literally."""
    return html.escape(shortened(name, length), quote=False)


def _distinct(names: Iterable[str], length: int) -> list[str]:
    """Return shortened names; equal names get numbers, since plotly merges equal categories."""
    return distinct(_text(name, length) for name in names)


def _natural(name: str) -> tuple[bool, float, str]:
    return (not name.isdecimal(), float(name) if name.isdecimal() else 0.0, name)


def _number(value: float) -> float | None:
    """Return a value for JSON: None for NaN and infinity, which JSON cannot represent."""
    return float(value) if math.isfinite(value) else None


def _line(i: int, width: float) -> dict[str, Any]:
    """Return the style of line `i`; its dashes tell lines apart even without colours."""
    return {"color": PALETTE[i % len(PALETTE)], "width": width, "dash": _DASHES[i % len(_DASHES)]}


def _clear(colour: str, alpha: float) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({', '.join(map(str, parts))}, {alpha})"
