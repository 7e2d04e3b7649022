"""Stopping on request: one handler for Ctrl-C and SIGTERM."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

asked = threading.Event()
"""Set once a stop is requested: compiled code may turn KeyboardInterrupt into another error."""


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


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C also stop worker threads; afterwards KeyboardInterrupt is raised.

    This has no effect outside the main thread, or if SIGINT has a handler other than Python's own.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    usual = signal.getsignal(signal.SIGINT)
    if not on_main_thread or usual is not signal.default_int_handler:
        yield
        return
    asked.clear()
    signal.signal(signal.SIGINT, stop)
    try:
        yield
    except Exception as error:
        if asked.is_set():
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, usual)
        asked.clear()


def leave(code: int) -> None:
    """Exit at once with status `code` if other non-daemon threads still run.

    A normal exit would wait for them.
    """
    others = (t for t in threading.enumerate() if t is not threading.main_thread())
    if all(thread.daemon for thread in others):
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
