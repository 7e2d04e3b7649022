"""Child processes that end with their parent, even if the parent is killed.

A child keeps the reading end of a pipe open, and exits when the parent's writing end closes.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedshot.core.errors import FedshotError
from fedshot.deploy.flower.wire import QUIET

PARENT_PIPE = "FEDSHOT_PARENT_PIPE"  # environment variable: the pipe's file descriptor
_TERMINATE_SECONDS = 10.0  # time until a terminated process is killed
_TAIL = 3000  # characters of a log's end that an error quotes


class Child:
    """A child process with a log file."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] = {}
    ) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        self._pipe = os.fdopen(writing, "wb")
        try:
            with log.open("ab") as file:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches the parent only
                    pass_fds=[reading],
                    env={**os.environ, **QUIET, PARENT_PIPE: str(reading), **env},
                )
        finally:
            os.close(reading)

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    @property
    def tail(self) -> str:
        """The end of the log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()

    def stop(self) -> None:
        """End the process and wait for it."""
        self.process.terminate()
        try:
            self.process.wait(_TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._pipe.close()


class ChildError(FedshotError):
    """A child process did not start, or has ended unexpectedly."""

    def __init__(self, child: Child, text: str) -> None:
        super().__init__(f"{text}:\n{child.tail}")
        self.retryable = child.process.poll() != 2  # 2: it would refuse again


class Children:
    """Child processes that are stopped together, in reverse order of their start."""

    def __init__(self) -> None:
        self.all: list[Child] = []

    def start(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] = {}
    ) -> Child:
        """Start a child process."""
        self.all.append(Child(name, command, log, env))
        return self.all[-1]

    def check(self) -> None:
        """Raise ChildError, with the end of its log, if a process has ended."""
        for child in self.all:
            if child.ended:
                raise ChildError(child, f"{child.name} has ended. Its log, {child.log}, ends with")

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *error: object) -> None:
        for child in reversed(self.all):
            child.process.terminate()
        for child in reversed(self.all):
            child.stop()


def exit_with_parent() -> None:
    """Let this process exit when the parent that started it as a `Child` ends."""
    text = os.environ.pop(PARENT_PIPE, "")
    if not text:
        return

    def wait_for_parent() -> None:
        os.read(int(text), 1)
        os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True, name="parent").start()
