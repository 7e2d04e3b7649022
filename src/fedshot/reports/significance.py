"""Rows of a comparison, and whether one of them is really above another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedshot.core.errors import ConfigError
from fedshot.core.text import points, printable
from fedshot.evaluation.episodic_test import Score, half_width, quantile
from fedshot.reports.run_files import Run
from fedshot.runs.test_protocol import TestProtocol, alike


@dataclass(frozen=True)
class ComparisonRow:
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
        tested: what the test asked, and what makes its result no honest one.
        by_seed: the accuracy of each seed, where there are several.
    """

    label: str
    score: Score | Mapping[str, Any]
    seeds: int = 1
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    note: str = ""
    floor: bool = False
    tested: TestProtocol = field(default_factory=TestProtocol)
    by_seed: tuple[float, ...] = ()

    @classmethod
    def of_runs(cls, label: str, runs: Sequence[Run], *, floor: bool = False) -> ComparisonRow:
        """Return the row of one method's runs, one for each seed.

        With several seeds the accuracy is the mean over seeds, and the interval is over episodes
        of each episode's mean over seeds: the episodes are the same for all of them.

        Raises:
            CheckpointError: a run is unfinished.
            ConfigError: the runs are not seeds of one thing.
        """
        _check_seeds(label, runs)
        spent = [(run.bytes("down"), run.bytes("up"), run.seconds) for run in runs]
        tested = alike([run.tested for run in runs])
        return cls.of_tests(label, [run.test for run in runs], spent, tested, floor=floor)

    @classmethod
    def of_tests(
        cls,
        label: str,
        tests: Sequence[Mapping[str, Any]],
        spent: Sequence[tuple[int, int, float]],
        tested: TestProtocol,
        *,
        floor: bool = False,
    ) -> ComparisonRow:
        """Return the row of several seeds' scores on one test.

        Args:
            label: the method's name for people.
            tests: their scores, as `Score.to_json` has them.
            spent: of each the bytes down and up, and the seconds, of its training.
            tested: what the test asked.
            floor: as for `ComparisonRow`.
        """
        notes = list(tested.marks)
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
            seeds=len(tests),
            bytes_down=round(statistics.fmean(down for down, _, _ in spent)),
            bytes_up=round(statistics.fmean(up for _, up, _ in spent)),
            seconds=statistics.fmean(seconds for _, _, seconds in spent),
            note="; ".join(notes),
            floor=floor,
            tested=tested,
            by_seed=tuple(t["accuracy"] for t in tests) if len(tests) > 1 else (),
        )

    @property
    def name(self) -> str:
        """The label, and beside it what makes the result no honest one."""
        return " ".join([printable(self.label), *(f"({mark})" for mark in self.tested.marks)])

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
class Difference:
    """One row against another: a difference of accuracies and its 95 % interval.

    `paired` tells that both sat the same episodes and the interval is of the differences, which is
    tighter than what the two intervals say by themselves. `seeds` tells that it also covers how
    much training seeds differ; else it is one for these training runs alone.
    """

    other: ComparisonRow
    difference: float
    interval: float
    paired: bool
    seeds: bool = False

    @property
    def outcome(self) -> Literal["above", "below", "unclear"]:
        """What can be said at 95 %; nothing where all differences are equal."""
        if abs(self.difference) <= self.interval or not self.interval:
            return "unclear"
        return "above" if self.difference > 0 else "below"

    def __str__(self) -> str:
        return points(self.difference, self.interval)


def compare(row: ComparisonRow, other: ComparisonRow) -> Difference:
    """Compare two rows, episode by episode where both know theirs.

    The interval is +- t(0.975, f) sqrt(v). Over n common episodes v = s_d^2 / n, s_d the standard
    deviation of the differences; without them it is the sum of what both intervals say. Where both
    rows have several seeds, m_a and m_b of them, what another training run would change is added:
    v += s_a^2 / m_a + s_b^2 / m_b, s the standard deviations of the seeds' accuracies. The degrees
    of freedom f are those of the parts, joined as by Welch and Satterthwaite,
    f = v^2 / sum(v_i^2 / f_i); with few clients or seeds t is much above 1.96.
    """
    mine, theirs = row.per_episode, other.per_episode
    known = bool(row.tasks) and row.tasks == other.tasks
    paired = known and len(mine) == len(theirs) > 1
    if paired:
        gains = [a - b for a, b in zip(mine, theirs, strict=True)]
        difference, parts = statistics.fmean(gains), [_part(gains)]
    else:
        difference = row.accuracy - other.accuracy
        parts = [_part_of(one) for one in (row, other)]
    seeds = len(row.by_seed) > 1 and len(other.by_seed) > 1
    if seeds:
        parts += [_part(row.by_seed), _part(other.by_seed)]
    return Difference(other, difference, _joint(parts), paired, seeds)


