"""Promises 2 and 5 on the real thing: nodes and servers that are killed at any instant."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedshot.cli.main import main
from fedshot.runs.checkpoint import Checkpoints

from .local_federation import (
    LONG,
    LocalFederation,
    alone,
    merged,
    newest,
    program,
    setting,
    until,
    weights,
    written,
)

PRIVATE = {"method": {"name": "fsl_local", "learner_name": "proto", "local_steps": 2}}


def test_a_node_killed_in_the_middle_of_a_round_comes_back_with_its_private_state(
    federation: LocalFederation, tmp_path: Path
) -> None:
    """The round closes at its deadline with the others; what the node had half done is dropped."""
    change = merged(PRIVATE, {"run": {"rounds": 6, "cohort": None}})
    with federation.experiment(change, deadline=15.0) as there:
        faults = federation.run_with_killed_node(there)
    assert faults == {(3, 1), (3, 4)}, "node-1 alone is lost, and comes back"
    here = alone(tmp_path / "run", change, faults=faults)
    assert federation.private(there) == newest((here.folder / "clients").glob("*"))


def test_a_server_killed_and_resumed_ends_in_the_same_bits(
    federation: LocalFederation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First the process of the run, then the SuperLink under it; `fedshot resume` after each."""
    change = merged(PRIVATE, {"name": "killed", "run": {"rounds": 14, "validate_every": 50}})
    config, folder = written(tmp_path, change), tmp_path / "runs" / "killed"
    words: list[Any] = ["flower", "run", "--config", config, "--out", tmp_path / "runs",
                        "--folder", federation.home.folder, "--deadline", 60]  # fmt: skip
    for life, reached in enumerate((2, 6)):
        process = program(*words)
        try:
            until_round(folder, reached, process)
            if life:
                restart_server(federation)
                _, err = process.communicate(timeout=LONG)
                assert process.returncode == 75, err
                assert "does not know this run any more" in err
        finally:
            process.kill()
            process.communicate()
        words = ["resume", folder]
    assert main(["resume", str(folder)]) == 0
    assert "on novel classes" in capsys.readouterr().out
    here = alone(tmp_path / "alone", change)
    run = json.loads((folder / "flower.json").read_text())
    states = federation.folder.glob(f"node-*/state/{run['run']}/clients/*")
    assert newest(states) == newest((here.folder / "clients").glob("*"))
    assert weights(folder) == weights(here.folder)
    assert [r["round"] for r in records(folder)] == list(range(15))
    assert not [r["faults"] for r in records(folder) if r["faults"]]


def test_a_private_run_that_is_killed_counts_every_repeated_round(
    federation: LocalFederation, tmp_path: Path
) -> None:
    """Repeated rounds have fresh noise; no crash makes epsilon smaller than without it."""
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    change = {
        "name": "private", "method": {"name": "fl_proto", "local_steps": 20},
        "run": {"rounds": 9, "cohort": None, "validate_every": 50},
        "privacy": {"name": "client", "noise": 2.0, "delta": 0.01},
    }  # fmt: skip
    here = alone(tmp_path / "alone", change)
    undisturbed = [record["epsilon"] for record in here.recorder.records()]
    config, folder = written(tmp_path, change), tmp_path / "runs" / "private"
    words: list[Any] = ["flower", "run", "--config", config, "--out", tmp_path / "runs",
                        "--folder", federation.home.folder, "--deadline", 60]  # fmt: skip
    repeated, expected = 0, list[float]()
    assert here.prepared.privacy is not None
    accountant = here.prepared.privacy.accountant
    for life, reached in enumerate((2, 4, 6)):
        process = program(*words)
        try:
            until_round(folder, reached, process)
            if life % 2:
                restart_server(federation)
                _, err = process.communicate(timeout=LONG)
                assert process.returncode == 75, err
        finally:
            process.kill()
            process.communicate()
        complete = Checkpoints(folder / "checkpoints").rounds()[-1]
        expected += [accountant.epsilon(r + repeated) for r in range(len(expected), complete + 1)]
        begun = json.loads((folder / "privacy.json").read_text())["begun"]
        assert 0 <= begun - complete - repeated <= 1
        repeated = begun - complete
        words = ["resume", folder]
    assert main(["resume", str(folder)]) == 0
    expected += [accountant.epsilon(r + repeated) for r in range(len(expected), 10)]
    assert repeated > 0
    assert [r["epsilon"] for r in records(folder)] == expected
    assert all(e >= least for e, least in zip(expected, undisturbed, strict=True))
    assert json.loads((folder / "result.json").read_text())["privacy"]["epsilon"] == expected[-1]


