"""Text to stdout and stderr, in terminals and pipes of any encoding.

A reader may close the pipe at any time (`fedshot run --json | head -1`). A run goes on to its end
all the same, since its result is in its folder; nothing more is written to that pipe.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from typing import TextIO

_KEPT = "\n\t\N{NO-BREAK SPACE}"
"""What a terminal does no harm with; names from data may hold escape sequences, which do."""

_PLAINLY = str.maketrans(
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
"""What stands for a character that an encoding lacks; others become escapes, as \\u0142."""


def _plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_PLAINLY)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error("fedshot.plainly", _plainly)


def print_in_any_encoding() -> None:
    """Let stdout and stderr take every character, whatever encoding the terminal or pipe has.

    Errors that a person chose by PYTHONIOENCODING, as `ascii:replace`, stay.
    """
    for stream in (sys.stdout, sys.stderr):
        usual = getattr(stream, "errors", "") in ("strict", "surrogateescape", "backslashreplace")
        unicode = (getattr(stream, "encoding", "") or "").lower().startswith("utf")
        if usual and not unicode and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="fedshot.plainly")


def say(text: str) -> None:
    """Print to stdout, at once."""
    _write(sys.stdout, text)


def tell(text: str) -> None:
    """Print to stderr, at once."""
    _write(sys.stderr, text)


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # closed by whoever started the program
        return
    if stream is sys.stderr or stream.isatty():
        text = harmless(text)
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, "standard output") from None
        # What is still in the buffer would raise again when Python ends.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def harmless(text: str) -> str:
    """Return the text without characters that a terminal would obey."""
    return "".join(
        c if c.isprintable() or c in _KEPT else "\N{REPLACEMENT CHARACTER}" for c in text
    )
