"""The end that a person or a supervisor asks for: one handler for Ctrl-C and SIGTERM."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading

asked = threading.Event()
"""Set once the end is asked for: compiled code may raise an error of its own in its place."""


def stop(number: int, frame: object) -> None:
    """Let the first signal stop the program, and no second one garble its last words."""
    del frame
    signal.signal(number, signal.SIG_IGN)
    asked.set()
    raise KeyboardInterrupt


def check() -> None:
    """Raise KeyboardInterrupt once the end is asked for: the work of a thread counts no more."""
    if asked.is_set():
        raise KeyboardInterrupt


def leave(code: int) -> None:
    """End the process where threads are at work that Python would wait for, maybe for long."""
    waited_for = (t for t in threading.enumerate() if t is not threading.main_thread())
    if all(thread.daemon for thread in waited_for):
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
