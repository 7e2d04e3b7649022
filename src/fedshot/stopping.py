"""The end that a person or a supervisor asks for: one handler for Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
import threading

asked = threading.Event()
"""Set once the end is asked for: compiled code may raise an error of its own in its place."""


def stop(number: int, frame: object) -> None:
    """Let the first signal stop the program, and no second one garble its last words."""
    del frame
    signal.signal(number, signal.SIG_IGN)
    asked.set()
    raise KeyboardInterrupt
