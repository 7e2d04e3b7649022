"""What a case of the benchmark is given and what it hands back."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Options:
    """How to measure: how often, whether next to nothing, and a folder to write in."""

    repeats: int
    quick: bool
    folder: Path


@dataclass
class Result:
    """What a case found.

    Args:
        what: the work, in words.
        rows: of the table, each by column.
        checks: what was compared first, and the largest relative difference.
        left_out: who could not take part, and why.
        notes: what a reader should know.
    """

    what: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """One section of the results."""

    name: str
    run: Callable[[Options], Result]


class UnequalError(Exception):
    """Two contestants do not do the same work."""


def agree(checks: dict[str, float], of: str, difference: float, tolerance: float) -> None:
    """Note a difference; raise UnequalError when it is too large for the work to be the same."""
    checks[of] = float(f"{difference:.2g}")
    if not difference <= tolerance:
        raise UnequalError(f"{of}: the updates differ by {difference:.2g}, more than {tolerance}")


def peak() -> int:
    """Return the most memory that this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def add_row(result: Result, who: str, script: str, *words: str) -> None:
    """Run a script in a process of its own; it prints a row of the result, or `who` is left out."""
    command = [sys.executable, script, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        result.left_out[who] = lines[-1] if lines else "no answer"
    else:
        result.rows.append(json.loads(done.stdout))
