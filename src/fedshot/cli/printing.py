"""Prints a run on the terminal: each round as it ends, and the result."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from fedshot.cli.fault_report import FaultReport
from fedshot.core.console import harmless, say, tell
from fedshot.core.text import count

if TYPE_CHECKING:
    import argparse

    from fedshot.evaluation.episodic_test import Score
    from fedshot.runs.experiment import Experiment
    from fedshot.runs.recorder import Record


def shown(experiment: Experiment, options: argparse.Namespace) -> Iterator[Record]:
    """Train, yield each round's record, and show progress: a bar on a terminal, lines in a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    from fedshot.runs.test_protocol import chose_by_test

    console = Console(stderr=True)
    rounds = experiment.config.run.rounds
    by_test = chose_by_test(experiment.config.settings)
    label = "test (NOT HONEST: it chooses the round)" if by_test else "validation"
    if options.quiet:
        yield from experiment.run()
        return
    fault_report = FaultReport(experiment.folder)
    if options.json or not console.is_terminal:
        for record in experiment.run():
            if not options.json:
                tell(_line(record, rounds, label))
            _tell_all(fault_report.heard(record))
            yield record
        _tell_all([fault_report.closing()])
        return
    columns = (
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[text]}", markup=False),  # a fault's text may hold brackets
        TimeLeft(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=rounds, completed=experiment.round, text="")
        for record in experiment.run():
            progress.update(task, completed=record.round, text=_facts(record, label))
            for text in fault_report.heard(record):
                console.print(harmless(text), markup=False, highlight=False)  # above the bar
            yield record
    _tell_all([fault_report.closing()])


def _tell_all(texts: Iterable[str | None]) -> None:
    for text in texts:
        if text:
            tell(text)


def _line(record: Record, rounds: int, label: str) -> str:
    return f"round {record.round}/{rounds}  {_facts(record, label)}  {record.seconds:.2f} s"


def _facts(record: Record, label: str) -> str:
    if record.skipped:
        return f"skipped: {record.skipped}"
    facts = [f"{name} {value:.4f}" for name, value in sorted(record.metrics.items())]
    if record.validation:
        facts.append(f"{label} {record.validation}")
    facts.append(f"{record.bytes_down / 1e6:.2f} MB down, {record.bytes_up / 1e6:.2f} MB up")
    if record.faults:
        facts.append(f"{count(len(record.faults), 'reply', 'replies')} did not count")
    return "  ".join(facts)


def say_score(
    score: Score,
    options: argparse.Namespace,
    experiment: Experiment,
    baselines: Mapping[str, Score],
) -> None:
    """Print a test score and the raw baselines, in one sentence each, or together as JSON."""
    from fedshot.config.schema import not_honest
    from fedshot.config.settings import at
    from fedshot.evaluation.episodic_test import far_below
    from fedshot.reports.significance import ComparisonRow, compare

    dishonest = not_honest(experiment.config.settings)
    if options.json:
        found = {
            "result": score.to_json(),
            "round": experiment.best_round,
            "baselines": {name: raw.to_json() for name, raw in baselines.items()},
        }
        say(json.dumps(found | ({"not_honest": dishonest} if dishonest else {})))
        return
    marks = "".join(f" ({text})" for text in dishonest)
    marks += " (transductive)" if score.transductive else ""
    own = experiment.prepared.own_tests
    users = at(experiment.config.settings, "split.users") is not None
    novel = "on users who took no part in training" if users else "on novel classes"
    where = "on the clients' own classes" if own else novel
    facts = [f"{experiment.method.name}: {score}{marks} {where}"]
    facts.append(f"{score.episodes} {'clients' if own else 'episodes'}")
    if score.unanswered:
        facts.append(f"{score.unanswered} unanswered")
    if score.diverged:
        facts.append(f"{score.diverged} diverged (counted as wrong)")
    if score.worst_tenth is not None:
        facts.append(f"worst tenth {100 * score.worst_tenth:.2f} %")
    if far := far_below(score.clients):
        shown = [f"client {c} {100 * a:.1f} %" for c, a in list(far.items())[:3]]
        more = f" and {len(far) - 3} more" if len(far) > 3 else ""
        facts.append(f"far below the others: {'; '.join(shown)}{more}")
    say(f"{', '.join(facts)}, round {experiment.best_round}, tasks {score.tasks[:12]}")
    for name, raw in baselines.items():
        against = compare(ComparisonRow(experiment.method.name, score), ComparisonRow(name, raw))
        said = f"{experiment.method.name} is {against.outcome} it"
        said = "no difference shown" if against.outcome == "unclear" else said
        say(f"{name}: {raw}; {said} ({against})")
