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

from fedshot import __version__, storage
from fedshot.reports import charts, ledgers
from fedshot.reports.curves import Series
from fedshot.reports.looks import Holdings, Look, Map
from fedshot.reports.markup import e, figure, section
from fedshot.reports.runs import Groups, Run
from fedshot.reports.standing import standing
from fedshot.reports.summary import summary
from fedshot.reports.verdict import Row
from fedshot.reports.words import joined, printable

_CURVES = {
    "test": "Accuracy on the test episodes.",
    "validation": "Accuracy on episodes of the validation classes: what the round is chosen by, "
    "not what the table reports.",
    "training": "Accuracy of the clients on their own training episodes, mean over the round's "
    "cohort, of classes that they train on. It shows that training runs, not how well new classes "
    "are told apart; for that, see the table.",
}


def write_page(
    path: Path | str,
    title: str,
    rows: Sequence[Row],
    groups: Groups | None = None,
    curves: Sequence[Series] | None = None,
    looks: Mapping[str, Look] | None = None,
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
    body = [
        section("comparison", "Comparison", [standing(rows)] if rows else ()),
        section("accuracy", "Accuracy on the way", _curves(curves, rows)),
        section("clients", "Clients apart", _spread(groups)),
        section("holdings", "What the clients hold", _holdings(looks)),
        section("confusion", "What was taken for what", _confusion(groups)),
        section("map", "New classes as the model sees them", _map(looks)),
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
    text = _document(title, "\n".join([*head, *filter(None, body), foot]))
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_bytes(path, text.encode("utf-8"), sync=False)


def _document(title: str, body: str) -> str:
    style, script = _file("page.css"), _file("page.js")
    packed, plotly = _plotly()
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; img-src data: blob:; script-src '{_hash(script)}' '{plotly}'; \
base-uri 'none'; form-action 'none'">
<title>{e(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
<noscript><p class="warning">Figures are drawn by a script in this file, which is switched off \
here. The tables are whole.</p></noscript>
<script type="application/octet-stream" id="plotly">{packed}</script>
<script>{script}</script>
</body>
</html>
"""


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


def _curves(curves: Sequence[Series], rows: Sequence[Row]) -> Iterator[str]:
    shown = [series for series in curves if len(series.rounds) > 1]
    for kind, words in _CURVES.items():
        some = [series for series in shown if series.episodes == kind]
        if not some:
            continue
        floors = {r.label: r.accuracy for r in rows if r.floor} if kind == "test" else {}
        known = [axis for axis in charts.AXES if all(getattr(s, axis) is not None for s in some)]
        names = joined([printable(s.label) for s in some])
        band = any(s.intervals is not None for s in some)
        yield figure(
            f"curves-{kind}",
            f"Accuracy on {kind} episodes: {names}",
            f"{words}{' Shaded: the 95 % interval over episodes.' if band else ''}",
            [(axis, charts.curves(some, floors, axis)) for axis in known],
        )


def _spread(groups: Groups) -> Iterator[str]:
    clients, worst = {}, {}
    for label, runs in groups.items():
        tests = [run.result["test"] for run in runs if run.result]
        found = [float(a) for test in tests for a in test.get("clients", {}).values()]
        if found:
            clients[label] = found
            tenths = [t["worst_tenth"] for t in tests if t.get("worst_tenth") is not None]
            worst[label] = sum(tenths) / max(len(tenths), 1)
    if clients:
        names = joined([printable(label) for label in clients])
        yield figure(
            "spread",
            f"Accuracy of each client: {names}",
            "Each dot is a client's mean accuracy over the test episodes that it answered; seeds "
            "are put together. The diamond is the mean of the worst tenth.",
            [("clients", charts.spread(clients, worst))],
        )
    alone = [label for label in groups if label not in clients and _tested(groups[label])]
    if alone:
        names = joined([printable(label) for label in alone])
        yield (
            f"<p>{e(names)}: the server's one model answered the test for everybody, so there is "
            "no accuracy of single clients.</p>"
        )


def _tested(runs: Sequence[Run]) -> bool:
    return any(run.result for run in runs)


def _holdings(looks: Mapping[str, Look]) -> Iterator[str]:
    found = {k: seen.holdings for k, seen in looks.items() if isinstance(seen.holdings, Holdings)}
    alike: dict[Holdings, list[str]] = {}
    for label, held in found.items():
        alike.setdefault(held, []).append(printable(label))
    if alike:
        choices = [
            (joined(labels) if len(alike) > 1 else "", charts.who_holds(held))
            for held, labels in alike.items()
        ]
        yield figure(
            "holdings-plot",
            "How many examples of each base class each client holds",
            "Training examples of each base class at each client; blank: none. The test uses other "
            "classes.",
            choices,
            "square",
        )
    yield from _missing({k: v.holdings for k, v in looks.items() if isinstance(v.holdings, str)})


def _confusion(groups: Groups) -> Iterator[str]:
    choices = []
    for label, runs in groups.items():
        counts = _sum([run.result["test"].get("confusion", {}) for run in runs if run.result])
        if counts:
            choices.append((label, charts.confusion(counts)))
    if choices:
        yield figure(
            "confusion-plot",
            "Which share of the queries of each class was taken for which class",
            "Test queries of each class (rows), and the share of them that was taken for each "
            "class (columns). An episode asks for some of the classes only, so a class is told "
            "apart from those it met. Seeds are put together.",
            choices,
            "square",
        )
    elif any(_tested(runs) for runs in groups.values()):
        yield ("<p>Not recorded: confusions are kept for tests of at most 30 classes.</p>")


def _sum(seeds: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    total: dict[str, dict[str, int]] = {}
    for counts in seeds:
        for y, row in counts.items():
            mine = total.setdefault(y, {})
            for said, n in row.items():
                mine[said] = mine.get(said, 0) + n
    return total


def _map(looks: Mapping[str, Look]) -> Iterator[str]:
    found = {label: seen.map for label, seen in looks.items() if isinstance(seen.map, Map)}
    if found:
        choices = [(label, charts.new_classes(seen)) for label, seen in found.items()]
        cut = next((m for m in found.values() if len(m.points) < m.classes), None)
        some = f" {len(cut.points)} of the {cut.classes} novel classes are shown." if cut else ""
        yield figure(
            "map-plot",
            "Examples of novel classes by the features of the chosen round",
            "Examples of classes that no client trained on, placed by the features of the chosen "
            "round (first seed): neighbours look alike to the model. Two axes leave much out; the "
            f"accuracy is in the table, not here.{some}",
            choices,
            "square",
        )
    yield from _missing({k: v.map for k, v in looks.items() if isinstance(v.map, str)})


def _missing(reasons: Mapping[str, str]) -> Iterator[str]:
    alike: dict[str, list[str]] = {}
    for label, reason in reasons.items():
        alike.setdefault(reason, []).append(printable(label))
    for reason, labels in alike.items():
        yield f'<p class="small">Not shown for {e(joined(labels))}: {e(reason)}</p>'


def _unbroken(text: str) -> str:
    """Keep figures with their interval and unit, and the shape of an episode, on one line."""
    for unit in (" %", " ± ", " points", " MB", "-way ", "-shot "):
        text = text.replace(unit, unit.replace(" ", "&nbsp;").replace("-", "&#8209;"))
    return text
