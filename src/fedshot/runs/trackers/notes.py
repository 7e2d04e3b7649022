"""Notes: JSON files in a run's folder in which trackers store the id of their run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshot.core import records, storage

PROJECT = "fedshot"
MARK = "cost/megabytes_down"  # a metric of every round


def result_name(values: Mapping[str, float]) -> str:
    """Return the name test/accuracy in `values`, which may have NOT_HONEST/ before it."""
    return next(name for name in values if name.endswith("test/accuracy"))


def noted(path: Path) -> dict[str, Any]:
    """Return the content of a note; `{}` if it does not exist."""
    if not path.exists():
        return {}
    found: dict[str, Any] = records.read(
        path, dict[str, Any], "Delete it to start a new tracked run"
    )
    return found


def note(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a note atomically."""
    storage.write_bytes(path, json.dumps(content).encode(), sync=False)
