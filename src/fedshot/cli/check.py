"""The command `fedshot check`: tests whether a user's method behaves as every method must."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from fedshot.config import load
from fedshot.config.load import Config
from fedshot.conformance import checks
from fedshot.conformance.small import CLASSES, CLIENTS, SHAPE
from fedshot.core.console import say, tell
from fedshot.core.errors import ConfigError, FedshotError
from fedshot.core.machine import arithmetic
from fedshot.core.regular_files import real_path
from fedshot.core.text import count, joined
from fedshot.methods import user_methods
from fedshot.protocol.method import Method

FAILED = 1
_OPEN = ("method", "model", "episode")  # sections that can be set
_SMALL: dict[str, Any] = {
    "data": {"name": "digits"},
    "episode": {"way": 3, "shot": 1, "query": 2},
    "model": {"backbone": {"name": "conv4", "width": 16, "dropout": 0.1}},
}


def check(options: argparse.Namespace) -> int:
    """Check the methods that a file registers; print a line per check; return 1 if any fails."""
    names = user_methods.load_file(str(options.file), "fedshot check")
    if not names:
        raise ConfigError(f"{options.file} registers no method. Put @register above its class.")
    methods = [_made(name, options.settings) for name in names]
    failed = sum(_check(method, real_path(Path(options.file))) for method in methods)
    tell(f"{count(failed, 'check')} failed" if failed else "all checks passed")
    return FAILED if failed else 0


def _made(name: str, words: list[str]) -> Method[Any]:
    """Return the method `name` for the checks' small dataset; `words` are command-line settings."""
    small = _SMALL | {"method": {"name": name}}
    settings, _ = load.override(small, words)
    if settings["method"]["name"] != name:
        raise ConfigError(
            f"method.name is {settings['method']['name']!r}, and the file registers {name!r}. "
            "Leave it out."
        )
    others = [key for key in settings if key not in _OPEN and settings[key] != small.get(key)]
    if others:
        raise ConfigError(
            f"{others[0]} cannot be set: the check has small data and rounds of its own. Only "
            f"options of {joined(_OPEN)} can be given."
        )
    chosen = Config.of(settings)
    return chosen.method(chosen.model.of(SHAPE, None), tuple(range(CLASSES)), CLIENTS)


def _check(method: Method[Any], file: Path) -> int:
    """Print the outcome of each check of a method; return how many failed."""

    def explain(error: BaseException) -> str:
        kind, text = type(error).__name__, str(error)
        said = text if text and isinstance(error, FedshotError) else f"{kind}: {text}".rstrip(": ")
        line = user_methods.where(error, file)
        return f"{said}{f' ({file.name}{line})' if line else ''}"

    failed = 0
    with tempfile.TemporaryDirectory() as place, arithmetic(1):
        outcomes = checks.check(method, lambda: Path(tempfile.mkdtemp(dir=place)), explain)
        for name, reason in outcomes:
            failed += bool(reason)
            say(f"{method.name}: {'fail' if reason else 'pass'}: {name}"
                + (f": {reason}" if reason else ""))  # fmt: skip
    return failed
