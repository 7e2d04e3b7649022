"""Metrics and the health check, over HTTP, read with the parser of Prometheus' client."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `flower` is not installed")
from prometheus_client.parser import text_string_to_metric_families

from deploy.test_fleet import HOMES, METHOD, Net, on
from fedshot.cli.main import main
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.deploy.flower import local, metrics
from fedshot.deploy.flower.keys import make_server_keys
from fedshot.deploy.flower.messages import WireMessage
from fedshot.deploy.flower.metrics import NodeMetrics, RunMetrics, ServerMetrics, serving
from fedshot.deploy.flower.processes import Children
from fedshot.deploy.flower.server_folder import ServerFolder, free_port
from fedshot.fleets.guard import Guard
from fedshot.protocol.clients import Clients
from fedshot.runs.recorder import Record

pytestmark = pytest.mark.flower


def read(port: int, path: str) -> tuple[int, str]:
    """Return the status and the text of a page."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scraped(made: metrics.Metrics) -> dict[str, float]:
    """Return the samples of a process by name and labels, as Prometheus reads them."""
    port = free_port()
    with serving(f"127.0.0.1:{port}", made, print):
        status, text = read(port, "/metrics")
    assert status == 200
    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_run_counts_what_it_asked_and_what_came_back(tmp_path: Path) -> None:
    net = Net(tmp_path)
    remote = on(net)
    net.mute.add(2)
    experiment: Any = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(rounds=9)), round=0, fleet=Guard(remote)
    )
    made = RunMetrics()
    made.watch(experiment, remote)
    clients = Clients(experiment.fleet, range(6), cohort=None, quorum=0.1, round=1)
    METHOD.round(METHOD.init(Key(0)), clients, Key(1))
    made.record(Record(1, validation=SimpleNamespace(accuracy=0.625)))  # type: ignore[arg-type]
    made.record(Record(2, skipped="too few replies"))
    found = scraped(made)
    late = 2 * len(HOMES[2])  # of two exchanges
    assert found["fedshot_clients_asked_total"] == 12
    assert found["fedshot_client_replies_totallate"] == late
    assert found["fedshot_client_replies_totalanswered"] == 12 - late
    assert found["fedshot_exchange_seconds_count"] == 2
    assert found["fedshot_connected_nodes"] == 3
    assert found["fedshot_sent_bytes_total"] > found["fedshot_received_bytes_total"] / 9 > 0
    assert found["fedshot_validation_accuracy_ratio"] == 0.625
    assert (found["fedshot_round"], found["fedshot_planned_rounds"]) == (2, 9)
    assert found["fedshot_rounds_totaltrained"] == found["fedshot_rounds_totalskipped"] == 1
    assert found["process_resident_memory_bytes"] > 0


def test_a_node_counts_its_messages_and_is_ready_while_connected() -> None:
    made = NodeMetrics(5)
    port = free_port()
    with serving(f"127.0.0.1:{port}", made, print):
        assert read(port, "/healthz") == (503, "not ready: it is starting\n")
        made.connected(True)
        assert read(port, "/healthz") == (200, "ready\n")
        made.connected(False)
        assert read(port, "/healthz")[0] == 503
        assert read(port, "/else")[0] == 404
    made.handled(100, WireMessage({"seconds": 0.5}, {"c1": b"1234567"}))
    made.handled(50, WireMessage({"refused": "it is 9 s old: hospital-a"}))
    found = scraped(made)
    assert found["fedshot_clients"] == 5
    assert found["fedshot_messages_totalanswered"] == found["fedshot_messages_totalrefused"] == 1
    assert (found["fedshot_received_bytes_total"], found["fedshot_sent_bytes_total"]) == (150, 7)


def test_a_server_counts_its_nodes_and_is_not_ready_without_its_superlink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_server_keys(tmp_path, ["127.0.0.1"], days=10)
    operator = SimpleNamespace(ready=lambda: True, statuses=lambda: ["online", "offline", "online"])
    monkeypatch.setattr(metrics, "operator_of", lambda _: operator)
    child: Any = SimpleNamespace(ended=False, process=SimpleNamespace(pid="self"))
    made = ServerMetrics(ServerFolder(tmp_path))
    assert made.check() == "it is starting"
    made.watch(child)
    assert made.check() == ""
    found = scraped(made)
    assert (found["fedshot_nodesconnected"], found["fedshot_nodesaway"]) == (2, 1)
    left = found["fedshot_certificate_expiry_timestamp_seconds"]
    started = found["process_start_time_seconds"]
    assert 9 * 86400 < left - started < 11 * 86400
    assert found["fedshot_superlink_process_resident_memory_bytes"] > 0
    child.ended = True
    assert made.check() == "the SuperLink has ended"


def test_an_address_that_others_reach_is_warned_of() -> None:
    said: list[str] = []
    with serving(f"0.0.0.0:{free_port()}", NodeMetrics(1), said.append):
        pass
    assert len(said) == 1
    assert "everyone who reaches this address can read the metrics" in said[0]


def test_a_port_that_is_taken_is_refused() -> None:
    port = free_port()
    with (
        serving(f"127.0.0.1:{port}", NodeMetrics(1), print),
        pytest.raises(ConfigError, match="no server can listen"),
        serving(f"127.0.0.1:{port}", NodeMetrics(1), print),
    ):
        pass


@pytest.mark.parametrize("action", ["server", "up"])
def test_a_taken_port_starts_nothing(
    action: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(Children, "start", lambda *words, **_: started.append(words))
    port = free_port()
    at = {
        "server": ["--insecure", "--folder", str(tmp_path / "server")],
        "up": ["--data.name", "digits", "--out", str(tmp_path)],
    }
    with serving(f"127.0.0.1:{port}", NodeMetrics(1), print):
        words = ["flower", action, *at[action], "--metrics", f"127.0.0.1:{port}"]
        assert main(words) == 2
    assert not started
    assert "in use. Choose another --metrics" in capsys.readouterr().err
    assert not list(tmp_path.rglob("server.json"))


def test_metrics_without_their_package_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All else of `fedshot flower` works without it."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setattr(
        local, "start_server", lambda *_, **__: SimpleNamespace(ended=True, tail="")
    )
    words = ["flower", "server", "--insecure", "--folder", str(tmp_path / "server")]
    assert main(words) == 1
    assert main([*words, "--metrics", "127.0.0.1:9464"]) == 2
    assert "--metrics needs prometheus_client, which is not installed" in capsys.readouterr().err
    assert main([*words, "--metrics", "9464"]) == 2
