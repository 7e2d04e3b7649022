"""A supervisor has one command, which begins a run or goes on with it."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedshot.cli.main import main
from fedshot.core import kernel_build, storage
from fedshot.core.locks import only_one
from fedshot.runs.experiment import Experiment
from fedshot.runs.recorder import Record

from .conftest import Trained
from .runs import CHOOSING, experiment, finished, last_hash, line, merged, run_words


def words(tmp_path: Path, *changes: dict[str, Any]) -> list[str]:
    """Write the configuration and return what a supervisor starts."""
    return [*run_words(tmp_path, *changes), "--resume", "--json"]


@pytest.mark.slow
def test_one_command_begins_goes_on_and_ends_in_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = merged(CHOOSING, {"run": {"rounds": 40}, "method": {"local_steps": 10}})
    whole = finished(tmp_path / "whole", longer)
    command = words(tmp_path, longer)
    with subprocess.Popen(line(*command), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if json.loads(text)["round"] == 3:
                break
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 130
    assert main(command) == 0
    told = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [one["round"] for one in told if "result" not in one][-1] == 40
    assert told[-1]["result"]["per_episode"] == list(whole.result().per_episode)
    folder = tmp_path / "runs" / "small"
    last = "checkpoints/round-000040.safetensors"
    assert (folder / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()
    assert main(command) == 0, "it has ended, and is only tested again"
    again = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert again == told[-1:]


@pytest.mark.slow
def test_visits_that_take_long_do_not_hold_up_the_end(tmp_path: Path) -> None:
    long = {
        "model": {"backbone": {"name": "conv4"}},
        "method": {"local_steps": 10**6},
        "run": {"workers": 2, "threads": 1},
    }
    with subprocess.Popen(
        line(*words(tmp_path, long)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["round"] == 0
        time.sleep(1)  # both have begun
        process.send_signal(signal.SIGTERM)
        process.wait()  # for no visit
        said = process.stderr.read()
    assert process.returncode == 130, said
    assert "stopped; go on with" in said
    assert "Traceback" not in said


def test_a_longer_run_goes_on_and_another_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tmp_path)) == 0
    assert main(words(tmp_path, {"run": {"rounds": 6}})) == 0
    assert experiment(tmp_path / "runs" / "small", {"run": {"rounds": 6}}).round == 6
    before = last_hash(tmp_path / "runs" / "small")
    capsys.readouterr()
    assert main(words(tmp_path, {"method": {"local_steps": 3}})) == 2
    text = capsys.readouterr().err
    assert "started with another configuration: method.local_steps was 2, is 3" in text
    assert main([word for word in words(tmp_path) if word != "--resume"]) == 2
    assert "or `--resume`; or choose another --name" in capsys.readouterr().err
    assert last_hash(tmp_path / "runs" / "small") == before


def test_the_threads_of_its_first_machine_stay(tmp_path: Path) -> None:
    assert main(words(tmp_path, {"run": {"threads": 2}})) == 0
    assert main(words(tmp_path, {"run": {"rounds": 5}})) == 0
    config = yaml.safe_load((tmp_path / "runs" / "small" / "config.yaml").read_text())
    assert (config["run"]["rounds"], config["run"]["threads"]) == (5, 2)


def test_a_run_with_nodes_goes_on_there(
    tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained(tmp_path / "runs" / "small") / "flower.json").write_text("{}")
    assert main(words(tmp_path)) == 2
    assert "are on Flower nodes. Continue it with `fedshot resume" in capsys.readouterr().err


def test_fewer_rounds_than_are_trained_are_no_end(
    tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (trained(tmp_path / "runs" / "small") / "config.yaml").read_text()
    assert main(words(tmp_path, {"run": {"rounds": 3}})) == 2
    assert "has trained 4 rounds, but run.rounds is 3. Set it to 4 or more" in (
        capsys.readouterr().err
    )
    assert (tmp_path / "runs" / "small" / "config.yaml").read_text() == before


def test_what_passes_by_itself_has_a_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    with only_one(folder / ".lock"):
        assert main(words(tmp_path)) == 75
    assert "another process is training" in capsys.readouterr().err
    few = {"run": {"unreliable": {"drop": 1.0}, "below_quorum": "stop"}}
    assert main(words(tmp_path, few)) == 75
    assert "in your own settings, and resume the run" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="no process locks files so there")
def test_a_folder_without_locks_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def refused(handle: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert main(words(tmp_path)) == 0
    assert "has no locks: make sure that no other process" in capsys.readouterr().err


def test_lost_clients_are_told_beside_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"run": {"unreliable": {"drop": 0.3}, "below_quorum": "skip"}}
    assert main(words(tmp_path, few)) == 0
    out, err = capsys.readouterr()
    assert ": lost, dropped by plan" in err
    assert [json.loads(text) for text in out.splitlines()]


def test_what_lost_its_configuration_goes_on_with_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = words(tmp_path, {"run": {"threads": 2}})
    assert main(command) == 0
    held = tmp_path / "runs" / "small" / "config.yaml"
    whole = held.read_text()
    command = words(tmp_path, {"run": {"rounds": 4}})
    for broken in (None, "[", ""):
        held.unlink() if broken is None else held.write_text(broken)
        capsys.readouterr()
        assert main([word for word in command if word != "--resume"]) == 2
        assert "holds a run already" in capsys.readouterr().err
        if broken is None:
            assert main(["resume", str(held.parent)]) == 2
            assert "has lost its config.yaml. Restore it" in capsys.readouterr().err
            assert main(["resume", str(tmp_path / "config.yaml")]) == 2
            assert "config.yaml holds no run" in capsys.readouterr().err
        assert main(command) == 0
        assert held.read_text() == whole


def test_before_the_first_checkpoint_the_facts_are_those_of_the_new_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(self: Experiment, record: Record, seconds: float) -> Record:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "_close", killed)
        with pytest.raises(Killed):
            main(words(tmp_path, CHOOSING))
    other = merged(CHOOSING, {"split": {"base": ["0-3"], "validation": ["4", "5", "6"]},
                              "episode": {"way": 4}})  # fmt: skip
    assert main(words(tmp_path, other)) == 0
    facts = finished(tmp_path / "whole", other).folder / "data.json"
    assert (tmp_path / "runs" / "small" / "data.json").read_text() == facts.read_text()


def test_other_arithmetic_than_before_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(words(tmp_path)) == 0
    monkeypatch.setattr("fedshot.runs.recorder.os.cpu_count", lambda: 77)
    assert main(words(tmp_path, {"run": {"rounds": 5}})) == 0
    assert "results may differ bitwise" not in capsys.readouterr().err
    now = "plain" if kernel_build.kind() == "compiled" else "compiled"
    path = tmp_path / "runs" / "small" / "environment.json"
    path.write_text(path.read_text().replace(f'"{kernel_build.kind()}"', f'"{now}"'))
    assert main(words(tmp_path, {"run": {"rounds": 6}})) == 0
    text = capsys.readouterr().err
    assert "from round 6 on, results may differ bitwise" in text
    assert f"kernels was '{now}', is" in text


def test_a_refused_process_leaves_the_tracker_alone(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object) -> None:
        raise AssertionError("the tracker was opened")

    folder = trained(tmp_path / "runs" / "small")
    monkeypatch.setattr("fedshot.api.training.Tracker", opened)
    with only_one(folder / ".lock"):
        assert main(words(tmp_path, {"run": {"rounds": 6}})) == 75


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/round-000004.safetensors"])
def test_what_may_not_be_read_is_not_called_lost(
    tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, place: str,
) -> None:  # fmt: skip
    folder = trained(tmp_path / "runs" / "small")

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    if place == "checkpoints":  # whoever runs the tests may be root, whom nothing is denied
        monkeypatch.setattr(Path, "iterdir", refused)
    else:
        monkeypatch.setattr(storage, "open_regular", refused)
    assert main(words(tmp_path, {"run": {"rounds": 6}})) == 2
    text = capsys.readouterr().err
    assert f"{folder / place}: Permission denied" in text
    assert "Delete" not in text
