"""Formatting: untrusted text made safe to print, and numbers for tables."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path


def printable(text: object) -> str:
    """Return the text on one line, without control characters or lone surrogates.

    Class names come from folder names, so they may hold anything: an escape sequence would
    recolour a terminal, and a lone surrogate cannot be encoded as UTF-8.
    """
    line = " ".join(str(text).split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def spelling(text: str) -> str:
    """Normalise a text: Unicode NFC, with single blanks.

    >>> spelling(" cafe\\u0301  noir") == "caf\\u00e9 noir"
    True
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def spelt_alike(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the first two different names with the same `spelling`; None if all differ."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(spelling(name), name)
        if other != name:
            return other, name
    return None


def shortened(text: object, length: int) -> str:
    """Return the printable text, cut to `length` characters with an ellipsis."""
    shown = printable(text)
    return shown if len(shown) <= length else shown[: length - 1].rstrip() + "…"


def other_kinds(paths: Iterable[Path], what: str) -> str:
    """Describe files of unsupported types; `what` says what was done with them.

    Returns "" if there are none.

    >>> other_kinds([Path("a.heic"), Path("b.HEIC"), Path("c")], "left out")
    '3 files of other kinds left out (.heic 2, no suffix 1)'
    """
    kinds = Counter(path.suffix.lower() or "no suffix" for path in paths)
    if not kinds:
        return ""
    shown = ", ".join(f"{printable(kind)} {n}" for kind, n in kinds.most_common(4))
    more = ", ..." if len(kinds) > 4 else ""
    return f"{count(kinds.total(), 'file')} of other kinds {what} ({shown}{more})"


def percent(accuracy: float, interval: float) -> str:
    """Format an accuracy and its interval, both in [0, 1], in percent, e.g. "57.64 ± 1.74".

    An interval of 0 is shown as "?": it comes from equal values, which tell nothing about spread.
    """
    return f"{100 * accuracy:.2f} ± {_half(interval)}"


def points(difference: float, interval: float) -> str:
    """Format a difference of two accuracies in [0, 1] in points, e.g. "+1.20 ± 0.40 points"."""
    return f"{signed(100 * difference)} ± {_half(interval)} points"


def signed(number: float) -> str:
    """Return a number with its sign and two decimals, e.g. "+1.20"."""
    sign = "\N{MINUS SIGN}" if number < 0 else "+"
    return f"{sign}{abs(number):.2f}"


def _half(interval: float) -> str:
    return f"{100 * interval:.2f}" if interval else "?"


def megabytes(n: int) -> str:
    """Format a number of bytes in MB (10^6 bytes), without the unit."""
    return _amount(n / 1e6)


def seconds(s: float) -> str:
    """Format a number of seconds with about three digits, without the unit."""
    return _amount(s)


def duration(s: float) -> str:
    """Format a number of seconds in a unit that suits its size.

    >>> [duration(s) for s in (0.04, 7.25, 59.7, 200, 7000, 86400 * 3.5)]
    ['0.04 s', '7.2 s', '60 s', '3.3 min', '1.9 h', '3.5 d']
    """
    if s < 1:
        return f"{s:.2f} s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if s >= 1.5 * size:
            return f"{s / size:.{int(s < 10 * size)}f} {unit}"
    return f"{s:.{int(s < 10)}f} s"


def _amount(value: float) -> str:
    if value == 0:
        return "0"
    if value < 0.01:
        return "<0.01"
    return f"{value:,.0f}" if value >= 999.95 else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def count(n: int, one: str, many: str | None = None) -> str:
    """Return e.g. "1 seed" or "3 seeds"."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def natural(text: str) -> int | None:
    """Return the number that 1 to 18 decimal digits of ASCII stand for; None for other text."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def named_client(client: int, names: Sequence[str]) -> str:
    """Return a client's number, with its name if it has one, such as "3 (hospital b)"."""
    return f"{client} ({printable(names[client])})" if client < len(names) else str(client)


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text.

    >>> ranges([7, 0, 1, 2])
    '0-2, 7'
    """
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def typed(path: Path | str) -> str:
    """Return a path as it is typed in a command.

    >>> typed(Path("my runs/a")), typed(Path("-runs/a"))
    ("'my runs/a'", './-runs/a')
    """
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def long_names(text: str) -> list[str]:
    """Return the long options in a help text, sorted.

    >>> long_names("usage: show [--out OUT] [--data-dir DIR]")
    ['--data-dir', '--out']
    """
    return sorted(set(re.findall(r"--[a-z][a-z-]*", text)))


def distinct(texts: Iterable[str]) -> list[str]:
    """Return the texts, with a number after each that occurs again.

    >>> distinct(["a", "b", "a"])
    ['a', 'b', 'a (2)']
    """
    found: dict[str, None] = {}
    times = Counter[str]()
    for text in texts:
        one = text
        while one in found:
            times[text] += 1
            one = f"{text} ({times[text] + 1})"
        found[one] = None
    return list(found)


def joined(words: Sequence[str], last: str = "and") -> str:
    """Return e.g. "a, b and c"."""
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
