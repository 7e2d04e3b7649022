"""A queue of workers that train cells, i.e. rows and columns of a recipe's table.

As many workers run at once as cores and memory allow.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedshot.core.machine import cores
from fedshot.methods import user_methods

_END = ("done", "refused", "failed")
_HEADROOM = 1.25  # free memory needed to start a worker, as a multiple of the highest peak so far


@dataclass(frozen=True)
class Job:
    """One training run, which a worker process executes."""

    key: str  # name of the job, unique in a queue
    do: str  # "train", "follow" or "tune"
    settings: dict[str, Any]
    folder: Path  # folder of the run
    data_dir: str | None
    lead: Job | None = None  # for "follow": the training whose models this job tests
    keep_validated: bool = False  # keep checkpoints of all validated rounds, for "follow"
    device: str = "cpu"  # run.device of the training; not a setting of the cell

    @property
    def methods(self) -> list[str]:
        """Names of the job's method and, if it tests the models of `lead`, of the lead's method."""
        return [str(self.settings["method"]["name"]), *(self.lead.methods if self.lead else [])]

    @property
    def trained(self) -> Path:
        """Folder of the run that the job trains, or of the run `lead` whose models it tests."""
        return (self.lead or self).folder

    @property
    def threads(self) -> int:
        """Number of cores that the job's worker process keeps busy."""
        return int(self.settings["run"]["threads"])

    def order(self) -> dict[str, Any]:
        """Return the job as a JSON value, which the worker reads from a line."""
        return {
            "key": self.key, "do": self.do, "settings": self.settings,
            "methods": {name: user_methods.fingerprint(name) for name in self.methods},
            "folder": str(self.folder), "data_dir": self.data_dir,
            "lead": self.lead and self.lead.order(), "keep_validated": self.keep_validated,
            "device": self.device,
        }  # fmt: skip


@dataclass(frozen=True)
class Event:
    """A message of a worker: its `kind` and its data.

    Kinds: "begun", "round", "done", "refused" (the settings or data are invalid) and "failed".
    """

    job: Job
    kind: str
    facts: dict[str, Any]


class Jobs:
    """Run jobs in worker processes and yield their events.

    At most `most` workers run at once; if None, as many as fill the cores with their threads. The
    first worker runs alone until it reports its peak memory. Another worker starts once 1.25 times
    the highest peak is free. A "follow" job, which evaluates the models of another run, waits until
    any job that trains this run has ended. Leaving the loop, also by Ctrl-C, ends the workers.
    """

    def __init__(self, jobs: Sequence[Job], most: int | None = None) -> None:
        self._waiting = deque(jobs)
        self._most = most
        self._running: dict[str, tuple[Job, subprocess.Popen[str]]] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._peak = 0  # bytes of the largest worker so far
        self._measured: set[str] = set()  # keys of the jobs that have reported their memory
        self._finished: set[Path] = set()  # folders of the runs that have been trained

    def __iter__(self) -> Iterator[Event]:
        """Run the jobs and yield the events of the workers."""
        try:
            while self._waiting or self._running:
                while (job := self._next()) is not None and self._has_room(job):
                    self._waiting.remove(job)
                    self._start(job)
                event = self._events.get()
                if event.facts.get("peak"):
                    self._peak = max(self._peak, int(event.facts["peak"]))
                    self._measured.add(event.job.key)
                if event.kind in _END:
                    self._running.pop(event.job.key)
                    self._finished.add(event.job.trained)
                yield event
        finally:
            for _, process in self._running.values():
                process.kill()
                process.wait()

    def _next(self) -> Job | None:
        """Return the first job that waits for no other job, or None."""
        running = [job for job, _ in self._running.values()]
        to_train = {job.folder for job in (*running, *self._waiting)}
        blocked = (to_train | {job.trained for job in running}) - self._finished
        return next(
            (job for job in self._waiting if not job.lead or job.trained not in blocked), None
        )

    def _has_room(self, job: Job) -> bool:
        if not self._running:
            return True
        if self._most is not None and len(self._running) >= self._most:
            return False
        busy = sum(job.threads for job, _ in self._running.values())
        if self._most is None and busy + job.threads > cores():
            return False
        free = _free_memory()
        if free is None:
            return True
        # Each worker that has not yet reported its memory may also grow to the peak.
        growing = len(self._running.keys() - self._measured)
        return self._peak > 0 and free > _HEADROOM * self._peak * (1 + growing)

    def _start(self, job: Job) -> None:
        # stderr goes to a file: a worker would block on a full pipe that nobody reads.
        errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fedshot.recipes.cell_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only the parent, which ends the workers
            env=os.environ | user_methods.for_children(*job.methods),
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(job.order()) + "\n")
        process.stdin.flush()
        self._running[job.key] = (job, process)
        threading.Thread(target=self._listen, args=(job, process, errors), daemon=True).start()

    def _listen(self, job: Job, process: subprocess.Popen[str], errors: IO[str]) -> None:
        """Queue the worker's events; the last event is always "done", "refused" or "failed"."""
        assert process.stdout is not None
        last, log = None, []
        try:
            for line in process.stdout:
                event = _event(job, line)
                if event is not None:
                    last = event
                    if event.kind not in _END:
                        self._events.put(event)
            process.wait()
            errors.seek(0)
            log = errors.read().strip().splitlines()
        finally:
            errors.close()
            if last is None or last.kind not in _END:
                reason = log[-1] if log else f"the worker ended with code {process.poll()}"
                last = Event(job, "failed", {"reason": reason, "log": log[-30:]})
            self._events.put(last)


def _event(job: Job, line: str) -> Event | None:
    """Parse a worker's line of output; return None for an incomplete line."""
    try:
        facts = json.loads(line)
        return Event(job, facts.pop("event"), facts)
    except (ValueError, KeyError, AttributeError):
        return None


def _free_memory() -> int | None:
    """Return the bytes available without swapping; None if the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    group = Path("/sys/fs/cgroup")  # a container's limit may be lower
    with suppress(OSError, ValueError):
        most = int((group / "memory.max").read_text(encoding="ascii"))
        found.append(most - int((group / "memory.current").read_text(encoding="ascii")))
    return min(found, default=None)
