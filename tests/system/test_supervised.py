"""A supervisor has one command, which begins a run or goes on with it."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedshot.cli import main

from .runs import CHOOSING, SMALL, experiment, finished, last_hash, line, merged


def words(tmp_path: Path, *changes: dict[str, Any]) -> list[str]:
    """Write the configuration and return what a supervisor starts."""
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(merged(SMALL, *changes)), encoding="utf-8")
    return ["run", "--config", str(config), "--out", str(tmp_path / "runs"), "--resume", "--json"]


def test_one_command_begins_goes_on_and_ends_in_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = merged(CHOOSING, {"run": {"rounds": 40}, "method": {"local_steps": 10}})
    whole = finished(tmp_path / "whole", longer)
    command = words(tmp_path, longer)
    for at in (3, 17):
        with subprocess.Popen(line(*command), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for text in process.stdout:
                if json.loads(text)["round"] == at:
                    break
            process.send_signal(signal.SIGTERM)
        assert process.returncode == 130
    assert main(command) == 0
    told = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [one["round"] for one in told if "round" in one][-1] == 40
    assert told[-1]["result"]["per_episode"] == list(whole.result().per_episode)
    folder = tmp_path / "runs" / "small"
    assert last_hash(folder) == last_hash(tmp_path / "whole")
    assert main(command) == 0, "it has ended, and is only tested again"
    again = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert again == told[-1:]


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


def test_a_run_with_nodes_goes_on_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished(tmp_path / "runs" / "small").folder
    (folder / "flower.json").write_text("{}")
    assert main(words(tmp_path)) == 2
    assert "live on nodes. Go on with `fedshot resume" in capsys.readouterr().err
