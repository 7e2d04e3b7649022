"""What a tracker must remember of a run, kept beside its records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshot.core import records, storage

PROJECT = "fedshot"
MARK = "cost/megabytes_down"  # every round has it


def result_name(values: Mapping[str, float]) -> str:
    """Return what the test's accuracy is called among its figures, honest or not."""
    return next(name for name in values if name.endswith("test/accuracy"))


def noted(path: Path) -> dict[str, Any]:
    """Return what was written; `{}` when nothing was."""
    if not path.exists():
        return {}
    found: dict[str, Any] = records.read(
        path, dict[str, Any], "Remove it to begin a new tracked run"
    )
    return found


def note(path: Path, content: Mapping[str, Any]) -> None:
    """Replace what was written, in one step."""
    storage.write_bytes(path, json.dumps(content).encode(), sync=False)
