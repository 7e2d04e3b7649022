"""Printing to terminals and pipes of any encoding.

A reader may close the pipe at any time (`fedshot run --json | head -1`). The run still continues to
its end, because its result is written to its folder; nothing more is written to that pipe.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TextIO

_KEPT = "\n\t\N{NO-BREAK SPACE}"
"""The unprintable characters that are safe in a terminal; `printable` replaces all others."""

_ASCII = str.maketrans(
    {
        "\N{PLUS-MINUS SIGN}": "+/-",
        "\N{MINUS SIGN}": "-",
        "\N{BOX DRAWINGS LIGHT HORIZONTAL}": "-",
        "\N{BOX DRAWINGS HEAVY HORIZONTAL}": "-",
        "\N{HORIZONTAL ELLIPSIS}": "...",
        "\N{RIGHTWARDS ARROW}": "->",
        "\N{MULTIPLICATION SIGN}": "x",
        "\N{NO-BREAK SPACE}": " ",
        "\N{REPLACEMENT CHARACTER}": "?",
    }
)
"""Replacements for characters that an encoding lacks; all others become escapes such as \\u0142."""


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_ASCII)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error("fedshot.ascii", _in_ascii)


def print_in_any_encoding() -> None:
    """Make stdout and stderr accept every character, whatever their encoding.

    An error handler that the user chose with PYTHONIOENCODING, such as `ascii:replace`, is kept.
    """
    for stream in (sys.stdout, sys.stderr):
        usual = getattr(stream, "errors", "") in ("strict", "surrogateescape", "backslashreplace")
        unicode = (getattr(stream, "encoding", "") or "").lower().startswith("utf")
        if usual and not unicode and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="fedshot.ascii")


def say(text: str) -> None:
    """Print to stdout and flush."""
    _write(sys.stdout, text)


LEVELS = ("debug", "info", "warning", "error")
_log = {"level": "info", "format": "text"}


class LogLine(str):
    """A line of the log with a level of `LEVELS`; a plain string has the level "info"."""

    level = "info"


def at_level(level: str, text: str) -> LogLine:
    """Return a line of the log with this level."""
    line = LogLine(text)
    line.level = level
    return line


def warning(text: str) -> LogLine:
    """Return a line of the log with the level "warning"."""
    return at_level("warning", text)


def set_log(level: str = "info", format: str = "text") -> None:
    """Let `tell` drop lines below a level of `LEVELS`, and print "text" or "json"."""
    _log.update(level=level, format=format)


def logs_json() -> bool:
    """Whether `tell` prints JSON."""
    return _log["format"] == "json"


def tell(text: str) -> None:
    """Print to stderr and flush, as `set_log` has chosen."""
    level = text.level if isinstance(text, LogLine) else "info"
    if LEVELS.index(level) < LEVELS.index(_log["level"]):
        return
    if logs_json():
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        text = json.dumps({"time": now, "level": level, "message": text.strip()})
    _write(sys.stderr, text)


class StderrHandler(logging.Handler):
    """Prints what is logged with `tell`, with its level."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        level = record.levelname.lower().replace("critical", "error")
        tell(at_level(level, record.getMessage()))


@contextlib.contextmanager
def log_shown(*, quiet: bool = False) -> Iterator[None]:
    """Print on stderr what fedshot logs in this context, such as the progress of an encoder.

    With `quiet`, nothing is printed.
    """
    log = logging.getLogger("fedshot")
    handler = logging.NullHandler() if quiet else StderrHandler()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # the parent process closed it
        return
    if stream is sys.stderr or stream.isatty():
        text = printable(text)
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, "standard output") from None
        # Otherwise Python would raise again at exit, when it flushes the buffer.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(text: str) -> str:
    """Replace control characters by U+FFFD: names in data may hold terminal escape sequences."""
    return "".join(
        c if c.isprintable() or c in _KEPT else "\N{REPLACEMENT CHARACTER}" for c in text
    )
