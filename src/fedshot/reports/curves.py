"""Accuracy measured on the way, and what it had cost by then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any, TypeAlias

from fedshot.reports.run_files import Groups, Run
from fedshot.runs.test_protocol import chose_by_test

_POINTS = 400  # of a line


@dataclass(frozen=True)
class Series:
    """One curve.

    Args:
        label: the method's name for people.
        rounds: where accuracy was measured.
        accuracies: in [0, 1], one for each round.
        intervals: half-widths of 95 % intervals, or None when they are not known.
        episodes: which episodes were answered: "test", "validation" or "training"; "peeked" for
            looks at the test that chose the round.
        megabytes: sent and received by then, all clients together; None when unknown.
        seconds: of training by then; None when unknown.
    """

    label: str
    rounds: Sequence[int]
    accuracies: Sequence[float]
    intervals: Sequence[float] | None = None
    episodes: str = "test"
    megabytes: Sequence[float] | None = None
    seconds: Sequence[float] | None = None

    def __post_init__(self) -> None:
        n = len(self.rounds)
        others = (self.accuracies, self.intervals, self.megabytes, self.seconds)
        if any(other is not None and len(other) != n for other in others):
            raise ValueError(
                f"{self.label!r}: one accuracy (interval, cost) for each of {n} rounds"
            )

    @classmethod
    def measured(
        cls,
        label: str,
        points: Sequence[tuple[int, float, float | None]],
        runs: Sequence[Run],
        episodes: str = "test",
    ) -> Series:
        """Return the curve of (round, accuracy, interval), with the mean cost of the runs."""
        rounds = [round for round, _, _ in points]
        halves = [half for _, _, half in points if half is not None]
        costs = [_costs(run) for run in runs]
        return cls(
            label,
            rounds,
            [accuracy for _, accuracy, _ in points],
            halves if halves and len(halves) == len(points) else None,
            episodes,
            [fmean(cost[r][0] for cost in costs) for r in rounds],
            [fmean(cost[r][1] for cost in costs) for r in rounds],
        )

    @classmethod
    def of_runs(cls, label: str, runs: Sequence[Run]) -> Series | None:
        """Return the accuracy on validation episodes, else on the clients' training episodes.

        A run whose round was chosen by the test has looks at the test in the place of validation.

        Several seeds are averaged over the rounds that all of them have; the interval is then the
        mean of theirs, which no mean of correlated values exceeds. None when nothing was recorded.
        """
        seen = [
            {r["round"]: (r["validation"]["accuracy"], r["validation"]["interval"])
             for r in run.records if r["validation"]} for run in runs
        ]  # fmt: skip
        rounds = _common(seen)
        if len(rounds) > 1:
            points = [(r, *(fmean(one[r][i] for one in seen) for i in (0, 1))) for r in rounds]
            peeked = any(chose_by_test(run.settings) for run in runs)
            kind = "peeked" if peeked else "validation"
            return cls.measured(label, points, runs, kind)  # type: ignore[arg-type]
        told = [
            {
                r["round"]: r["metrics"]["accuracy"]
                for r in run.records
                if "accuracy" in r["metrics"]
            }
            for run in runs
        ]
        rounds = _common(told)
        if not rounds:
            return None
        means = [(r, fmean(one[r] for one in told), None) for r in rounds]
        return cls.measured(label, means, runs, "training")


Line: TypeAlias = tuple[list[float], list[float]]
"""Rounds and values."""


def reported(groups: Groups) -> dict[str, dict[str, Line]]:
    """Return what the methods report of their training: by metric, by label, a line.

    Seeds that report a metric are averaged over the rounds that all of them have; of many rounds
    each point is the mean of some neighbours, at their mean round.
    """
    found: dict[str, dict[str, Line]] = {}
    for label, runs in groups.items():
        names = dict.fromkeys(name for run in runs for r in run.records for name in r["metrics"])
        for name in names:
            told = [{r["round"]: r["metrics"][name] for r in run.records if name in r["metrics"]}
                    for run in runs]  # fmt: skip
            told = [one for one in told if one]
            points = [(r, fmean(one[r] for one in told)) for r in _common(told)]
            some = -(-len(points) // _POINTS) or 1
            blocks = [points[i : i + some] for i in range(0, len(points), some)]
            if len(blocks) > 1:
                rounds, values = ([fmean(p[i] for p in block) for block in blocks] for i in (0, 1))
                found.setdefault(name, {})[label] = rounds, values
    return found


def _common(seen: Sequence[Mapping[int, Any]]) -> list[int]:
    """Return the rounds that are in all of them, in order."""
    return sorted(set(seen[0]).intersection(*seen[1:])) if seen else []


def _costs(run: Run) -> dict[int, tuple[float, float]]:
    """Return, by round, the megabytes both ways and the seconds since the start."""
    spent = accumulate(float(r.get("seconds", 0)) for r in run.records)
    return {
        r["round"]: ((r.get("bytes_down", 0) + r.get("bytes_up", 0)) / 1e6, seconds)
        for r, seconds in zip(run.records, spent, strict=True)
    }
