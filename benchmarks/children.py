"""Peers in processes of their own, which do their work when told to go.

A child reads lines on stdin, `go NAME` or `check NAME PATH`, and answers with a line of JSON behind
an `@`. So it can be measured in turn with fedshot, in one run.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import payloads

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
_START, _ANSWER, _END = 300.0, 900.0, 30.0  # seconds


class PeerError(Exception):
    """A peer cannot take part; the text says why."""


class Child:
    """A peer at work on what lies in a folder.

    Args:
        script: what it runs.
        folder: what it works on, and where.
        words: its other arguments.
        python: whose libraries it has; by default those of the environment for peers.
        environment: variables that it sees besides this process's.

    Raises:
        PeerError: there is no environment for peers, or the peer does not start.
    """

    def __init__(
        self,
        script: str,
        folder: Path,
        *words: str,
        python: Path = PEERS,
        environment: Mapping[str, str] = {},
    ) -> None:
        if not python.exists():
            raise PeerError("there is no environment for peers; `make bench-peers` makes it")
        self._name = script
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the child)
        self._process = subprocess.Popen(
            [str(python), str(HERE / script), str(folder), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(HERE)} | dict(environment),
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.facts = self._answer(_START)

    def go(self, name: str) -> Callable[[], float]:
        """Return a function that lets the child do `name` once and returns its seconds."""
        return lambda: float(self._ask(f"go {name}")["seconds"])

    def check(self, name: str, path: Path) -> Any:
        """Return the result of doing `name` once."""
        self._ask(f"check {name} {path}")
        return payloads.read(path)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(_END)
        except (OSError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(line, file=self._process.stdin, flush=True)
        except OSError:
            raise PeerError(self._last_words()) from None
        return self._answer(_ANSWER)

    def _answer(self, patience: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=patience)
        except queue.Empty:
            self.close()
            raise PeerError(f"{self._name} gave no answer in {patience:.0f} s") from None
        if line is None:
            reason = self._last_words()
            self.close()
            raise PeerError(reason)
        found: dict[str, Any] = json.loads(line)
        return found

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                self._lines.put(line[1:])
        self._lines.put(None)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"{self._name} ended: {lines[-1][:200] if lines else 'without a word'}"
