"""What a comparison shows, in a few sentences that follow from the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from fedshot.reports.runs import Run
from fedshot.reports.verdict import Row, Verdict, against_floor, compare
from fedshot.reports.words import count, joined, megabytes, percent, printable


def summary(rows: Sequence[Row], runs: Sequence[Run] = ()) -> str:
    """Return one paragraph: who is ahead, whether the floor was beaten, and what it cost."""
    methods = sorted((r for r in rows if not r.floor), key=lambda r: -r.accuracy)
    floors = sorted((r for r in rows if r.floor), key=lambda r: -r.accuracy)
    said = [_best(methods, runs)] if methods else ["No method has a result yet."]
    if floors:
        floor = floors[0]
        least = "The floor" if len(floors) == 1 else "The highest floor"
        said.append(
            f"{least}, {printable(floor.label)}, stands at "
            f"{percent(floor.accuracy, floor.interval)} %."
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


def _seeds(methods: Sequence[Row]) -> str:
    """Say what the intervals do not cover."""
    if all(row.seeds == 1 for row in methods):
        return (
            "Intervals are over episodes; one seed does not tell how much another training run "
            "would differ."
        )
    return "Intervals are over episodes; how much seeds differ stands in the notes of the table."


def _best(methods: Sequence[Row], runs: Sequence[Run]) -> str:
    best = methods[0]
    shapes = {_shape(run) for run in runs} - {""}
    shape = f" {shapes.pop()}" if len(shapes) == 1 else ""
    name = printable(best.label)
    start = name if len(methods) == 1 else f"Of {len(methods)} methods, {name} is ahead; it"
    return (
        f"{start} reaches {percent(best.accuracy, best.interval)} % on {best.episodes:,}{shape} "
        f"test episodes of classes that no client trained on, with {count(best.seeds, 'seed')}."
    )


def _shape(run: Run) -> str:
    test = run.settings.get("test", {})
    return f"{test['way']}-way {test['shot']}-shot" if {"way", "shot"} <= test.keys() else ""


def _lead(best: Row, second: Row) -> str:
    verdict = compare(best, second)
    first, name = printable(best.label), printable(second.label)
    if verdict.outcome == "above":
        return f"{first} leads {name} by {_size(verdict)}."
    return f"The lead of {first} over {name}, {verdict}, is too small to tell from chance."


def _against(floor: Row, verdicts: Sequence[tuple[Row, Verdict]]) -> list[str]:
    """Say who beats the floor and who does not, the difference where it is one method's."""
    name, said = printable(floor.label), []
    beats = [(row, v) for row, v in verdicts if v.outcome == "above"]
    fails = [(row, v) for row, v in verdicts if v.outcome != "above"]
    if beats:
        who = joined([f"{printable(row.label)} ({v})" for row, v in beats])
        said.append(f"{who} {'beats' if len(beats) == 1 else 'beat'} {name}.")
    if fails:
        who = joined([f"{printable(row.label)} ({v})" for row, v in fails])
        said.append(f"{who} {'does' if len(fails) == 1 else 'do'} not beat {name} here.")
    return said


def _size(verdict: Verdict) -> str:
    return str(verdict).removeprefix("+")
