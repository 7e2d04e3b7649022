"""What fedshot says to a person whose request cannot be met.

Each message names the offending value, what was expected, and the usual fix. The command line
prints it without a traceback and exits with code 2, or 75 where the reason may pass. Anything else
that is raised is a bug.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FEW = 12  # options that a message still lists


class FedshotError(Exception):
    """A request that cannot be met, told for the person who made it.

    `passing` are those of which the reason may be gone when the same is asked again later.
    """

    passing = False


class ConfigError(FedshotError):
    """An option that does not exist, or a value that an option does not take."""


class DataError(FedshotError):
    """Data that is missing, unreadable, or too small for what was asked of it."""


class InputError(DataError, ValueError):
    """Examples or labels that a classifier cannot take; scikit-learn expects a ValueError."""


class CheckpointError(FedshotError):
    """A checkpoint that is missing, damaged, or of another run."""


class BusyError(CheckpointError):
    """A folder in which another process is at work."""

    passing = True


class BuildError(FedshotError):
    """C kernels that a compiler was killed over, or had no memory, disk or time for.

    Not passing: where the machine never has enough, a supervisor would start the run for ever.
    """


class QuorumError(FedshotError):
    """Too few clients gave a usable reply for the round to count.

    `told` is what happened, without what to do about it.
    """

    passing = True

    def __init__(self, told: str, fix: str = "") -> None:
        super().__init__(f"{told} {fix}".rstrip())
        self.told = told


class DivergenceError(QuorumError):
    """Too few clients gave a usable reply, most of them for values not finite or too large."""

    passing = False


class ServerGoneError(FedshotError):
    """A server that does not answer, or not any more."""

    passing = True


class AbsentError(FedshotError):
    """Clients that no host answers for."""

    passing = True


class MethodError(FedshotError, ValueError):
    """A method that does not do what the protocol asks of it, told for its author."""


def check_word(name: str, value: str, valid: Iterable[str]) -> None:
    """Raise ConfigError unless an option's value is one of the words it takes."""
    options = list(valid)
    if value not in options:
        raise ConfigError(f"{name} is {value!r}. {nearest(str(value), options)}")


def check_kind(name: str, value: Any, kind: type[Any], fix: str) -> None:
    """Raise ConfigError unless an argument is of a kind; `fix` is a sentence."""
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name} is {_shown(value)}; expected an object of type {kind.__name__}. {fix}"
        )


def as_path(name: str, value: Any) -> Path:
    """Return the path that an argument names. Raises ConfigError for what is none."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise ConfigError(
            f"{name} is {_shown(value)}; expected a path as text or a pathlib.Path, such as "
            "'runs/digits'."
        )
    return Path(value)


def _shown(value: Any) -> str:
    text = repr(value)
    short = isinstance(value, str | bytes | int | float | None) and len(text) <= 60
    return text if short else f"a {type(value).__name__}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a sentence that names the closest of `valid`, and all of them where they are few."""
    options = sorted(valid)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}?" if close else ""
    listed = "" if close and len(options) > FEW else f"Valid: {', '.join(options)}."
    return f"{hint} {listed}".strip()
