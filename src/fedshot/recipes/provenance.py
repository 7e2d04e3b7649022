"""Where a figure comes from: the commit of the code and the kind of machine."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from fedshot import __version__, recorder


@cache
def revision() -> str:
    """Return the commit of the code, "+" behind it when files differ from it, else the version."""
    folder = Path(__file__).resolve().parents[3]
    if not (folder / ".git").exists():
        return f"version {__version__}"
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return f"version {__version__}"
    changed = _git(folder, "status", "--porcelain", "--", "src")
    return commit[:12] + ("+" if changed else "")


def machine() -> dict[str, Any]:
    """Return what the bits of a result depend on, and what its seconds do; no names of hosts."""
    return recorder.environment() | {"processor": _processor()}


def kind(found: dict[str, Any]) -> str:
    """Return a machine in a few words."""
    processor = found.get("processor", found["machine"])
    return f"{found['cores']} cores of {processor}, torch {found['torch']}"


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two machines are expected to give the same last digit."""
    names = ("torch", "numpy", "processor", "cpu_capability", "kernels")
    return all(one.get(name) == other.get(name) for name in names)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
