"""Provenance of a result: the version of the code and the kind of machine that trained it."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NotRequired

import torch
from typing_extensions import TypedDict

from fedshot import __version__
from fedshot.core import records, storage
from fedshot.core.devices import CPU, described
from fedshot.core.errors import CheckpointError
from fedshot.methods import user_methods
from fedshot.runs import recorder

_ROOT = Path(__file__).resolve().parents[3]
_FILE = "trained_by.json"


class _MachineNote(TypedDict):
    machine: str
    cores: int | None
    torch: str
    processor: str
    kernels: str
    gpus: NotRequired[list[str]]


class TrainedPart(TypedDict):
    """The code and the machine that trained the rounds of a run after round `after_round`."""

    after_round: int
    commit: str
    code: str
    machine: _MachineNote


def versions(parts: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the versions of the code recorded in parts of run histories."""
    return {str(part["code"]) for part in parts}


def _with_file(method: str, name: str) -> str:
    file, _, digest = user_methods.fingerprint(method).rpartition(" ")
    return f"{file} {digest[:12]} on {name}" if file else name


@cache
def revision() -> str:
    """Return fedshot's commit, with "+" if there are uncommitted changes; else its version."""
    commit = _git("rev-parse", "HEAD") if (_ROOT / ".git").exists() else None
    if commit is None:
        return f"version {__version__}"
    changed = _git("status", "--porcelain", "--", "src")
    return commit[:12] + ("" if changed == "" else "+")  # None counts as a change


@cache
def _code() -> str:
    """Return the revision with the hash of `src`, equal for commits with the same source."""
    commit = revision()
    if commit.startswith("version "):
        return commit
    folder = _git("rev-parse", "HEAD:src")
    return commit if folder is None else folder[:12] + ("+" if commit.endswith("+") else "")


def machine(devices: Sequence[torch.device] = (CPU,)) -> dict[str, Any]:
    """Return the properties of this machine that affect results or times, without its hostname."""
    gpus = [] if devices == (CPU,) else described(devices)
    found = recorder.environment() | {"processor": _processor()}
    return found | ({"gpus": gpus} if gpus else {})


def here(method: str, devices: Sequence[torch.device] = (CPU,)) -> dict[str, Any]:
    """Return the code version and the machine, for a run's history.

    For a user's method, the version includes the name and hash of the method's file.
    """
    return {
        "commit": _with_file(method, revision()),
        "code": _with_file(method, _code()),
        "machine": machine(devices),
    }


def kinds(parts: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return descriptions of the kinds of machine recorded in parts of run histories."""
    return {_kind(part["machine"]) for part in parts}


def _kind(found: Mapping[str, Any]) -> str:
    kernels = "" if found["kernels"] == "compiled" else ", without the C kernels"
    if found.get("gpus"):
        return f"{' and '.join(found['gpus'])}, torch {found['torch']}"
    return f"{found['cores']} cores of {found['processor']}, torch {found['torch']}{kernels}"


def note(folder: Path, round: int, here: dict[str, Any]) -> list[dict[str, Any]]:
    """Record the code and machine (`here`) that train a run after `round`; return the history."""
    path = folder / _FILE
    unknown = {"commit": "unknown", "code": "unknown", "machine": here["machine"]}
    try:
        held = history(folder) if path.exists() else []
    except CheckpointError:
        held = [{"after_round": 0, **unknown}]
    if not held and round >= 0:
        held = [{"after_round": -1, **unknown}]
    if not held or len(versions([held[-1], here])) > 1 or held[-1]["machine"] != here["machine"]:
        held.append({"after_round": round, **here})
        folder.mkdir(parents=True, exist_ok=True)
        storage.write_bytes(path, f"{json.dumps(held, indent=1)}\n".encode(), sync=True)
    return held


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the history of the run in a folder: the parts of its training, in order."""
    found: list[dict[str, Any]] = records.read(folder / _FILE, list[TrainedPart])
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _git(*words: str) -> str | None:
    command = ["git", "-C", str(_ROOT), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
