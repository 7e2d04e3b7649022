"""Where a figure comes from: the commit of the code and the kind of machine."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from fedshot import __version__
from fedshot.core import records, storage
from fedshot.core.errors import CheckpointError
from fedshot.methods import user_methods
from fedshot.runs import recorder


class _MachineNote(TypedDict):
    machine: str
    cores: int | None
    torch: str
    processor: NotRequired[str]
    kernels: NotRequired[str]


class TrainedPart(TypedDict):
    """A part of a run's history, as files hold it: which code trained it, and where."""

    after_round: int
    commit: str
    code: NotRequired[str]
    machine: _MachineNote


def revision(method: str = "") -> str:
    """Return the commit of the code; before it the file of a method of one's own, and its hash."""
    return _with_file(method, _commit())


def code(method: str = "") -> str:
    """Return what names the code itself: commits that change other files have the same."""
    return _with_file(method, _code())


def versions(parts: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return by which versions of the code some parts of runs' histories are.

    Older parts tell the commit alone, which is a version of its own unless another part tells its
    code.
    """
    held = list(parts)
    codes = {part["commit"]: part["code"] for part in held if "code" in part}
    return {str(codes.get(part["commit"], part["commit"])) for part in held}


def _with_file(method: str, name: str) -> str:
    file, _, digest = user_methods.fingerprint(method).rpartition(" ")
    return f"{file} {digest[:12]} on {name}" if file else name


@cache
def _commit() -> str:
    """Return the commit of the code, "+" behind it when files differ from it, else the version."""
    folder = Path(__file__).resolve().parents[3]
    if not (folder / ".git").exists():
        return f"version {__version__}"
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return f"version {__version__}"
    changed = _git(folder, "status", "--porcelain", "--", "src")
    return commit[:12] + ("" if changed == "" else "+")  # unknown counts as changed


@cache
def _code() -> str:
    """Return the hash of the package's folder as of the commit, "+" behind it as `_commit` has."""
    commit = _commit()
    if commit.startswith("version "):
        return commit
    tree = _git(Path(__file__).resolve().parents[3], "rev-parse", "HEAD:src")
    return commit if tree is None else tree[:12] + ("+" if commit.endswith("+") else "")


def machine() -> dict[str, Any]:
    """Return what the bits of a result depend on, and what its seconds do; no names of hosts."""
    return recorder.environment() | {"processor": _processor()}


def kind(found: dict[str, Any]) -> str:
    """Return a machine in a few words."""
    processor = found.get("processor", found["machine"])
    kernels = "" if found.get("kernels", "compiled") == "compiled" else ", without the C kernels"
    return f"{found['cores']} cores of {processor}, torch {found['torch']}{kernels}"


def kinds(parts: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the kinds of machine of some parts of runs' histories."""
    return {kind(part["machine"]) for part in parts}


def note(folder: Path, round: int, here: dict[str, Any]) -> list[dict[str, Any]]:
    """Keep in a run's folder who trains it from a round on; return all who ever did."""
    path = folder / "trained_by.json"
    try:
        held = records.read(path, list[TrainedPart]) if path.exists() else []
    except CheckpointError:
        held = [{"after_round": 0, "commit": "unknown", "machine": here["machine"]}]
    if not held and round >= 0:
        held = [{"after_round": -1, "commit": "unknown", "machine": here["machine"]}]
    if not held or len(versions([held[-1], here])) > 1 or held[-1]["machine"] != here["machine"]:
        held.append({"after_round": round, **here})
        folder.mkdir(parents=True, exist_ok=True)
        storage.write_bytes(path, f"{json.dumps(held, indent=1)}\n".encode(), sync=True)
    return held


def history(folder: Path) -> list[dict[str, Any]]:
    """Return who trained the run of a folder."""
    found: list[dict[str, Any]] = records.read(folder / "trained_by.json", list[TrainedPart])
    return found


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
