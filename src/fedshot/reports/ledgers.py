"""What a comparison rests on, as HTML: refusals, bytes, episodes, settings, machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedshot.config.settings import flat
from fedshot.core.text import count, joined, megabytes, printable
from fedshot.reports.markup import e, folded, pairs, plain, table
from fedshot.reports.run_files import Groups, Run
from fedshot.reports.significance import ComparisonRow

_FAULTS = 100  # lines of faults shown of one run; the others are counted
_CLIENTS = 5  # named of those whose replies did not count, the most frequent first
_NAMED = 4  # runs without a fault up to which they are named
_UNSET = "\N{EN DASH}"


def faults(runs: Sequence[Run]) -> Iterator[str]:
    """Yield what the guard refused and what was lost."""
    clean = [run for run in runs if not any(r["faults"] or r["skipped"] for r in run.records)]
    if clean:
        rounds = sum(run.rounds for run in clean)
        names = joined([printable(run.label) for run in clean])
        if len(clean) > _NAMED:
            names = f"{'all' if len(clean) == len(runs) else 'the other'} {len(clean)} runs"
        yield f"<p>Every reply counted in all {count(rounds, 'round')} of {e(names)}.</p>"
    yield from (_faults_of(run) for run in runs if run not in clean)


def _faults_of(run: Run) -> str:
    lines = [(r["round"], *_fault(f)) for r in run.records for f in r["faults"]]
    skipped = [(r["round"], "", "round skipped", r["skipped"]) for r in run.records if r["skipped"]]
    rounds = len({line[0] for line in lines})
    found = sorted([*lines, *skipped], key=lambda line: line[0])
    inside = table(
        ("round", "client", "what", "reason"),
        ([e(cell) for cell in line] for line in found[:_FAULTS]),
        kind="words",
        name=f"Replies of {run.label} that did not count",
    )
    if len(found) > _FAULTS:
        inside += f'<p class="small">And {len(found) - _FAULTS:,} more, in metrics.jsonl.</p>'
    told = (
        f"{count(len(lines), 'reply', 'replies')} in {count(rounds, 'round')} did not count"
        f"{_of_whom(lines)}; {count(len(skipped), 'round')} skipped"
    )
    return folded(run.label, told, inside)


def _of_whom(lines: Sequence[tuple[Any, ...]]) -> str:
    """Return in how many rounds which clients are on lines that begin with (round, client)."""
    rounds = Counter(client for _, client in sorted({(r, str(client)) for r, client, *_ in lines}))
    named = [f"client {client} in {n:,}" for client, n in rounds.most_common(_CLIENTS)]
    if rest := len(rounds) - len(named):
        named.append(count(rest, "other client"))
    return f": {joined(named)}" if named else ""


def _fault(fault: Mapping[str, Any]) -> tuple[Any, ...]:
    return fault.get("client", ""), fault.get("kind", ""), fault.get("reason", "")


def ledger(groups: Groups) -> Iterator[str]:
    """Yield the bytes of every part, by phase and direction, of one run of each method."""
    for label, (run, *others) in groups.items():
        if not run.ledger:
            yield f"<p>{e(label)} sent nothing.</p>" if run.records else ""
            continue
        total = sum(int(line["bytes"]) for line in run.ledger)
        rows = (
            [e(line["part"]), e(line["direction"]), megabytes(int(line["bytes"])),
             f"{int(line['messages']):,}", e(line["phase"]), e(line["work"])]
            for line in run.ledger
        )  # fmt: skip
        inside = table(
            ("part", "direction", "MB", "messages", "phase", "work"),
            rows,
            kind="ledger",
            name=f"Ledger of {label}",
        )
        one = f" in one run, seed {run.seed}" if others else ""
        asked = any(line["phase"] == "test" for line in run.ledger)
        looks = "looks and the test included" if asked else "looks included, the test not"
        yield folded(label, f"{megabytes(total)} MB{one}, {looks}", inside)


def episodes(rows: Sequence[ComparisonRow]) -> Iterator[str]:
    """Yield the hashes of the test episodes."""
    by_tasks: dict[str, list[str]] = {}
    for row in rows:
        by_tasks.setdefault(row.tasks, []).append(printable(row.label))
    by_tasks.pop("", None)
    if not by_tasks:
        return
    lines = (
        f"<dt>{e(joined(labels))}</dt><dd><code>{e(tasks)}</code></dd>"
        for tasks, labels in by_tasks.items()
    )
    yield (
        "<p>Drawn once and named by a hash of the data and of the rows of every episode. The same "
        f"hash means the same test.</p><dl>{''.join(lines)}</dl>"
    )


def settings(groups: Groups) -> Iterator[str]:
    """Yield where the methods' settings differ, then all settings, then the machines."""
    every = {label: _settings(runs) for label, runs in groups.items()}
    keys = list(dict.fromkeys(key for tree in every.values() for key in tree))
    differ = [key for key in keys if len({tree.get(key, _UNSET) for tree in every.values()}) > 1]
    head = ["setting", *(e(label) for label in every)]
    if differ:
        rows = (_line(key, every, marked=False) for key in differ)
        yield "<h3>Where they differ</h3>"
        yield table(head, rows, kind="settings", name="Settings that differ")
    elif len(every) > 1:
        yield "<p>All have the same settings, names and seeds aside.</p>"
    rows = (_line(key, every, marked=key in differ) for key in keys)
    told = f"{len(keys)} settings, defaults included" + (
        f"; {len(differ)} differ and are marked" if differ else ""
    )
    yield folded("All settings", told, table(head, rows, kind="settings", name="All settings"))
    yield _stories([run for runs in groups.values() for run in runs])


def _stories(runs: Sequence[Run]) -> str:
    """Return what became of each run, and the machines; those alike are told once."""
    head = ("run", "folder", "seed", "rounds", "tested at round", "chosen by")
    lines = (
        [e(run.label), e(run.folder.name), str(run.seed), f"{run.rounds:,} of {run.planned:,}",
         *(e((run.result or {}).get(key, _UNSET)) for key in ("round", "chosen_by"))]
        for run in runs
    )  # fmt: skip
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(plain(run.begun_with), []).append(run)
    machines = [
        pairs(
            "All runs" if len(alike) == 1 else joined([printable(run.label) for run in same]),
            dict(flat(same[0].begun_with)),
        )
        for same in alike.values()
    ]
    turns = [
        [e(run.label), e(run.folder.name), f"{round:,}", e(told)]
        for run in runs
        for round, told in run.turns()
    ]
    told = f"{count(len(runs), 'run')}, {count(len(alike), 'machine')}"
    inside = table(head, lines, kind="settings", name="Runs")
    if turns:
        told += f"; {count(len(turns), 'change')} on the way"
        names = ("run", "folder", "after round", "what changed")
        inside += table(names, turns, kind="settings", name="Changes on the way")
    inside += "".join(machines)
    return folded("Runs and machines", told, inside)


def _settings(runs: Sequence[Run]) -> dict[str, str]:
    """Return what seeds of one thing were asked for, seeds gathered; names are told elsewhere."""
    shared = {key: value for key, value in runs[0].settings.items() if key not in ("name", "seed")}
    return {
        "seed": ", ".join(str(run.seed) for run in runs),
        **{key: plain(value) for key, value in flat(shared)},
    }


def _line(key: str, every: Mapping[str, Mapping[str, str]], *, marked: bool) -> list[str]:
    values = [f"<code>{e(tree.get(key, _UNSET))}</code>" for tree in every.values()]
    return [e(key), *(f"<mark>{value}</mark>" if marked else value for value in values)]
