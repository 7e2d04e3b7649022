"""Trials of hyper-parameter values, for sweeps and for the option `--tune` of recipes.

A search space of an option is `{choice: [...]}`, `{log: [a, b]}`, `{linear: [a, b]}` or
`{int: [a, b]}`, whose ends are included. Trials are judged by validation accuracy alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from fedshot.config.schema import not_honest
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.recipes.jobs import Event, Job, Jobs
from fedshot.recipes.results import validation_curve

Space: TypeAlias = Mapping[str, Sequence[Any]]
Facts: TypeAlias = Mapping[str, Any]


def is_space(space: Mapping[Any, Any]) -> bool:
    """Whether a mapping is a search space."""
    if len(space) != 1:
        return False
    ((kind, values),) = space.items()
    if not isinstance(values, list) or not values:
        return False
    if kind == "choice":
        return True
    if len(values) != 2 or not all(isinstance(x, int | float) and abs(x) < 1e30 for x in values):
        return False
    if kind == "int" and not all(type(x) is int for x in values):
        return False
    least = {"log": 0, "linear": -math.inf, "int": -math.inf}.get(kind, math.inf)
    return bool(least < values[0] <= values[1])


def draws(spaces: Mapping[str, Space], n: int) -> list[dict[str, Any]]:
    """Return n random draws of the options, by dotted key path.

    The i-th value of an option depends only on i, on its key path and on its space. So a larger n
    begins with the same draws.
    """
    key = Key(0).at("tune")
    return [
        {place: _draw(space, key.at(i, place)) for place, space in spaces.items()}
        for i in range(1, n + 1)
    ]


def _draw(space: Space, key: Key) -> Any:
    kind, values = next(iter(space.items()))
    u = float(key.numpy().random())
    if kind == "choice":
        return values[int(u * len(values))]
    low, high = values
    if kind == "int":
        return low + int(u * (high - low + 1))
    if kind == "log":
        return rounded(math.exp(math.log(low) + u * (math.log(high) - math.log(low))))
    return rounded(low + u * (high - low))


def rounded(value: float) -> float:
    """Return a drawn number with three significant digits."""
    return float(f"{value:.3g}")


def accuracy(facts: Facts) -> float | None:
    """Return a trial's validation accuracy at the round that would be tested; None if it diverged.

    Args:
        facts: what the worker reports of the finished trial.
    """
    return None if facts.get("diverged") else validation_curve(facts)[facts["round"]]


def check_honest(
    what: str,
    settings: Mapping[str, Any],
    fix: str = "Set run.choose to 'validation' and test.first_client_only to false.",
) -> None:
    """Raise ConfigError unless a trial is judged on validation classes alone, by all clients.

    Settings may let validation use the test classes, or use the first client only.

    Args:
        what: the trial, for the message.
        settings: its settings.
        fix: what to do, a sentence.
    """
    if reasons := not_honest(settings):
        raise ConfigError(
            f"trials are judged on validation classes, by all clients; for {what}, "
            f"{'; '.join(reasons)}. {fix}"
        )


def train(
    groups: Mapping[str, Sequence[Job]],
    most: int | None,
    done: Callable[[str, list[Facts]], None],
    failed: Callable[[str, int, str], None],
) -> Iterator[Event]:
    """Run groups of jobs (training runs) in worker processes, and yield the workers' events.

    Args:
        groups: jobs by group. Jobs of a group with the same key are run once.
        most: processes at once; None for as many as cores and memory allow.
        done: called with a group and the facts of each of its jobs, when all have finished.
        failed: called with a group, the index of a job that failed, and the reason.
    """
    places: dict[str, tuple[str, list[int]]] = {}
    for group, jobs in groups.items():
        for i, job in enumerate(jobs):
            places.setdefault(job.key, (group, []))[1].append(i)
    queue = {job.key: job for jobs in groups.values() for job in jobs}
    found: dict[str, dict[int, Facts]] = {group: {} for group in groups}
    for event in Jobs(list(queue.values()), most):
        group, numbers = places[event.job.key]
        if event.kind == "done":
            found[group] |= dict.fromkeys(numbers, event.facts)
            if len(found[group]) == len(groups[group]):
                done(group, [found[group][i] for i in range(len(groups[group]))])
        elif event.kind in ("refused", "failed"):
            failed(group, numbers[0], event.facts["reason"])
        yield event
