"""What tests that make Flower's messages share."""

from __future__ import annotations

import pytest


@pytest.fixture
def flower_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes messages only in a process that has a run."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("run_id", "task_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1, raising=False)
