"""The report: one HTML file that compares runs and loads no other files.

Plotly's script, which draws the figures, is in the file, compressed. The content security policy in
the head of the page allows only this script and the page's own script, by their hashes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from fedshot.core import storage
from fedshot.reports import figures, ledgers
from fedshot.reports.curves import Series
from fedshot.reports.markup import render, template_source
from fedshot.reports.run_files import Groups
from fedshot.reports.run_views import DataViews
from fedshot.reports.significance import ComparisonRow
from fedshot.reports.summary import summary
from fedshot.reports.table import comparison_values
from fedshot.reports.trust_views import CLIENT, OUTCOME, trust_views


def write_page(
    path: Path | str,
    title: str,
    rows: Sequence[ComparisonRow],
    groups: Groups | None = None,
    curves: Sequence[Series] | None = None,
    views: Mapping[str, DataViews] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Write the report.

    Args:
        path: the HTML file; its folder is created if needed.
        title: title of the page.
        rows: rows of the comparison table, baselines included.
        groups: runs of each method by label, for settings, faults, bytes and client accuracies.
        curves: accuracy during training; None for the accuracy that the runs recorded on validation
            or else training episodes. Baselines are drawn only with curves on test episodes.
        views: label -> client data and map of novel classes, as returned by `data_views`.
        notes: paragraphs of plain text below the summary.
    """
    path, groups, views = Path(path), groups or {}, views or {}
    runs = [run for group in groups.values() for run in group]
    if curves is None:
        made = (Series.of_runs(label, group) for label, group in groups.items())
        curves = [series for series in made if series]
    labels = dict.fromkeys([*groups, *(series.label for series in curves)])
    colours = {label: i for i, label in enumerate(labels)}
    page = render(
        "report.html",
        title=title,
        lead=_unbroken(summary(rows, runs)),
        notes=notes,
        unfinished=[run for run in runs if run.result is None],
        comparison=comparison_values(rows),
        figures=[
            ("accuracy", "Accuracy during training", [*figures.curves(curves, rows, colours)]),
            ("reported", "Training metrics", [*figures.training_metrics(groups, colours)]),
            ("clients", "Accuracy of each client", [*figures.spread(groups, colours)]),
            ("holdings", "Data of each client", [*figures.holdings(views)]),
            ("confusion", "Confusion matrix", [*figures.confusion(groups)]),
            ("map", "Novel classes in the feature space", [*figures.novel_classes(views)]),
        ],
        trust=trust_views(groups),
        trust_heads=(OUTCOME, CLIENT),
        faults=ledgers.faults(runs),
        ledgers=ledgers.ledgers(groups),
        episodes=ledgers.episodes(rows),
        settings=ledgers.settings(groups) if groups else None,
        machines=ledgers.machines(runs),
        **scripts(),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.deliver(path, page)


def scripts() -> dict[str, Markup]:
    """Return the values of the template `figures.html`: the scripts and their hashes."""
    script, (packed, plotly_hash) = template_source("page.js"), _plotly()
    return {"page_script": script, "page_hash": _hash(script), "plotly": packed,
            "plotly_hash": plotly_hash}  # fmt: skip


@cache
def _plotly() -> tuple[Markup, Markup]:
    """Return plotly's script, compressed and in base64, and the hash of the script."""
    script = get_plotlyjs()
    packed = gzip.compress(script.encode("utf-8"), compresslevel=9, mtime=0)
    return Markup(base64.b64encode(packed).decode("ascii")), _hash(script)


def _hash(script: str) -> Markup:
    """Return the hash of a script in the form that a content security policy requires."""
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return Markup(f"sha256-{base64.b64encode(digest).decode('ascii')}")


def _unbroken(text: str) -> Markup:
    """Return a text as HTML, without line breaks in numbers with units or "5-way 1-shot"."""
    html = str(escape(text))
    for unit in (" %", " ± ", " points", " MB", "-way ", "-shot "):
        html = html.replace(unit, unit.replace(" ", "&nbsp;").replace("-", "&#8209;"))
    return Markup(html)
