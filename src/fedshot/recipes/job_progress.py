"""Show the progress of worker processes, which train the cells of a recipe or points of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedshot.core.console import tell
from fedshot.recipes.jobs import Event, Job


def show_jobs(
    events: Iterable[Event],
    table: Callable[[], Table],
    named: Callable[[Job], str],
    *,
    silent: bool,
) -> None:
    """Run worker processes by reading all of their `events`, and show the progress.

    A terminal shows `table()`, updated at each event. Elsewhere each event is a line that begins
    with `named(job)`. With `silent`, nothing is shown.
    """
    console = Console(stderr=True)
    if silent or not console.is_terminal:
        for event in events:
            for line in () if silent else _lines(named(event.job), event):
                tell(line)
        return
    with Live(console=console, refresh_per_second=2, transient=True) as live:
        for _ in events:
            live.update(table())


def _lines(what: str, event: Event) -> Iterator[str]:
    facts = event.facts
    if event.kind == "round":
        seen = facts["validation"]
        if seen is not None:
            yield f"{what}: round {facts['round']}/{facts['rounds']}, validation {100 * seen:.2f} %"
    elif event.kind == "done" and "test" in facts:
        test = facts["test"]
        yield f"{what}: {100 * test['accuracy']:.2f} ± {100 * test['interval']:.2f} %"
    elif event.kind in ("refused", "failed"):
        yield f"{what}: {event.kind}: {facts['reason']}"
        yield from (f"    {line}" for line in facts.get("log", []))
