"""Processes that train cells, as many at once as cores and memory allow."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedshot.machine import cores

_SPARE = 1.25  # of the most memory that a worker has held so far, free before another starts


@dataclass(frozen=True)
class Job:
    """One order for a worker, and what its events are known by."""

    key: str
    do: str
    settings: dict[str, Any]
    folder: Path
    data_dir: str | None

    @property
    def threads(self) -> int:
        """The cores it keeps busy."""
        return int(self.settings["run"]["threads"])


@dataclass(frozen=True)
class Event:
    """What a worker says: "begun", "round", "done", "refused" or "failed", with facts."""

    job: Job
    kind: str
    facts: dict[str, Any]


class Jobs:
    """A queue of jobs; at most `most` run at once, and no more threads than cores.

    The first runs alone until it has told how much memory it holds; another starts when that much
    and a quarter is free. Leaving the loop, by Ctrl-C too, ends the workers.
    """

    def __init__(self, jobs: Sequence[Job], most: int | None = None) -> None:
        self._waiting = deque(jobs)
        self._most = most
        self._running: dict[str, tuple[Job, subprocess.Popen[str]]] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._peak = 0

    def __iter__(self) -> Iterator[Event]:
        """Run the jobs, yielding what they say."""
        try:
            while self._waiting or self._running:
                while self._waiting and self._room():
                    self._start(self._waiting.popleft())
                event = self._events.get()
                self._peak = max(self._peak, int(event.facts.get("peak", 0)))
                if event.kind in ("done", "refused", "failed"):
                    self._running.pop(event.job.key)
                yield event
        finally:
            for _, process in self._running.values():
                process.kill()
                process.wait()

    def _room(self) -> bool:
        if not self._running:
            return True
        if self._most is not None and len(self._running) >= self._most:
            return False
        busy = sum(job.threads for job, _ in self._running.values())
        if self._most is None and busy + self._waiting[0].threads > cores():
            return False
        free = _free_memory()
        return free is None or (self._peak > 0 and free > _SPARE * self._peak)

    def _start(self, job: Job) -> None:
        # A file for what goes wrong: a pipe that nobody reads would stop the worker when full.
        errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-m", "fedshot.recipes.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends the workers
        )
        assert process.stdin is not None
        order = {"do": job.do, "settings": job.settings, "folder": str(job.folder)}
        process.stdin.write(json.dumps(order | {"data_dir": job.data_dir}) + "\n")
        process.stdin.flush()
        self._running[job.key] = (job, process)
        threading.Thread(target=self._listen, args=(job, process, errors), daemon=True).start()

    def _listen(self, job: Job, process: subprocess.Popen[str], errors: IO[str]) -> None:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            facts = json.loads(line)
            last = facts.pop("event")
            self._events.put(Event(job, last, facts))
        code = process.wait()
        if last not in ("done", "refused"):
            errors.seek(0)
            said = errors.read().strip().splitlines()
            reason = said[-1] if said else f"the worker ended with code {code}"
            self._events.put(Event(job, "failed", {"reason": reason, "log": said[-30:]}))
        errors.close()


def _free_memory() -> int | None:
    """Return the bytes that can be had without swapping; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
