"""What a comparison shows, in a few sentences that follow from the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from fedshot.core.text import count, joined, megabytes, percent, printable
from fedshot.reports.run_files import Run
from fedshot.reports.significance import ComparisonRow, Difference, against_floor, compare, reach
from fedshot.runs.test_protocol import TestProtocol, alike


def summary(rows: Sequence[ComparisonRow], runs: Sequence[Run] = ()) -> str:
    """Return one paragraph: who is ahead, whether the floor was beaten, and what it cost."""
    methods = sorted((r for r in rows if not r.floor), key=lambda r: -r.accuracy)
    floors = sorted((r for r in rows if r.floor), key=lambda r: -r.accuracy)
    said = [_best(methods, runs)] if methods else ["No method has a result yet."]
    if floors:
        floor = floors[0]
        least = "The floor" if len(floors) == 1 else "The highest floor"
        said.append(
            f"{least}, {floor.name}, stands at {percent(floor.accuracy, floor.interval)} %."
        )
        verdicts = [(row, verdict) for row in methods if (verdict := against_floor(row, rows))]
        said += _against(floor, verdicts)
    if len(methods) > 1:
        said.append(_lead(methods[0], methods[1]))
    if methods and (methods[0].bytes_down or methods[0].bytes_up):
        best = methods[0]
        said.append(
            f"Training {printable(best.label)} sent {megabytes(best.bytes_down)} MB to the clients "
            f"and {megabytes(best.bytes_up)} MB back, all clients together."
        )
    if len({row.tasks for row in rows if row.tasks}) > 1:
        said.append(
            "Not all rows sat the same test episodes, so differences between those that did not "
            "say less."
        )
    if methods:
        said.append(_seeds(methods))
    return " ".join(said)


def _seeds(methods: Sequence[ComparisonRow]) -> str:
    """Say what the intervals do not cover."""
    units = " and ".join(sorted({f"{row.tested.unit}s" for row in methods}))
    if all(row.seeds == 1 for row in methods):
        return (
            f"Intervals are over {units}; one seed does not tell how much another training run "
            "would differ."
        )
    return (
        f"Intervals are over {units}, those of differences between methods of several seeds also "
        "over seeds; how much seeds differ stands in the notes of the table."
    )


def _best(methods: Sequence[ComparisonRow], runs: Sequence[Run]) -> str:
    best = methods[0]
    # Rows made by hand know nothing of their tests; the runs beside them do.
    tested = best.tested if best.tested != TestProtocol() else alike([run.tested for run in runs])
    start = best.name
    if len(methods) > 1:
        start = f"Of {len(methods)} compared, {best.name} has the highest accuracy; it"
    return (
        f"{start} reaches {percent(best.accuracy, best.interval)} % on {tested.on(best.episodes)}, "
        f"with {count(best.seeds, 'seed')}."
    )


def _lead(best: ComparisonRow, second: ComparisonRow) -> str:
    verdict = compare(best, second)
    if verdict.outcome == "above":
        return f"{best.name} leads {second.name} by {_size(verdict)}{reach(verdict)}."
    return (
        f"The lead of {best.name} over {second.name}, {verdict}, is too small to tell from chance."
    )


def _against(
    floor: ComparisonRow, verdicts: Sequence[tuple[ComparisonRow, Difference]]
) -> list[str]:
    """Say who beats the floor and who does not, the difference where it is one method's."""
    name, said = floor.name, []
    beats = [(row, v) for row, v in verdicts if v.outcome == "above"]
    fails = [(row, v) for row, v in verdicts if v.outcome != "above"]
    if beats:
        who = joined([f"{row.name} ({v})" for row, v in beats])
        some = next((reach(v) for _, v in beats if not v.seeds), "")
        said.append(f"{who} {'beats' if len(beats) == 1 else 'beat'} {name}{some}.")
    if fails:
        who = joined([f"{row.name} ({v})" for row, v in fails])
        said.append(f"{who} {'does' if len(fails) == 1 else 'do'} not beat {name} here.")
    return said


def _size(verdict: Difference) -> str:
    return str(verdict).removeprefix("+")
