"""One HTML file that tells a comparison: nothing is fetched, nothing is run, light and dark.

Everything that comes from data or settings is escaped here, once, by `_e`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedshot import __version__, storage
from fedshot.reports.embed import embed
from fedshot.reports.plots import Series, accuracy_curve
from fedshot.reports.runs import Run
from fedshot.reports.summary import summary
from fedshot.reports.table import COLUMNS, caption, cells, remark, sections
from fedshot.reports.verdict import Row
from fedshot.reports.words import count, joined, printable

_FAULTS = 100  # lines of faults shown of one run; the others are counted

_CURVES = {
    "test": "Accuracy on the test episodes, by communication round.",
    "validation": "Accuracy on episodes of the validation classes, by communication round: what "
    "the round is chosen by, not what the table reports.",
    "training": "Accuracy of the clients on their own training episodes, mean over the round's "
    "cohort, of classes that they train on. It shows that training runs, not how well new classes "
    "are told apart; for that, see the table.",
}


def write_page(
    path: Path | str,
    title: str,
    rows: Sequence[Row],
    curves: Sequence[Series] | None = None,
    partition_svg: str | None = None,
    runs: Sequence[Run] = (),
    notes: Sequence[str] = (),
) -> None:
    """Write the page.

    Args:
        path: the HTML file; its folder is made when it does not exist.
        title: of the page.
        rows: the comparison, floors included.
        curves: accuracy by round; without it, what the runs recorded (validation, else training).
            The rows' floors are drawn beside curves on test episodes only.
        partition_svg: from `partition_picture`.
        runs: whose settings, faults and environment to tell.
        notes: paragraphs of plain text that follow the summary.
    """
    path = Path(path)
    if curves is None:
        curves = [series for run in runs if (series := Series.of_run(run))]
    parts = [
        f"<h1>{_e(title)}</h1>",
        f'<p class="lead">{_unbroken(_e(summary(rows, runs)))}</p>',
        *(f"<p>{_e(note)}</p>" for note in notes),
        *_unfinished(runs),
        *(_comparison(rows) if rows else ()),
        *_curves(curves, rows),
        *(_partition(partition_svg) if partition_svg else ()),
        *(_faults(runs) if runs else ()),
        *_episodes(rows),
        *(_settings(runs) if runs else ()),
        f"<footer>Written by fedshot {_e(__version__)}.</footer>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_bytes(path, document(title, "\n".join(parts)).encode("utf-8"), sync=False)


def document(title: str, body: str, extra_style: str = "") -> str:
    """Return the whole HTML of a page; `body` is markup, `title` is text."""
    style = files("fedshot.reports").joinpath("page.css").read_text(encoding="utf-8") + extra_style
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" \
content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{_e(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _unfinished(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.result is None:
            yield (
                f'<p class="warning">{_e(run.label)} is unfinished: it stands at round '
                f"{run.rounds} of {run.planned} and has no test result.</p>"
            )


def _comparison(rows: Sequence[Row]) -> Iterator[str]:
    yield '<section aria-labelledby="comparison"><h2 id="comparison">Comparison</h2>'
    yield '<div class="scroll" tabindex="0" role="region" aria-labelledby="comparison"><table>'
    head = (f'<th scope="col" class="{_class(name)}">{_e(_heading(name))}</th>' for name in COLUMNS)
    yield f"<thead><tr>{''.join(head)}</tr></thead>"
    for section in sections(rows):
        yield '<tbody class="floors">' if section[0].floor else "<tbody>"
        if section[0].floor and len(section) < len(rows):
            yield f'<tr class="section"><td colspan="{len(COLUMNS)}">floors</td></tr>'
        yield from (_row(row, rows) for row in section)
        yield "</tbody>"
    yield f'</table></div><p class="small">{_e(caption(rows))}</p></section>'


def _row(row: Row, rows: Sequence[Row]) -> str:
    label, accuracy, *numbers, _ = cells(row, rows)
    mean, _, half = accuracy.partition(" ± ")
    said = remark(row, rows)
    note = "; ".join(
        filter(None, (said and f"<strong>{_e(said)}</strong>", row.note and _e(row.note)))
    )
    return (
        f'<tr><th scope="row">{_e(label)}</th>'
        f'<td class="accuracy">{mean} <span>± {half}</span></td>'
        + "".join(f"<td>{_e(number)}</td>" for number in numbers)
        + f'<td class="note">{note}</td></tr>'
    )


def _curves(curves: Sequence[Series], rows: Sequence[Row]) -> Iterator[str]:
    shown = [series for series in curves if len(series.rounds) > 1]
    if not shown:
        return
    yield '<section aria-labelledby="curves"><h2 id="curves">Accuracy by round</h2>'
    for kind, words in _CURVES.items():
        some = [series for series in shown if series.episodes == kind]
        if not some:
            continue
        floors = {r.label: r.accuracy for r in rows if r.floor} if kind == "test" else {}
        names = joined([printable(s.label) for s in some])
        name = f"Accuracy on {kind} episodes by round: {names}"
        wide = embed(accuracy_curve(some, floors), f"{kind}-wide", name)
        height = 2.6 + 0.17 * (len(some) + len(floors))
        thin = accuracy_curve(some, floors, size=(3.6, height))
        narrow = embed(thin, f"{kind}-narrow", name)
        band = " Shaded: the 95 % interval over episodes." if _has_band(some) else ""
        yield (
            f'<figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
            f"<figcaption>{_e(words)}{band}</figcaption></figure>"
        )
    yield "</section>"


def _partition(svg: str) -> Iterator[str]:
    picture = embed(svg, "partition", "How many images of each base class each client holds")
    yield '<section aria-labelledby="clients"><h2 id="clients">What the clients hold</h2>'
    yield (
        f'<figure><div class="middle">{picture}</div><figcaption>Training images of each base '
        "class at each client. The test uses other classes.</figcaption></figure></section>"
    )


def _faults(runs: Sequence[Run]) -> Iterator[str]:
    yield '<section aria-labelledby="faults"><h2 id="faults">Refused and lost replies</h2>'
    clean = [run for run in runs if not any(r["faults"] or r["skipped"] for r in run.records)]
    if clean:
        rounds = sum(run.rounds for run in clean)
        names = joined([printable(run.label) for run in clean])
        yield f"<p>Every reply counted in all {count(rounds, 'round')} of {_e(names)}.</p>"
    for run in runs:
        if run not in clean:
            yield from _faults_of(run)
    yield "</section>"


def _faults_of(run: Run) -> Iterator[str]:
    lines = [(r["round"], *_fault(f)) for r in run.records for f in r["faults"]]
    skipped = [(r["round"], "", "round skipped", r["skipped"]) for r in run.records if r["skipped"]]
    rounds = len({line[0] for line in lines})
    yield (
        f"<details><summary>{_e(run.label)} <span>{count(len(lines), 'reply', 'replies')} in "
        f"{count(rounds, 'round')} did not count; {count(len(skipped), 'round')} skipped</span>"
        '</summary><div class="inside"><div class="scroll" tabindex="0"><table class="words">'
        '<thead><tr><th scope="col">round</th><th scope="col">client</th><th scope="col">what</th>'
        '<th scope="col">reason</th></tr></thead><tbody>'
    )
    found = sorted([*lines, *skipped], key=lambda line: line[0])
    for line in found[:_FAULTS]:
        yield f"<tr>{''.join(f'<td>{_e(cell)}</td>' for cell in line)}</tr>"
    yield "</tbody></table></div>"
    if len(found) > _FAULTS:
        yield f'<p class="small">And {len(found) - _FAULTS:,} more, in metrics.jsonl.</p>'
    yield "</div></details>"


def _fault(fault: Mapping[str, Any]) -> tuple[Any, ...]:
    return fault.get("client", ""), fault.get("kind", ""), fault.get("reason", "")


def _episodes(rows: Sequence[Row]) -> Iterator[str]:
    by_tasks: dict[str, list[str]] = {}
    for row in rows:
        by_tasks.setdefault(row.tasks, []).append(printable(row.label))
    by_tasks.pop("", None)
    if not by_tasks:
        return
    yield '<section aria-labelledby="episodes"><h2 id="episodes">Test episodes</h2>'
    yield (
        "<p>Drawn once and named by a hash of the data and of the rows of every episode. The same "
        "hash means the same test.</p><dl>"
    )
    for tasks, labels in by_tasks.items():
        yield f"<dt>{_e(joined(labels))}</dt><dd><code>{_e(tasks)}</code></dd>"
    yield "</dl></section>"


def _settings(runs: Sequence[Run]) -> Iterator[str]:
    yield '<section aria-labelledby="settings"><h2 id="settings">Settings and machine</h2>'
    for run in runs:
        chosen = (run.result or {}).get("chosen_by")
        round = (run.result or {}).get("round")
        how = f", tested at round {round}, chosen by {chosen}" if chosen else ""
        yield (
            f"<details><summary>{_e(run.label)} <span>seed {run.seed}, "
            f"{count(run.rounds, 'round')}{_e(how)}</span></summary>"
            f'<div class="inside">{_pairs("Settings", run.settings)}'
            f"{_pairs('Machine and versions', run.environment)}</div></details>"
        )
    yield "</section>"


def _pairs(name: str, tree: Mapping[str, Any]) -> str:
    lines = (
        f"<dt>{_e(key)}</dt><dd><code>{_e(_plain(value))}</code></dd>" for key, value in _flat(tree)
    )
    return f"<h3>{_e(name)}</h3><dl>{''.join(lines)}</dl>" if tree else ""


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _has_band(series: Sequence[Series]) -> bool:
    return any(s.intervals is not None for s in series)


def _heading(column: str) -> str:
    return "accuracy, %" if column.startswith("accuracy") else column


def _class(column: str) -> str:
    return "note" if column == "note" else "number"


def _e(text: object) -> str:
    return html.escape(printable(text))


def _unbroken(text: str) -> str:
    """Keep figures and their interval and unit on one line."""
    for unit in (" %", " ± ", " points", " MB"):
        text = text.replace(unit, unit.replace(" ", "&nbsp;"))
    return text
