"""Child processes that end with their parent, however it ends.

A child holds the reading end of a pipe and leaves when the other end is gone, which the system sees
to even when the parent is killed.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from fedshot.core.errors import FedshotError
from fedshot.deploy.flower.wire import QUIET

LEASH = "FEDSHOT_LEASH"
_GRACE = 10.0  # seconds to end by itself
_TAIL = 3000  # characters of a log that a message quotes


class Child:
    """A process with a log."""

    def __init__(
        self, name: str, words: Sequence[str], log: Path, env: Mapping[str, str] = {}
    ) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        reading, self._leash = os.pipe()
        try:
            with log.open("ab") as file:
                self.process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C is the parent's to pass on
                    pass_fds=[reading],
                    env={**os.environ, **QUIET, LEASH: str(reading), **env},
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
        """End the process, and wait until it has."""
        if not self.ended:
            self.process.terminate()
            try:
                self.process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        if self._leash >= 0:
            os.close(self._leash)
            self._leash = -1


class ChildError(FedshotError):
    """A process that has ended before its time."""


class Children:
    """Processes that are stopped together, the last one first."""

    def __init__(self) -> None:
        self.all: list[Child] = []

    def start(
        self, name: str, words: Sequence[str], log: Path, env: Mapping[str, str] = {}
    ) -> Child:
        """Start one more."""
        self.all.append(Child(name, words, log, env))
        return self.all[-1]

    def check(self) -> None:
        """Raise ChildError, with the end of its log, when one has ended."""
        for child in self.all:
            if child.ended:
                raise ChildError(
                    f"{child.name} has ended. Its log, {child.log}, ends with:\n{child.tail}"
                )

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        for child in reversed(self.all):
            if not child.ended:
                child.process.terminate()
        for child in reversed(self.all):
            child.stop()


def heed_leash() -> None:
    """Let this process end when the parent that holds its leash has ended."""
    text = os.environ.pop(LEASH, "")
    if not text:
        return

    def watch() -> None:
        os.read(int(text), 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="leash").start()
