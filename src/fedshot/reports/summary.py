"""A summary of a comparison in a few sentences, derived from its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from fedshot.core.text import count, joined, megabytes, percent, printable
from fedshot.reports.run_files import Run
from fedshot.reports.significance import (
    ComparisonRow,
    against_baseline,
    compare,
    incomparable,
    seed_caveat,
)
from fedshot.runs.test_protocol import TestProtocol, alike


def summary(rows: Sequence[ComparisonRow], runs: Sequence[Run] = ()) -> str:
    """Return sentences on the best method: its lead over baseline and runner-up, and its bytes."""
    methods = sorted((r for r in rows if not r.baseline), key=lambda r: -r.accuracy)
    baselines = sorted((r for r in rows if r.baseline), key=lambda r: -r.accuracy)
    found = [_best(methods, runs)] if methods else ["No method has a result yet."]
    for one, other in combinations(methods, 2):
        if apart := incomparable(one, other):
            found = [
                f"The {len(methods)} results are not ranked. {one.name} and {other.name}: {apart}."
            ]
            baselines = methods = []  # no other sentence compares them
            break
    if baselines:
        best = "The baseline" if len(baselines) == 1 else "The best baseline"
        first = baselines[0]
        found.append(f"{best}, {first.name}, reaches {percent(first.accuracy, first.interval)} %.")
        found += _against(first.name, methods, rows)
    if len(methods) > 1:
        found.append(_lead(methods[0], methods[1]))
    if methods and (methods[0].bytes_down or methods[0].bytes_up):
        found.append(
            f"Training {printable(methods[0].label)} sent {megabytes(methods[0].bytes_down)} MB to "
            f"the clients and {megabytes(methods[0].bytes_up)} MB back, all clients together."
        )
    for run in runs:
        if spent := (run.result or {}).get("privacy"):
            found.append(
                f"{printable(run.label)} hides single {spent['level']}s: epsilon is "
                f"{spent['epsilon']:.3g} at delta {spent['delta']:g}."
            )
    if len({row.tasks for row in rows if row.tasks}) > 1:
        found.append(
            "Not all rows were evaluated on the same test episodes; differences between rows with "
            "different episodes are less reliable."
        )
    if methods:
        found.append(_intervals(methods))
    return " ".join(found)


def _intervals(methods: Sequence[ComparisonRow]) -> str:
    """Return a sentence on what the intervals cover and what they do not."""
    units = " and ".join(sorted({f"{row.tested.unit}s" for row in methods}))
    if all(row.seeds == 1 for row in methods):
        return (
            f"Intervals are over {units}; a single seed does not show how much another training "
            "run would differ."
        )
    return (
        f"Intervals are over {units}; those of differences between methods with several seeds also "
        "cover the variance between seeds, which the notes of the table state."
    )


def _best(methods: Sequence[ComparisonRow], runs: Sequence[Run]) -> str:
    best = methods[0]
    # Rows created by a program may have no test protocol, but their runs may.
    tested = best.tested if best.tested != TestProtocol() else alike([run.tested for run in runs])
    start = best.name
    if len(methods) > 1 and best.accuracy > methods[1].accuracy:
        start = f"Of {len(methods)} results, {best.name} has the highest accuracy; it"
    return (
        f"{start} reaches {percent(best.accuracy, best.interval)} % on {tested.on(best.episodes)}, "
        f"with {count(best.seeds, 'seed')}."
    )


def _lead(best: ComparisonRow, second: ComparisonRow) -> str:
    if best.accuracy == second.accuracy:
        return f"{best.name} and {second.name} have the same accuracy."
    found = compare(best, second)
    if found.outcome == "above":
        size = str(found).removeprefix("+")
        return f"{best.name} leads {second.name} by {size}{seed_caveat(found)}."
    return f"The lead of {best.name} over {second.name}, {found}, is not statistically significant."


def _against(
    baseline: str, methods: Sequence[ComparisonRow], rows: Sequence[ComparisonRow]
) -> list[str]:
    """Return sentences on which methods beat the best baseline and which do not."""
    compared = [(row, v) for row in methods if (v := against_baseline(row, rows))]
    beats = [(row, v) for row, v in compared if v.outcome == "above"]
    fails = [(row, v) for row, v in compared if v.outcome != "above"]
    found = []
    if beats:
        who = joined([f"{row.name} ({v})" for row, v in beats])
        caveat = next((seed_caveat(v) for _, v in beats if not v.seeds), "")
        found.append(f"{who} {'beats' if len(beats) == 1 else 'beat'} {baseline}{caveat}.")
    if fails:
        who = joined([f"{row.name} ({v})" for row, v in fails])
        found.append(f"{who} {'does' if len(fails) == 1 else 'do'} not beat {baseline} here.")
    return found