def restart_server(federation: LocalFederation) -> None:
    """Kill the SuperLink, and start another at its address."""
    from fedshot.core.serialised import LIMITS
    from fedshot.deploy.flower.local import start_server
    from fedshot.deploy.flower.server_folder import split_address

    federation.child("server").process.kill()
    federation.child("server").process.wait()
    host, port = split_address(federation.address())
    log = federation.folder / "logs" / "server.log"
    start_server(federation.children, federation.home, host, port, LIMITS, log=log)


def records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def rounds(folder: Path) -> int:
    """Return the last round that has a record."""
    return max((record["round"] for record in records(folder)), default=-1)


def until_round(folder: Path, round: int, process: subprocess.Popen[str]) -> None:
    """Wait for the record of a round of a run that goes on."""
    until(lambda: rounds(folder) >= round or process.poll() is not None, f"round {round}")
    assert process.poll() is None, process.communicate()


def children_of(pid: int) -> set[int]:
    """Return the processes that a process has started and that still run."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.add(int(path.parent.name))
    return found


def gone(pids: set[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_up_trains_and_takes_everything_down_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its end, on Ctrl-C, and when it is killed; what it began can be gone on with."""
    config = written(tmp_path, merged(PRIVATE, {"name": "up", "run": {"rounds": 400}}))
    folder = tmp_path / "runs" / "up"
    words = ("flower", "up", "--nodes", 1, "--config", config, "--out", tmp_path / "runs")
    for kill, at in ((signal.SIGINT, 2), (signal.SIGKILL, 5)):
        heed = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a child inherits what is ignored
        process = program(*words)
        signal.signal(signal.SIGINT, heed)
        until_round(folder, at, process)
        started = children_of(process.pid)
        assert len(started) == 2, "a server and a node"
        os.kill(process.pid, kill)
        _, err = process.communicate(timeout=LONG)
        until(lambda pids=started: gone(pids), "the children to end")
        if kill == signal.SIGINT:
            assert process.returncode == 130, err
            assert f"o on with `fedshot resume {folder}`" in err
        words = (*words, "--resume")
    settings = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(settings.replace("rounds: 400", "rounds: 8"))
    assert main(["resume", str(folder)]) == 0
    assert "on novel classes" in capsys.readouterr().out
    here = alone(tmp_path / "alone", PRIVATE, {"run": {"rounds": 8}})
    found = newest(folder.glob("flower/node-*/state/*/clients/*"))
    assert found == newest((here.folder / "clients").glob("*"))
    assert not list((folder / "flower").rglob("*.db")), "what nodes send is on no disk"
    logs = {path.name for path in (folder / "flower" / "logs").iterdir()}
    assert logs == {"server.log", "node-0.log"}


def test_a_federation_without_a_run_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken down when its block fails, whatever its processes are."""
    from fedshot.deploy.flower import local

    local.prepare(tmp_path, setting(), 2)
    idle = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(local.ServerFolder, "command", lambda *_, **__: idle)
    monkeypatch.setattr(local, "node_command", lambda *_: idle)
    operator = SimpleNamespace(ready=lambda: True, register=lambda _: ())
    monkeypatch.setattr(local, "operator_of", lambda _: operator)
    with (
        suppress(KeyboardInterrupt),
        local.federation(tmp_path, 2, lambda _: None) as (_, children),
    ):
        children.check()
        started = {child.process.pid for child in children.all}
        assert started <= children_of(os.getpid())
        assert len(started) == 3, "a server and two nodes"
        raise KeyboardInterrupt
    assert gone(started)
