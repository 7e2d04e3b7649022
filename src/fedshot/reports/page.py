"""One HTML file that tells a comparison: it fetches nothing, and works from a disk.

Figures are drawn by plotly's own script, which the file carries compressed. The policy in the head
lets exactly that script and the page's own run, by their hashes, and nothing be fetched.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from plotly.offline import get_plotlyjs

from fedshot import __version__
from fedshot.core import storage
from fedshot.reports import figures, ledgers
from fedshot.reports.comparison_table import standing
from fedshot.reports.curves import Series
from fedshot.reports.data_views import DataViews
from fedshot.reports.markup import e, section
from fedshot.reports.run_files import Groups, Run
from fedshot.reports.significance import ComparisonRow
from fedshot.reports.summary import summary


def write_page(
    path: Path | str,
    title: str,
    rows: Sequence[ComparisonRow],
    groups: Groups | None = None,
    curves: Sequence[Series] | None = None,
    looks: Mapping[str, DataViews] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Write the page.

    Args:
        path: the HTML file; its folder is made when it does not exist.
        title: of the page.
        rows: the comparison, floors included.
        groups: the runs of each method by label: settings, faults, bytes, clients are told of.
        curves: accuracy on the way; without it, what the runs recorded (validation, else training).
            The rows' floors are drawn beside curves on test episodes only.
        looks: who holds what and where new classes lie, by label, from `look`.
        notes: paragraphs of plain text that follow the summary.
    """
    path, groups, looks = Path(path), groups or {}, looks or {}
    runs = [run for group in groups.values() for run in group]
    if curves is None:
        made = (Series.of_runs(label, group) for label, group in groups.items())
        curves = [series for series in made if series]
    labels = dict.fromkeys([*groups, *(series.label for series in curves)])
    places = {label: i for i, label in enumerate(labels)}
    body = [
        section("comparison", "Comparison", [standing(rows)] if rows else ()),
        section("accuracy", "Accuracy on the way", figures.curves(curves, rows, places)),
        section("reported", "What the methods report", figures.reported(groups, places)),
        section("clients", "Clients apart", figures.spread(groups, places)),
        section("holdings", "What the clients hold", figures.holdings(looks)),
        section("confusion", "What was taken for what", figures.confusion(groups)),
        section("map", "New classes as the model sees them", figures.novel(looks)),
        section("faults", "Refused and lost replies", ledgers.faults(runs) if runs else ()),
        section("ledger", "Bytes", ledgers.ledger(groups)),
        section("episodes", "Test episodes", ledgers.episodes(rows)),
        section("settings", "Settings and machines", ledgers.settings(groups) if groups else ()),
    ]
    head = [
        f"<h1>{e(title)}</h1>",
        f'<p class="lead">{_unbroken(e(summary(rows, runs)))}</p>',
        *(f"<p>{e(note)}</p>" for note in notes),
        *_unfinished(runs),
    ]
    foot = f"<footer>Written by fedshot {e(__version__)}. Figures: plotly.js, MIT licence.</footer>"
    parts = "\n".join([*head, *filter(None, body), foot])
    text = document(title, parts, figures=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.deliver(path, text.encode("utf-8"))


def document(title: str, body: str, extra_style: str = "", *, figures: bool = False) -> str:
    """Return the whole HTML of a page; `body` is markup, `title` is text.

    With `figures` the page carries the scripts that draw them; without, nothing in it runs.
    """
    style = _file("page.css") + extra_style
    allowed, scripts = _scripts() if figures else ("'none'", "")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; img-src data: blob:; script-src {allowed}; \
base-uri 'none'; form-action 'none'">
<title>{e(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
{scripts}</body>
</html>
"""


def _scripts() -> tuple[str, str]:
    """Return what the policy lets run, and the scripts as they stand in the page."""
    script, (packed, plotly) = _file("page.js"), _plotly()
    return (
        f"'{_hash(script)}' '{plotly}'",
        f"""<noscript><p class="warning">Figures are drawn by a \
script in this file, which is switched off here. The tables are whole.</p></noscript>
<script type="application/octet-stream" id="plotly">{packed}</script>
<script>{script}</script>
""",
    )


def _file(name: str) -> str:
    return files("fedshot.reports").joinpath(name).read_text(encoding="utf-8")


@cache
def _plotly() -> tuple[str, str]:
    """Return plotly's script, compressed to under a third and in letters, and its hash."""
    script = get_plotlyjs()
    packed = gzip.compress(script.encode("utf-8"), compresslevel=9, mtime=0)
    return base64.b64encode(packed).decode("ascii"), _hash(script)


def _hash(script: str) -> str:
    """Return what a policy calls a script by."""
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _unfinished(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.result is None:
            yield (
                f'<p class="warning">{e(run.label)} is unfinished: it stands at round '
                f"{run.rounds} of {run.planned} and has no test result.</p>"
            )


def _unbroken(text: str) -> str:
    """Keep figures with their interval and unit, and the shape of an episode, on one line."""
    for unit in (" %", " ± ", " points", " MB", "-way ", "-shot "):
        text = text.replace(unit, unit.replace(" ", "&nbsp;").replace("-", "&#8209;"))
    return text
