"""A node with workers, metrics and a log in JSON, and replies in several messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.test_metrics import read

from .local_federation import LocalFederation, alone, own_port, until, weights


def test_a_node_with_two_workers_and_metrics_trains_to_the_same_bits(
    federation: LocalFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedshot.deploy.flower import fleet, local

    monkeypatch.setattr(fleet, "_MAX_REPLY", 1)  # each client in a message of its own
    port, change = own_port(), {"run": {"rounds": 2, "cohort": None}}
    usual = local.node_command
    more = ["--workers", "2", "--metrics", f"127.0.0.1:{port}", "--log-format", "json"]
    try:
        monkeypatch.setattr(local, "node_command", lambda *words: [*usual(*words), *more])
        restart(federation)
        with federation.experiment(change) as there:
            list(there.run())
            folder = there.folder
        assert weights(folder) == weights(alone(tmp_path / "run", change).folder)
        assert read(port, "/healthz") == (200, "ready\n")
        _, text = read(port, "/metrics")
        answered = text.partition('fedshot_messages_total{outcome="answered"} ')[2].split()[0]
        assert float(answered) >= 1 + 2 * 2, "a greeting, and two clients in two rounds"
        line = json.loads(federation.child("node-1").tail.splitlines()[-1])
        assert (line["level"], line["message"].split()[0]) == ("info", "connected")
    finally:
        monkeypatch.setattr(local, "node_command", usual)
        restart(federation)


def restart(federation: LocalFederation) -> None:
    """Stop node-1, and start it again."""
    federation.child("node-1").stop()
    log = federation.child("node-1").log
    before = log.read_text().count("connected to")
    federation.start_node(1)
    until(lambda: log.read_text().count("connected to") > before, "the node")