def _part(values: Sequence[float]) -> tuple[float, int]:
    """Return the variance of a mean, and its degrees of freedom."""
    return statistics.variance(values) / len(values), len(values) - 1


def _part_of(row: ComparisonRow) -> tuple[float, int]:
    """Return what a row's interval says of the variance of its accuracy, and its freedom."""
    freedom = max(1, row.episodes - 1)
    return (row.interval / quantile(freedom)) ** 2, freedom


def _joint(parts: Sequence[tuple[float, int]]) -> float:
    """Return the half-width of the 95 % interval of a sum of independent (variance, freedom)."""
    v = sum(variance for variance, _ in parts)
    if not 0 < v < math.inf:
        return 0.0 if v == 0 else v
    freedom = 1 / sum((variance / v) ** 2 / f for variance, f in parts)
    return quantile(freedom) * math.sqrt(v)


def told(row: ComparisonRow, verdict: Difference) -> str:
    """Say in a sentence what a verdict allows to say, and what it rests on."""
    one, other = row.name, verdict.other.name
    if not verdict.interval:
        said = (
            f"No difference shown between {one} and {other}: it is "
            f"{str(verdict).partition(' ±')[0]} points in every {row.tested.unit}, "
            "and equal values have no interval."
        )
    elif verdict.outcome == "unclear":
        said = f"No difference shown between {one} and {other}: {verdict}, which holds zero."
    else:
        size = str(verdict).lstrip("+\N{MINUS SIGN}")
        said = f"{one} is {verdict.outcome} {other} by {size}{reach(verdict)}."
    if verdict.seeds:
        said += f" The interval covers episodes and seeds, {row.seeds} and {verdict.other.seeds}."
    if verdict.paired:
        return f"{said} Paired over the same {row.episodes:,} {row.tested.unit}s."
    if row.tasks != verdict.other.tasks:
        return (
            f"{said} They sat different test episodes ({row.tasks[:12] or 'unknown'} and "
            f"{verdict.other.tasks[:12] or 'unknown'}), so nothing is paired and the difference "
            "may be one of tests."
        )
    return f"{said} Some episodes are missing, so nothing is paired."


def reach(verdict: Difference) -> str:
    """Return what must follow a difference that was found, where seeds are not in its interval."""
    found = verdict.outcome != "unclear" and not verdict.seeds
    return ", for these training runs; another seed may differ" if found else ""


def against_floor(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> Difference | None:
    """Compare a method with the best floor of its own test; None for a floor, or without one."""
    floors = [other for other in rows if other.floor and other.tasks in ("", row.tasks)]
    if row.floor or not floors:
        return None
    return compare(row, max(floors, key=lambda floor: floor.accuracy))


def baselines(groups: Mapping[str, Sequence[Run]]) -> list[ComparisonRow]:
    """Return a floor for each raw baseline that the runs' results hold, one for each test."""
    found: dict[tuple[str, str], tuple[str, Mapping[str, Any]]] = {}
    for label, runs in groups.items():
        for run in runs:
            for name, score in ((run.result or {}).get("baselines") or {}).items():
                found.setdefault((name, score["tasks"]), (label, score))
    names = [name for name, _ in found]
    return [
        ComparisonRow(name if names.count(name) == 1 else f"{name} ({label})", score, floor=True)
        for (name, _), (label, score) in found.items()
    ]


def combined(tests: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return one score for several seeds on the same episodes."""
    if len(tests) == 1:
        marks = tests[0].get("per_episode", ())
        return {**tests[0], "interval": half_width(marks)} if len(marks) > 1 else tests[0]
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
