"""Accuracy and metrics during training, with the bytes and the time spent so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any, TypeAlias

from fedshot.reports.run_files import Groups, Run
from fedshot.runs.test_protocol import chose_by_test

_POINTS = 400  # maximum number of points of a line


@dataclass(frozen=True)
class Series:
    """One curve of accuracy during training.

    Args:
        label: display name of the method.
        rounds: rounds in which accuracy was measured.
        accuracies: accuracy in [0, 1] for each round.
        intervals: half-widths of 95 % intervals; None if unknown.
        episodes: kind of the episodes on which accuracy was measured: "test", "validation",
            "training", or "peeked" for test episodes on which the round was chosen, too.
        megabytes: MB sent and received so far, all clients together; None if unknown.
        seconds: seconds of training so far; None if unknown.
        hours: simulated hours so far; None for runs without simulated time.
    """

    label: str
    rounds: Sequence[int]
    accuracies: Sequence[float]
    intervals: Sequence[float] | None = None
    episodes: str = "test"
    megabytes: Sequence[float] | None = None
    seconds: Sequence[float] | None = None
    hours: Sequence[float] | None = None

    def __post_init__(self) -> None:
        n = len(self.rounds)
        others = (self.accuracies, self.intervals, self.megabytes, self.seconds, self.hours)
        if any(other is not None and len(other) != n for other in others):
            raise ValueError(
                f"{self.label!r}: expected one accuracy (interval, cost) for each of {n} rounds"
            )

    @classmethod
    def measured(
        cls,
        label: str,
        points: Sequence[tuple[int, float, float | None]],
        runs: Sequence[Run],
        episodes: str = "test",
    ) -> Series:
        """Return the curve through points (round, accuracy, interval), with the runs' mean cost.

        The cost is the megabytes, seconds and simulated hours spent so far; all are None without
        `runs`.
        """
        rounds = [round for round, _, _ in points]
        halves = [half for _, _, half in points if half is not None]
        costs = [_costs(run) for run in runs]
        return cls(
            label,
            rounds,
            [accuracy for _, accuracy, _ in points],
            halves if halves and len(halves) == len(points) else None,
            episodes,
            [fmean(cost[r][0] for cost in costs) for r in rounds] if costs else None,
            [fmean(cost[r][1] for cost in costs) for r in rounds] if costs else None,
            _hours(runs, rounds),
        )

    @classmethod
    def of_runs(cls, label: str, runs: Sequence[Run]) -> Series | None:
        """Return the accuracy on validation episodes, or else on the clients' training episodes.

        For runs whose round was chosen on the test, it is the accuracy on the test. Seeds are
        averaged, in the rounds that all seeds have; the interval is the mean of the seeds'
        intervals, an upper bound for the interval of the mean. None if nothing was recorded.
        """
        seen = [
            {r["round"]: (r["validation"]["accuracy"], r["validation"]["interval"])
             for r in run.records if r["validation"]} for run in runs
        ]  # fmt: skip
        points = mean_over_seeds(seen)
        if len(points) > 1:
            peeked = any(chose_by_test(run.settings) for run in runs)
            kind = "peeked" if peeked else "validation"
            return cls.measured(label, points, runs, kind)
        means = _means("accuracy", runs)
        if not means:
            return None
        return cls.measured(label, [(*point, None) for point in means], runs, "training")


def mean_over_seeds(
    seen: Sequence[Mapping[int, tuple[float, float]]],
) -> list[tuple[int, float, float]]:
    """Return (round, accuracy, interval), averaged over seeds, of the rounds that all seeds have.

    `seen` maps the validated rounds of each seed to (accuracy, interval).
    """
    return [
        (r, fmean(one[r][0] for one in seen), fmean(one[r][1] for one in seen))
        for r in _common(seen)
    ]


Line: TypeAlias = tuple[list[float], list[float]]
"""A line as (rounds, values)."""


def metric_lines(groups: Groups) -> dict[str, dict[str, Line]]:
    """Return metric -> label -> line, averaged over the seeds that report the metric.

    In long runs each point is the mean of several neighbouring rounds.
    """
    found: dict[str, dict[str, Line]] = {}
    for label, runs in groups.items():
        names = dict.fromkeys(name for run in runs for r in run.records for name in r["metrics"])
        for name in names:
            reporting = [run for run in runs if any(name in r["metrics"] for r in run.records)]
            points = _means(name, reporting)
            some = -(-len(points) // _POINTS) or 1
            blocks = [points[i : i + some] for i in range(0, len(points), some)]
            if len(blocks) > 1:
                rounds, values = ([fmean(p[i] for p in block) for block in blocks] for i in (0, 1))
                found.setdefault(name, {})[label] = rounds, values
    return found


def _means(metric: str, runs: Sequence[Run]) -> list[tuple[int, float]]:
    """Return (round, mean of the metric over the runs) for the rounds that all runs have."""
    every = [
        {r["round"]: r["metrics"][metric] for r in run.records if metric in r["metrics"]}
        for run in runs
    ]
    return [(r, fmean(one[r] for one in every)) for r in _common(every)]


def _common(seen: Sequence[Mapping[int, Any]]) -> list[int]:
    """Return the rounds that all runs have, in order."""
    return sorted(set(seen[0]).intersection(*seen[1:])) if seen else []


def _hours(runs: Sequence[Run], rounds: Sequence[int]) -> list[float] | None:
    """Return the runs' mean simulated hours up to each round; None if a run has none."""
    every = [{r["round"]: r["simulated"] for r in run.records if "simulated" in r} for run in runs]
    if not every or any(r not in one for one in every for r in rounds):
        return None
    return [fmean(one[r] / 3600 for one in every) for r in rounds]


def _costs(run: Run) -> dict[int, tuple[float, float]]:
    """Return round -> (megabytes sent and received, seconds of training) so far."""
    spent = accumulate(float(r.get("seconds", 0)) for r in run.records)
    return {
        r["round"]: ((r.get("bytes_down", 0) + r.get("bytes_up", 0)) / 1e6, seconds)
        for r, seconds in zip(run.records, spent, strict=True)
    }
