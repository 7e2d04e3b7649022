"""Stopping on request: one handler for Ctrl-C and SIGTERM."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading

asked = threading.Event()
"""Set once a stop is requested: compiled code may turn the KeyboardInterrupt into another error."""


def stop(number: int, frame: object) -> None:
    """Stop the program at the first signal and ignore further ones, so that it ends cleanly."""
    del frame
    signal.signal(number, signal.SIG_IGN)
    asked.set()
    raise KeyboardInterrupt


def check() -> None:
    """Raise KeyboardInterrupt if a stop was requested; for worker threads, which get no signal."""
    if asked.is_set():
        raise KeyboardInterrupt


def leave(code: int) -> None:
    """End the process if non-daemon threads still run, which Python would wait for."""
    others = (t for t in threading.enumerate() if t is not threading.main_thread())
    if all(thread.daemon for thread in others):
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
