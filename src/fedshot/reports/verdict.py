"""Rows of a comparison, and whether one of them is really above another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedshot.errors import ConfigError
from fedshot.evaluation import Score
from fedshot.reports.runs import Run
from fedshot.reports.words import points, printable
from fedshot.sections import not_honest


@dataclass(frozen=True)
class Row:
    """What one method, or one floor, came to.

    Args:
        label: the method's name for people.
        score: a `Score` or its dict; accuracy, interval and episodes must be there.
        seeds: how many runs the figures are the mean of.
        bytes_down: sent to all clients in training, of one run.
        bytes_up: received from all clients in training, of one run.
        seconds: of training, of one run.
        note: what a reader must know beside the figures.
        floor: whether this is a control that learns nothing from other clients, such as raw
            pixels; a method that does not beat the best floor is told so.
    """

    label: str
    score: Score | Mapping[str, Any]
    seeds: int = 1
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    note: str = ""
    floor: bool = False

    @classmethod
    def of_runs(cls, label: str, runs: Sequence[Run], *, floor: bool = False) -> Row:
        """Return the row of one method's runs, one for each seed.

        With several seeds the accuracy is the mean over seeds, and the interval is over episodes
        of each episode's mean over seeds: the episodes are the same for all of them.

        Raises:
            CheckpointError: a run is unfinished.
            ConfigError: the runs are not seeds of one thing.
        """
        _check_seeds(label, runs)
        tests = [run.test for run in runs]
        notes = list(dict.fromkeys(text for run in runs for text in not_honest(run.settings)))
        notes += ["transductive"] if any(t.get("transductive") for t in tests) else []
        if len(tests) > 1:
            spread = statistics.stdev(t["accuracy"] for t in tests)
            notes.append(f"std over seeds {100 * spread:.2f} points")
        lost = sum(t.get("unanswered", 0) for t in tests)
        if lost:
            notes.append(f"{lost} unanswered")
        return cls(
            label=label,
            score=combined(tests),
            seeds=len(runs),
            bytes_down=round(statistics.fmean(run.bytes("down") for run in runs)),
            bytes_up=round(statistics.fmean(run.bytes("up") for run in runs)),
            seconds=statistics.fmean(run.seconds for run in runs),
            note="; ".join(notes),
            floor=floor,
        )

    @property
    def accuracy(self) -> float:
        """Mean over episodes (and seeds), in [0, 1]."""
        return float(self._get("accuracy"))

    @property
    def interval(self) -> float:
        """Half-width of the 95 % interval over episodes."""
        return float(self._get("interval"))

    @property
    def episodes(self) -> int:
        """How many episodes were answered."""
        return int(self._get("episodes"))

    @property
    def tasks(self) -> str:
        """The hash of the test episodes; empty when unknown."""
        return str(self._get("tasks", ""))

    @property
    def per_episode(self) -> tuple[float, ...]:
        """The accuracy of every episode in order; empty when unknown or when some are missing."""
        return () if self._get("unanswered", 0) else tuple(self._get("per_episode", ()))

    def _get(self, name: str, *default: Any) -> Any:
        if isinstance(self.score, Score):
            return getattr(self.score, name)
        return self.score.get(name, *default) if default else self.score[name]


@dataclass(frozen=True)
class Verdict:
    """One row against another: a difference of accuracies and its 95 % interval.

    `paired` tells that both sat the same episodes and the interval is of the differences, which is
    tighter than what the two intervals say by themselves.
    """

    other: Row
    difference: float
    interval: float
    paired: bool

    @property
    def outcome(self) -> Literal["above", "below", "unclear"]:
        """What can be said at 95 %."""
        if abs(self.difference) <= self.interval or self.difference == 0:
            return "unclear"
        return "above" if self.difference > 0 else "below"

    def __str__(self) -> str:
        return points(self.difference, self.interval)


def compare(row: Row, other: Row) -> Verdict:
    """Compare two rows, episode by episode where both know theirs."""
    mine, theirs = row.per_episode, other.per_episode
    if row.tasks == other.tasks and len(mine) == len(theirs) > 1:
        gains = [a - b for a, b in zip(mine, theirs, strict=True)]
        return Verdict(other, statistics.fmean(gains), half_width(gains), True)
    apart = math.hypot(row.interval, other.interval)
    return Verdict(other, row.accuracy - other.accuracy, apart, False)


def told(row: Row, verdict: Verdict) -> str:
    """Say in a sentence what a verdict allows to say, and what it rests on."""
    one, other = printable(row.label), printable(verdict.other.label)
    if verdict.outcome == "unclear":
        said = f"No difference shown between {one} and {other}: {verdict}, which holds zero."
    else:
        size = str(verdict).lstrip("+\N{MINUS SIGN}")
        said = f"{one} is {verdict.outcome} {other} by {size}."
    if verdict.paired:
        return f"{said} Paired over the same {row.episodes:,} episodes."
    if row.tasks != verdict.other.tasks:
        return (
            f"{said} They sat different test episodes ({row.tasks[:12] or 'unknown'} and "
            f"{verdict.other.tasks[:12] or 'unknown'}), so nothing is paired and the difference "
            "may be one of tests."
        )
    return f"{said} Some episodes are missing, so nothing is paired."


def against_floor(row: Row, rows: Sequence[Row]) -> Verdict | None:
    """Compare a method with the best floor; None for a floor, or when there is none."""
    floors = [other for other in rows if other.floor]
    if row.floor or not floors:
        return None
    return compare(row, max(floors, key=lambda floor: floor.accuracy))


def half_width(values: Sequence[float]) -> float:
    """Return the half-width of the 95 % interval of a mean, 1.96 s / sqrt(n)."""
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values))


def combined(tests: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return one score for several seeds on the same episodes."""
    if len(tests) == 1:
        return tests[0]
    score: dict[str, Any] = {
        "accuracy": statistics.fmean(t["accuracy"] for t in tests),
        # Where episodes cannot be matched: no mean of correlated values spreads wider than this.
        "interval": statistics.fmean(t["interval"] for t in tests),
        "episodes": min(t["episodes"] for t in tests),
        "tasks": tests[0].get("tasks", ""),
        "unanswered": max(t.get("unanswered", 0) for t in tests),
        "transductive": any(t.get("transductive") for t in tests),
    }
    for name in ("worst_tenth", "spread"):
        told = [t.get(name) for t in tests]
        if all(value is not None for value in told):
            score[name] = statistics.fmean(float(value or 0) for value in told)
    marks = [t.get("per_episode", ()) for t in tests]
    n = score["episodes"]
    if n > 1 and not score["unanswered"] and all(len(m) == n for m in marks):
        means = [statistics.fmean(episode) for episode in zip(*marks, strict=True)]
        score |= {"per_episode": means, "interval": half_width(means)}
    return score


def _check_seeds(label: str, runs: Sequence[Run]) -> None:
    if not runs:
        raise ConfigError(f"{label!r} has no runs; a row needs at least one.")
    first = runs[0]
    seeds = [run.seed for run in runs]
    twice = next((seed for seed in seeds if seeds.count(seed) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"seed {twice} occurs twice among the runs of {label!r}; a run counted twice makes no "
            "second seed. Leave one out."
        )
    for run in runs[1:]:
        changed = first.differs(run)
        if changed:
            raise ConfigError(
                f"{first.folder} and {run.folder} are not seeds of one thing: {changed}. Give them "
                "rows of their own."
            )
        if run.test.get("tasks") != first.test.get("tasks"):
            raise ConfigError(
                f"{first.folder} and {run.folder} sat different test episodes, so their accuracies "
                "cannot be averaged episode by episode. Name the classes of the split instead of "
                "drawing them by the training seed, or give the runs rows of their own."
            )
