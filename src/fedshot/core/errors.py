"""Errors that tell a user why a request failed.

Each message names the offending value, what was expected, and the usual fix. The command line
prints it without a traceback and exits with code 2, or with 75 if the same command may succeed
later. Any other exception is a bug.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FEW = 12  # a message lists at most this many options


class FedshotError(Exception):
    """A request that cannot be met. `retryable` says whether the same request may succeed later."""

    retryable = False


class ConfigError(FedshotError):
    """An option that does not exist, or a value that is not valid for its option."""


class DataError(FedshotError):
    """Data that is missing, unreadable, or too small for the request."""


class InputError(DataError, ValueError):
    """Examples or labels that a classifier does not accept; scikit-learn expects a ValueError."""


class CheckpointError(FedshotError):
    """A checkpoint that is missing, damaged, or belongs to another run."""


class BusyError(CheckpointError):
    """A folder that another process is using."""

    retryable = True


class BuildError(FedshotError):
    """C kernels not built now: the compiler was killed, or lacked memory, disk or time."""

    retryable = True


class QuorumError(FedshotError):
    """Too few clients sent a usable reply in a round.

    `reason` is the message without the sentences that tell the user what to do.
    """

    retryable = True

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(f"{reason} {fix}".rstrip())
        self.reason = reason


class DivergenceError(QuorumError):
    """Too few usable replies, most of them because values were not finite or too large."""

    retryable = False


class RefusedError(QuorumError):
    """No usable reply: all have parts, weights or metrics of another form than expected."""

    retryable = False


class ServerGoneError(FedshotError):
    """A server that does not answer."""

    retryable = True


class AbsentError(FedshotError):
    """Clients that no connected node hosts."""

    retryable = True


class WorkerError(FedshotError):
    """A worker process that has ended before its work was done."""

    retryable = True


class MethodError(FedshotError, ValueError):
    """A method that breaks the protocol; the message is for its author."""


def check_word(name: str, value: str, valid: Iterable[str]) -> None:
    """Raise ConfigError unless an option's value is one of `valid`."""
    options = list(valid)
    if value not in options:
        raise ConfigError(f"{name} is {value!r}. {nearest(str(value), options)}")


def check_kind(name: str, value: Any, kind: type[Any], fix: str) -> None:
    """Raise ConfigError unless an argument is an instance of `kind`.

    `fix` is a sentence that tells the user how to get an instance.
    """
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name} is {brief(value)}; expected an object of type {kind.__name__}. {fix}"
        )


def as_path(name: str, value: Any) -> Path:
    """Return an argument as a path. Raises ConfigError if it is not one."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise ConfigError(
            f"{name} is {brief(value)}; expected a path as text or a pathlib.Path, such as "
            "'runs/digits'."
        )
    return Path(value)


def as_folder(name: str, value: Any) -> Path:
    """Return an argument as the path of a folder, which need not exist.

    Raises ConfigError if it is not a path, or if it or a folder above it is a file.
    """
    path = as_path(name, value)
    try:
        file = next((one for one in (path, *path.parents) if one.is_file()), None)
    except OSError as error:  # a name that is too long
        raise ConfigError(f"{name} is no path of a folder: {error.strerror}.") from None
    if file is not None:
        raise ConfigError(
            f"{name} is {str(path)!r}, and {file} is a file; expected a folder. Move the file, or "
            "choose another folder."
        )
    return path


def brief(value: Any) -> str:
    """Return a short value as Python writes it; for any other, its type, such as "a list"."""
    text = repr(value)
    short = isinstance(value, str | bytes | int | float | None) and len(text) <= 60
    return text if short else f"a {type(value).__name__}"


def nearest(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """Return a sentence with the word closest to `name`, and all of `valid` if they are few.

    All words begin with `prefix`, which does not count towards how close they are.
    """
    options = sorted(valid)
    words = [option.removeprefix(prefix) for option in options]
    close = difflib.get_close_matches(name.removeprefix(prefix), words, n=1, cutoff=0.5)
    hint = f"Did you mean {prefix + close[0]!r}?" if close else ""
    listed = "" if close and len(options) > FEW else f"Valid: {', '.join(options)}."
    return f"{hint} {listed}".strip()
