"""Processes that train cells, as many at once as cores and memory allow."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedshot.core.machine import cores
from fedshot.methods import user_methods

_ENDS = ("done", "refused", "failed")
_SPARE = 1.25  # of the most memory that a worker has held so far, free before another starts


@dataclass(frozen=True)
class Job:
    """One order for a worker, and what its events are known by.

    Args:
        key: what the events are known by.
        do: "train", "follow" or "tune".
        settings: of the run.
        folder: in which it lives.
        data_dir: folder of datasets.
        lead: settings and folder of the run that is followed, and the key of its cell.
        keep_looks: whether others will follow this one.
    """

    key: str
    do: str
    settings: dict[str, Any]
    folder: Path
    data_dir: str | None
    lead: tuple[dict[str, Any], Path, str] | None = None
    keep_looks: bool = False

    @property
    def methods(self) -> list[str]:
        """The names of its method, and of the one that it follows."""
        every = [self.settings, *([self.lead[0]] if self.lead else [])]
        return [str(settings["method"]["name"]) for settings in every]

    @property
    def threads(self) -> int:
        """The cores it keeps busy."""
        return int(self.settings["run"]["threads"])

    def order(self) -> str:
        """Return the line that tells a worker what to do."""
        order = {
            "do": self.do, "settings": self.settings,
            "own": {name: user_methods.fingerprint(name) for name in self.methods},
            "folder": str(self.folder), "data_dir": self.data_dir, "keep_looks": self.keep_looks,
        }  # fmt: skip
        if self.lead is not None:
            settings, folder, key = self.lead
            order["lead"] = order | {
                "settings": settings, "folder": str(folder), "keep_looks": True, "key": key,
            }  # fmt: skip
        return json.dumps(order)


@dataclass(frozen=True)
class Event:
    """What a worker says: "begun", "round", "done", "refused" or "failed", with facts."""

    job: Job
    kind: str
    facts: dict[str, Any]


class Jobs:
    """A queue of jobs; at most `most` run at once, and no more threads than cores.

    A job that follows a run waits for the one that trains it here, or for another that follows it
    and brings it to its end.

    The first runs alone until it has told how much memory it holds; another starts when that much
    and a quarter is free. Leaving the loop, by Ctrl-C too, ends the workers.
    """

    def __init__(self, jobs: Sequence[Job], most: int | None = None) -> None:
        self._waiting = deque(jobs)
        self._most = most
        self._running: dict[str, tuple[Job, subprocess.Popen[str]]] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._peak = 0
        self._told: set[str] = set()
        self._settled: set[Path] = set()  # runs that jobs of this queue have brought to their end

    def __iter__(self) -> Iterator[Event]:
        """Run the jobs, yielding what they say."""
        try:
            while self._waiting or self._running:
                while (job := self._next()) is not None and self._room(job):
                    self._waiting.remove(job)
                    self._start(job)
                event = self._events.get()
                if event.facts.get("peak"):
                    self._peak = max(self._peak, int(event.facts["peak"]))
                    self._told.add(event.job.key)
                if event.kind in _ENDS:
                    self._running.pop(event.job.key)
                    self._settled.add(event.job.lead[1] if event.job.lead else event.job.folder)
                yield event
        finally:
            for _, process in self._running.values():
                process.kill()
                process.wait()

    def _next(self) -> Job | None:
        """Return the first job that need not wait for another; None for none."""
        running = [job for job, _ in self._running.values()]
        for job in self._waiting:
            if job.lead is None or job.lead[1] in self._settled:
                return job
            place = job.lead[1]
            trains = any(other.folder == place for other in (*running, *self._waiting))
            if not trains and not any(other.lead and other.lead[1] == place for other in running):
                return job
        return None

    def _room(self, job: Job) -> bool:
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
        # What has been started and has not told its size yet will still take its share.
        coming = len(self._running.keys() - self._told)
        return self._peak > 0 and free > _SPARE * self._peak * (1 + coming)

    def _start(self, job: Job) -> None:
        # A file for what goes wrong: a pipe that nobody reads would stop the worker when full.
        errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "fedshot.recipes.cell_worker",
            ],  # -P: no modules of the folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends the workers
            env=os.environ | user_methods.for_children(*job.methods),
        )
        assert process.stdin is not None
        process.stdin.write(job.order() + "\n")
        process.stdin.flush()
        self._running[job.key] = (job, process)
        threading.Thread(target=self._listen, args=(job, process, errors), daemon=True).start()

    def _listen(self, job: Job, process: subprocess.Popen[str], errors: IO[str]) -> None:
        assert process.stdout is not None
        last, said = None, []
        try:
            for line in process.stdout:
                event = _event(job, line)
                if event is not None:
                    last = event
                    if event.kind not in _ENDS:
                        self._events.put(event)
            process.wait()
            errors.seek(0)
            said = errors.read().strip().splitlines()
        finally:  # a job without an end would be waited for without one
            errors.close()
            if last is None or last.kind not in _ENDS:
                reason = said[-1] if said else f"the worker ended with code {process.poll()}"
                last = Event(job, "failed", {"reason": reason, "log": said[-30:]})
            self._events.put(last)


def _event(job: Job, line: str) -> Event | None:
    """Return what a line says; None for one that was cut short."""
    try:
        facts = json.loads(line)
        return Event(job, facts.pop("event"), facts)
    except (ValueError, KeyError, AttributeError):
        return None


def _free_memory() -> int | None:
    """Return the bytes that can be had without swapping; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    group = Path("/sys/fs/cgroup")  # a container may have less than the machine
    try:
        most = int((group / "memory.max").read_text(encoding="ascii"))
        found.append(most - int((group / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        pass
    return min(found, default=None)
