"""Rows of a comparison, and the significance of differences between them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedshot.core.errors import ConfigError
from fedshot.core.text import count, points, printable, signed
from fedshot.evaluation.episodic_test import Score, half_width, quantile
from fedshot.reports.run_files import Run
from fedshot.runs.test_protocol import TestProtocol, alike


def untrained(rounds: Sequence[int]) -> list[str]:
    """Return a note on the seeds whose tested model is that before training; [] if none is.

    `rounds` are the rounds whose models were tested, one for each seed.
    """
    n = sum(round == 0 for round in rounds)
    of = f" for {n} of {count(len(rounds), 'seed')}" if len(rounds) > 1 else ""
    return [f"round 0 (before training){of}"] if n else []


@dataclass(frozen=True)
class ComparisonRow:
    """One row of a comparison: the result of a method or a baseline.

    Args:
        label: display name.
        score: a `Score`, or a dict with at least the keys accuracy, interval and episodes.
        seeds: number of runs over which the values are averaged.
        bytes_down: bytes sent to all clients in training, per run.
        bytes_up: bytes received from all clients in training, per run.
        seconds: seconds of training, per run.
        note: remark shown beside the values.
        baseline: whether this is a control without federated learning, such as raw pixels. Methods
            are compared with the best baseline.
        tested: the protocol of the test; its `marks` say why the result is not a fair estimate.
        by_seed: accuracy of each seed; empty for a single seed.
        conditions: key path -> value of the settings besides the method's that a fair comparison
            keeps alike, such as the number of rounds; empty if unknown.
    """

    label: str
    score: Score | Mapping[str, Any]
    seeds: int = 1
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    note: str = ""
    baseline: bool = False
    tested: TestProtocol = field(default_factory=TestProtocol)
    by_seed: tuple[float, ...] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_runs(cls, label: str, runs: Sequence[Run]) -> ComparisonRow:
        """Return the row of a method's runs, one run for each seed.

        All seeds are evaluated on the same episodes. Each episode's accuracy is averaged over
        seeds; the accuracy and its interval are over episodes.

        Raises:
            CheckpointError: a run is unfinished.
            ConfigError: the runs differ in more than the seed.
        """
        _check_seeds(label, runs)
        spent = [(run.bytes("down"), run.bytes("up"), run.seconds) for run in runs]
        tested = alike([run.tested for run in runs])
        rounds = [run.result.get("round", 1) for run in runs if run.result and run.planned]
        row = cls.of_tests(label, [run.test for run in runs], spent, tested, rounds)
        return replace(row, conditions=runs[0].conditions)

    @classmethod
    def of_tests(
        cls,
        label: str,
        tests: Sequence[Mapping[str, Any]],
        spent: Sequence[tuple[int, int, float]],
        tested: TestProtocol,
        rounds: Sequence[int] = (),
    ) -> ComparisonRow:
        """Return the row of a method, given its scores on one test, one for each seed.

        Args:
            label: display name.
            tests: the scores, as returned by `Score.to_json`.
            spent: bytes down, bytes up and seconds of each training run.
            tested: the protocol of the test.
            rounds: the round whose model was tested, of each training run.
        """
        notes = [*tested.marks, *untrained(rounds)]
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
            tested=tested,
            by_seed=tuple(t["accuracy"] for t in tests) if len(tests) > 1 else (),
        )

    @property
    def name(self) -> str:
        """The label, and in parentheses any reasons why the result is not a fair estimate."""
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
        """Number of test episodes."""
        return int(self._get("episodes"))

    @property
    def tasks(self) -> str:
        """Hash of the test episodes; empty if unknown."""
        return str(self._get("tasks", ""))

    @property
    def per_episode(self) -> tuple[float, ...]:
        """Accuracy of each episode, in order; empty if any is unknown."""
        return () if self._get("unanswered", 0) else tuple(self._get("per_episode", ()))

    def _get(self, name: str, *default: Any) -> Any:
        if isinstance(self.score, Score):
            return getattr(self.score, name)
        return self.score.get(name, *default) if default else self.score[name]


@dataclass(frozen=True)
class Difference:
    """The accuracy of a row minus that of another row, with its 95 % interval.

    If `paired`, both rows have the same episodes, and the interval is computed from differences
    per episode, which is tighter than for two independent accuracies. If `seeds`, the interval
    covers the variance between training seeds; otherwise it is valid for these training runs only.
    """

    other: ComparisonRow
    difference: float
    interval: float
    paired: bool
    seeds: bool = False

    @property
    def outcome(self) -> Literal["above", "below", "unclear"]:
        """Whether the row is above or below `other`.

        "unclear" if the interval contains 0, or if its width is 0.
        """
        if abs(self.difference) <= self.interval or not self.interval:
            return "unclear"
        return "above" if self.difference > 0 else "below"

    def __str__(self) -> str:
        return points(self.difference, self.interval)


def incomparable(row: ComparisonRow, other: ComparisonRow) -> str:
    """Return why the accuracies of two rows cannot be compared; "" if they can."""
    if row.tasks and row.tasks == other.tasks:
        return ""
    unlike = row.tested.unlike(other.tested)
    return unlike and f"their tests differ ({unlike})"


def compare(row: ComparisonRow, other: ComparisonRow) -> Difference:
    """Compare two rows; they are paired by episode if both have the same episodes.

    The interval is +- t(0.975, f) sqrt(v). Over n common episodes v = s_d^2 / n, where s_d is the
    standard deviation of the differences; otherwise v is the sum of the variances that the two
    intervals imply. If both rows have several seeds, m_a and m_b, the variance between training
    seeds is added: v += s_a^2 / m_a + s_b^2 / m_b, where s_a and s_b are the standard deviations of
    the seeds' accuracies. The degrees of freedom f of the summands v_i of v are combined by
    Welch-Satterthwaite, f = v^2 / sum(v_i^2 / f_i).
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
    """Return (variance of the mean of these values, its degrees of freedom)."""
    return statistics.variance(values) / len(values), len(values) - 1


