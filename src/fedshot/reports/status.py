"""The progress of runs, as `fedshot status` prints it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedshot.core.errors import CheckpointError
from fedshot.core.text import duration, printable
from fedshot.reports.run_files import Run
from fedshot.runs.run_folder import begun, in_training
from fedshot.runs.test_protocol import chose_by_test

_DEEP = 6  # levels of folders searched for runs
_RECENT = 20  # rounds over which the pace is measured
_COLUMNS = ("state", "round", "ago", "a round", "left", "validation", "faults", "run")


@dataclass(frozen=True)
class Status:
    """The progress of one run.

    Args:
        run: folder of the run.
        state: "training": a process trains. "stopped": training stopped before the last round.
            "untested": trained to the last round, but not tested. "ended": tested. "unreadable":
            the folder cannot be read. "not ended": one of the first three, on a file system
            without the locks that show which.
        round: last complete round; -1 if none.
        rounds: number of rounds in the configuration.
        ago: seconds since the last complete round; 0 if the clock was set back.
        pace: median seconds per round over the last rounds; None if unknown.
        left: seconds that the remaining rounds take at `pace`; None if unknown.
        validation: accuracy on the validation classes at the chosen round, if known.
        chosen: the chosen round.
        faults: number of clients' replies that were rejected or lost.
        skipped: number of rounds that were skipped.
        why: why the run is unreadable, or why its training stopped; "" if unknown.
    """

    run: str
    state: str
    round: int = -1
    rounds: int = 0
    ago: float | None = None
    pace: float | None = None
    left: float | None = None
    validation: float | None = None
    chosen: int | None = None
    faults: int = 0
    skipped: int = 0
    why: str = ""

    @classmethod
    def of(cls, folder: Path, now: float | None = None) -> Status:
        """Return the status of a run, which may be training; `now` is in seconds since 1970.

        Never raises: a damaged folder, or a folder of another program, is "unreadable".
        """
        try:
            held = in_training(folder)  # first, since the run may end while its files are read
            run = Run.read(folder)
            if "rounds" not in run.settings.get("run", {}):
                raise ValueError("run.rounds is not set")
            return cls._of(run, held, time.time() if now is None else now)
        except CheckpointError as error:
            return cls(str(folder), "unreadable", why=printable(error))
        except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
            why = printable(f"{folder} is not a readable fedshot run: {error}")
            return cls(str(folder), "unreadable", why=why)

    @classmethod
    def _of(cls, run: Run, held: bool | None, now: float) -> Status:
        records, left = run.records, max(0, run.planned - run.rounds)
        last: Mapping[str, Any] = records[-1] if records else {}
        pace = _pace(records)
        return cls(
            str(run.folder),
            _state(run, held),
            last.get("round", -1),
            run.planned,
            None if not records else max(0.0, now - _ended(last)),
            pace,
            None if pace is None else left * pace,
            *_validated(run),
            why=_why(run),
            faults=sum(len(record["faults"]) for record in records),
            skipped=sum(record["skipped"] is not None for record in records),
        )


def runs_below(folder: Path) -> Iterator[Path]:
    """Yield the folder itself if it is a run, or else the folders of all runs below it, sorted."""
    top = len(folder.parts)
    for place, names, _ in os.walk(folder):
        here = Path(place)
        if _is_run(here):
            names.clear()
            yield here
        elif len(here.parts) - top >= _DEEP:
            names.clear()
        names.sort()


def _is_run(folder: Path) -> bool:
    try:
        return begun(folder)
    except OSError:  # permission denied
        return False


def _why(run: Run) -> str:
    if run.stopped is None:
        return ""
    stopped = f"stopped in round {run.stopped['round']:,}"
    return printable(f"{run.folder} {stopped}: {run.stopped['reason']}")


def _state(run: Run, held: bool | None) -> str:
    if run.result is not None:
        return "ended"
    if held is None:
        return "not ended"
    if held:
        return "training"
    return "stopped" if run.rounds < run.planned or not run.records else "untested"


def _ended(record: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(record["ended"]).timestamp()


def _pace(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the median seconds per round over the last rounds.

    The first round of a process has no elapsed time; if no other round is left, it is the median of
    the training time.
    """
    recent = records[-_RECENT - 1 :]
    spent = [float(r["elapsed"]) for r in recent if r["elapsed"] is not None] or [
        float(r["seconds"]) for r in recent if r["round"] > 0
    ]
    return statistics.median(spent) if spent else None


def _validated(run: Run) -> tuple[float | None, int | None]:
    """Return (accuracy on validation classes at the chosen round, chosen round)."""
    if not run.records:
        return None, None
    chosen = int(run.records[-1]["best_round"])
    scores = {r["round"]: r["validation"]["accuracy"] for r in run.records if r["validation"]}
    return (None if chose_by_test(run.settings) else scores.get(chosen)), chosen


def as_table(all_of: Sequence[Status]) -> str:
    """Return a plain-text table with a line per run, and why any are unreadable or stopped."""
    rows = [_COLUMNS, *(_cells(one) for one in all_of)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(
        f"{{:{'<' if name in ('state', 'run') else '>'}{width}}}"
        for name, width in zip(_COLUMNS, widths, strict=True)
    )
    lines = [form.format(*row).rstrip() for row in rows]
    return "\n".join([*lines, *(one.why for one in all_of if one.why)])


def _cells(one: Status) -> Sequence[str]:
    left = None if one.round >= one.rounds else one.left
    ago, pace, left_text = ("-" if s is None else duration(s) for s in (one.ago, one.pace, left))
    return (
        one.state,
        "-" if one.round < 0 else f"{one.round}/{one.rounds}",
        ago,
        pace,
        left_text,
        "-" if one.validation is None else f"{100 * one.validation:.1f} at {one.chosen}",
        f"{one.faults}" + (f", {one.skipped} skipped" if one.skipped else ""),
        printable(one.run),
    )
