"""The content of the report's last sections: faults, bytes, test episodes, settings, machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedshot.config.settings import flat
from fedshot.core.text import count, joined, megabytes, named_client, printable
from fedshot.reports.markup import plain
from fedshot.reports.run_files import Groups, Run
from fedshot.reports.significance import ComparisonRow

_FAULTS = 100  # maximum number of faults listed per run; further faults are only counted
_CLIENTS = 5  # clients named in the summary of a run's faults, most faults first
_NAMED = 4  # maximum number of runs without faults listed by name
_UNSET = "\N{EN DASH}"


def faults(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the faults of each run that has any, and a sentence on the other runs.

    Faults are lost or rejected replies, skipped rounds, and what stopped training.
    """
    clean = [
        run
        for run in runs
        if run.stopped is None and not any(r["faults"] or r["skipped"] for r in run.records)
    ]
    names = joined([printable(run.label) for run in clean])
    if len(clean) > _NAMED:
        names = f"{'all' if len(clean) == len(runs) else 'the other'} {len(clean)} runs"
    rounds = count(sum(run.rounds for run in clean), "round")
    return {
        "clean": f"No reply was lost or rejected in the {rounds} of {names}." if clean else "",
        "runs": [_faults_of(run) for run in runs if run not in clean],
    }


def _faults_of(run: Run) -> dict[str, Any]:
    names = run.client_names

    def client(fault: Mapping[str, Any]) -> str:
        return named_client(fault["client"], names) if "client" in fault else ""

    replies = [
        (r["round"], client(f), f.get("kind", ""), f.get("reason", ""))
        for r in run.records
        for f in r["faults"]
    ]
    skipped = [(r["round"], "", "round skipped", r["skipped"]) for r in run.records if r["skipped"]]
    ends = [(s["round"], "", "training stopped", s["reason"]) for s in [run.stopped] if s]
    rows = sorted([*replies, *skipped, *ends], key=lambda row: row[0])
    by_client = Counter(client for _, client in sorted({row[:2] for row in replies}))
    named = [f"client {client} in {n:,}" for client, n in by_client.most_common(_CLIENTS)]
    if others := len(by_client) - len(named):
        named.append(count(others, "other client"))
    facts = [
        f"{count(len(replies), 'lost or rejected reply', 'lost or rejected replies')} in "
        f"{count(len({row[0] for row in replies}), 'round')}"
        f"{f': {joined(named)}' if named else ''}",
        f"{count(len(skipped), 'round')} skipped",
    ]
    facts = facts if replies or skipped else []
    facts += [f"training stopped in round {round:,}" for round, *_ in ends]
    return {
        "label": run.label,
        "summary": "; ".join(facts),
        "rows": rows[:_FAULTS],
        "more": f"{len(rows) - _FAULTS:,}" if len(rows) > _FAULTS else "",
    }


def ledgers(groups: Groups) -> list[dict[str, Any]]:
    """Return the bytes sent in the first run of each method, by part, phase and direction."""
    found = []
    for label, (run, *others) in groups.items():
        if not run.ledger and not run.records:
            continue
        total = megabytes(sum(int(line["bytes"]) for line in run.ledger))
        one = f" in one run, seed {run.seed}" if others else ""
        tested = any(line["phase"] == "test" for line in run.ledger)
        scope = "including validation and test" if tested else "including validation, not the test"
        rows = [
            (line["part"], line["direction"], megabytes(int(line["bytes"])),
             f"{int(line['messages']):,}", line["phase"], line["work"])
            for line in run.ledger
        ]  # fmt: skip
        found.append({"label": label, "summary": f"{total} MB{one}, {scope}", "rows": rows})
    return found


def episodes(rows: Sequence[ComparisonRow]) -> list[tuple[str, str]]:
    """Return (labels of the rows, hash of the test episodes) for each set of test episodes."""
    by_hash: dict[str, list[str]] = {}
    for row in rows:
        if row.tasks:
            by_hash.setdefault(row.tasks, []).append(printable(row.label))
    return [(joined(labels), tasks) for tasks, labels in by_hash.items()]


def settings(groups: Groups) -> dict[str, Any]:
    """Return every setting as (name, value per method, whether values differ), and a summary.

    "differ" holds only the settings that differ; "labels" names the methods.
    """
    every = {label: _settings(runs) for label, runs in groups.items()}
    keys = dict.fromkeys(key for tree in every.values() for key in tree)
    rows = []
    for key in keys:
        values = [tree.get(key, _UNSET) for tree in every.values()]
        rows.append((key, values, len(set(values)) > 1))
    differ = [(key, values, False) for key, values, marked in rows if marked]
    marks = f"; {len(differ)} differ and are marked" if differ else ""
    return {
        "labels": list(every),
        "all": rows,
        "differ": differ,
        "summary": f"{len(rows)} settings, including defaults{marks}",
    }


def machines(runs: Sequence[Run]) -> dict[str, Any]:
    """Return each run's progress, its software and machine, and their changes when it resumed."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(plain(run.begun_with), []).append(run)
    changes = [
        (run.label, run.folder.name, f"{round:,}", change)
        for run in runs
        for round, change in run.changes_on_resume()
    ]
    summary = f"{count(len(runs), 'run')}, {count(len(alike), 'machine')}"
    return {
        "summary": summary + (f"; {count(len(changes), 'change')} on resume" if changes else ""),
        "runs": [
            (run.label, run.folder.name, run.seed, f"{run.rounds:,} of {run.planned:,}",
             *((run.result or {}).get(key, _UNSET) for key in ("round", "chosen_by")))
            for run in runs
        ],
        "changes": changes,
        "environments": [
            ("All runs" if len(alike) == 1 else joined([printable(run.label) for run in same]),
             [(name, plain(value)) for name, value in flat(same[0].begun_with)])
            for same in alike.values()
        ],
    }  # fmt: skip


def _settings(runs: Sequence[Run]) -> Mapping[str, str]:
    """Return the settings that a method's runs share, and the runs' seeds."""
    shared = {key: value for key, value in runs[0].settings.items() if key not in ("name", "seed")}
    seeds = ", ".join(str(run.seed) for run in runs)
    return {"seed": seeds, **{key: plain(value) for key, value in flat(shared)}}