def _part_of(row: ComparisonRow) -> tuple[float, int]:
    """Return (variance of a row's accuracy implied by its interval, degrees of freedom)."""
    freedom = max(1, row.episodes - 1)
    return (row.interval / quantile(freedom)) ** 2, freedom


def _joint(parts: Sequence[tuple[float, int]]) -> float:
    """Return the half-width of the 95 % interval of a sum of independent summands.

    `parts` holds (variance, degrees of freedom) of each summand.
    """
    v = sum(variance for variance, _ in parts)
    if not 0 < v < math.inf:
        return 0.0 if v == 0 else v
    freedom = 1 / sum((variance / v) ** 2 / f for variance, f in parts)
    return quantile(freedom) * math.sqrt(v)


def describe(row: ComparisonRow, found: Difference) -> str:
    """Return sentences that state a difference and what its interval covers."""
    one, other = row.name, found.other.name
    if not found.interval:
        text = (
            f"No difference shown between {one} and {other}: the difference is "
            f"{signed(100 * found.difference)} points in every {row.tested.unit}, "
            "and equal values have no interval."
        )
    elif found.outcome == "unclear":
        text = f"No difference shown between {one} and {other}: {found}, which includes zero."
    else:
        size = str(found).lstrip("+\N{MINUS SIGN}")
        text = f"{one} is {found.outcome} {other} by {size}{seed_caveat(found)}."
    if found.seeds:
        text += f" The interval covers episodes and seeds, {row.seeds} and {found.other.seeds}."
    if found.paired:
        return f"{text} Paired over the same {row.episodes:,} {row.tested.unit}s."
    if row.tasks != found.other.tasks:
        return (
            f"{text} They were evaluated on different test episodes "
            f"({row.tasks[:12] or 'unknown'} and {found.other.tasks[:12] or 'unknown'}), so the "
            "comparison is not paired and the tests themselves may differ in difficulty."
        )
    return f"{text} Some episodes are missing, so the comparison is not paired."


def seed_caveat(found: Difference) -> str:
    """Return a caveat if a clear difference ignores the variance between seeds, else ""."""
    clear = found.outcome != "unclear" and not found.seeds
    return ", for these training runs; another seed may differ" if clear else ""


def against_baseline(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> Difference | None:
    """Compare a method with the best baseline of the same test; None without a baseline."""
    others = [other for other in rows if other.baseline and other.tasks in ("", row.tasks)]
    if row.baseline or not others:
        return None
    return compare(row, max(others, key=lambda other: other.accuracy))


def baselines(groups: Mapping[str, Sequence[Run]]) -> list[ComparisonRow]:
    """Return a row for each baseline (such as raw pixels) and test in the results of the runs."""
    found: dict[tuple[str, str], tuple[str, Mapping[str, Any]]] = {}
    for label, runs in groups.items():
        for run in runs:
            for name, score in ((run.result or {}).get("baselines") or {}).items():
                found.setdefault((name, score["tasks"]), (label, score))
    names = [name for name, _ in found]
    return [
        ComparisonRow(name if names.count(name) == 1 else f"{name} ({label})", score, baseline=True)
        for (name, _), (label, score) in found.items()
    ]


def combined(tests: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the mean score of several seeds on the same episodes; `tests` holds each seed's score.

    The interval is over episodes of the accuracies averaged over seeds or, if episodes cannot be
    matched, the mean of the seeds' intervals.
    """
    if len(tests) == 1:
        marks = tests[0].get("per_episode", ())
        return {**tests[0], "interval": half_width(marks)} if len(marks) > 1 else tests[0]
    score: dict[str, Any] = {
        "accuracy": statistics.fmean(t["accuracy"] for t in tests),
        # An upper bound for the mean's interval, used if episodes cannot be matched.
        "interval": statistics.fmean(t["interval"] for t in tests),
        "episodes": min(t["episodes"] for t in tests),
        "tasks": tests[0].get("tasks", ""),
        "unanswered": max(t.get("unanswered", 0) for t in tests),
        "transductive": any(t.get("transductive") for t in tests),
    }
    for name in ("worst_tenth", "spread"):
        values = [t[name] for t in tests if t.get(name) is not None]
        if len(values) == len(tests):
            score[name] = statistics.fmean(values)
    by_episode = [t.get("per_episode", ()) for t in tests]
    n = score["episodes"]
    if n > 1 and not score["unanswered"] and all(len(one) == n for one in by_episode):
        means = [statistics.fmean(episode) for episode in zip(*by_episode, strict=True)]
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
            f"seed {twice} occurs twice among the runs of {label!r}; each seed counts once. Leave "
            "one of the runs out."
        )
    for run in runs[1:]:
        changed = first.differs(run)
        if changed:
            raise ConfigError(
                f"{first.folder} and {run.folder} differ in more than the seed: {changed}. Put "
                "them in separate rows."
            )
        if run.test.get("tasks") != first.test.get("tasks"):
            raise ConfigError(
                f"{first.folder} and {run.folder} were evaluated on different test episodes, so "
                "their accuracies cannot be averaged by episode. Name the classes of the split "
                "instead of drawing them by the training seed, or put the runs in separate rows."
            )
