"""Shows the progress of a run: on a terminal, in a notebook, or as lines in a log."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft

from fedshot.api.fault_report import FaultReport, lost_or_rejected
from fedshot.core.console import logs_json, printable, tell
from fedshot.runs.test_protocol import chose_by_test

if TYPE_CHECKING:
    from fedshot.runs.experiment import Experiment
    from fedshot.runs.recorder import Record

_REDRAWN = 0.2  # seconds between two updates of a notebook's output


def shown(
    experiment: Experiment, *, rounds: bool = True, every: float = 0.0
) -> Iterator[Record]:  # fmt: skip
    """Train the remaining rounds, yield each round's record, and show progress on stderr.

    Progress is a bar on a terminal, a cell output that is updated in place in a notebook, and a
    line per round elsewhere.

    Args:
        experiment: the run.
        rounds: whether to show the rounds; otherwise only lost or rejected replies are reported.
        every: minimum number of seconds between two lines; the last round is always shown.
    """
    peeks = chose_by_test(experiment.config.settings)
    name = "test (NOT HONEST: it chooses the round)" if peeks else "validation"
    report, console = FaultReport(experiment.folder), Console(stderr=True)
    if rounds and console.is_jupyter:
        yield from _in_notebook(experiment, report, name)
    elif rounds and console.is_terminal and not logs_json():
        yield from _on_terminal(experiment, report, name, console)
    else:
        yield from _as_lines(experiment, report, name, every if rounds else None)
    if closing := report.closing():
        tell(closing)


def _as_lines(
    experiment: Experiment, report: FaultReport, name: str, every: float | None
) -> Iterator[Record]:
    """Print a line for each round, but wait `every` seconds between lines; None for no lines."""
    last_shown, planned = -math.inf, experiment.config.run.rounds
    for record in experiment.run():
        waited = time.monotonic() - last_shown
        if every is not None and (record.round == planned or waited >= every):
            last_shown = time.monotonic()
            tell(_line(record, planned, name))
        for text in report.heard(record):
            tell(text)
        yield record


def _on_terminal(
    experiment: Experiment, report: FaultReport, name: str, console: Console
) -> Iterator[Record]:
    columns = (
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[text]}", markup=False),  # a fault's text may hold brackets
        TimeLeft(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(
            "", total=experiment.config.run.rounds, completed=experiment.round, text=""
        )
        for record in experiment.run():
            progress.update(task, completed=record.round, text=_facts(record, name))
            for text in report.heard(record):
                console.print(printable(text), markup=False, highlight=False)  # above the bar
            yield record


def _in_notebook(experiment: Experiment, report: FaultReport, name: str) -> Iterator[Record]:
    faults, last_shown = list[str](), -math.inf
    display = importlib.import_module("IPython.display").display
    output = display({"text/plain": "starting"}, raw=True, display_id=True)
    rounds = experiment.config.run.rounds
    for record in experiment.run():
        faults += report.heard(record)
        if record.round == rounds or time.monotonic() - last_shown >= _REDRAWN:
            last_shown = time.monotonic()
            text = "\n".join([_line(record, rounds, name), *faults])
            output.update({"text/plain": printable(text)}, raw=True)
        yield record


def _line(record: Record, rounds: int, name: str) -> str:
    return f"round {record.round}/{rounds}  {_facts(record, name)}  {record.seconds:.2f} s"


def _facts(record: Record, name: str) -> str:
    if record.skipped:
        return f"skipped: {record.skipped}"
    facts = [f"{metric} {value:.4f}" for metric, value in sorted(record.metrics.items())]
    if record.validation:
        facts.append(f"{name} {record.validation}")
    facts.append(f"{record.bytes_down / 1e6:.2f} MB down, {record.bytes_up / 1e6:.2f} MB up")
    if record.simulated is not None:
        facts.append(f"{record.simulated / 3600:.3g} simulated hours")
    if record.epsilon is not None:
        facts.append(f"epsilon {record.epsilon:.3g}")
    if record.faults:
        facts.append(lost_or_rejected(len(record.faults)))
    return "  ".join(facts)
