"""The command line as a person uses it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fedshot.cli import main
from fedshot.methods import METHODS

from .runs import CHOOSING, SMALL, command, finished, last_hash, line, merged


def written(tmp_path: Path, *changes: dict[str, object]) -> Path:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(merged(SMALL, *changes)), encoding="utf-8")
    return config


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from fedshot.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'rich', 'yaml', 'jsonargparse'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "recognise new classes" in done.stdout


def test_a_run_prints_rounds_to_stderr_and_the_result_to_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path)
    assert main(["run", "--config", str(config), "--out", str(tmp_path / "runs")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("fsl_local: ")
    assert "on novel classes, 20 episodes, worst tenth" in out
    assert [text for text in err.splitlines() if text.startswith("round 4/4")]
    assert "the last round is tested" in err


def test_json_gives_one_object_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(tmp_path, CHOOSING)
    words = ["run", "--config", str(config), "--out", str(tmp_path / "runs"), "--json"]
    assert main(words) == 0
    rows = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [row["round"] for row in rows[:-1]] == [0, 1, 2, 3, 4]
    best = max(rows[:-1], key=lambda row: (row["validation"] or {"accuracy": -1})["accuracy"])
    assert rows[-1]["round"] == best["round"]
    assert 0 <= rows[-1]["result"]["accuracy"] <= 1


def test_quiet_prints_the_result_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(tmp_path, CHOOSING)
    words = ["run", "--config", str(config), "--out", str(tmp_path / "runs"), "--quiet"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    assert err == ""


def test_evaluate_answers_another_shape_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(tmp_path / "run", {"method": {"name": "fl_proto"}})
    result, before = run.result(), last_hash(tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    same = json.loads(capsys.readouterr().out)["result"]
    assert same["accuracy"] == result.accuracy
    assert main(["evaluate", str(tmp_path / "run"), "--shot", "5", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)["result"]
    assert other["tasks"] != same["tasks"]
    assert other["accuracy"] > same["accuracy"]
    assert last_hash(tmp_path / "run") == before
    assert main(["evaluate", str(tmp_path / "run"), "--way", "6"]) == 2
    assert "needs 6 classes; there are 5" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    config = written(tmp_path, {"run": {"rounds": 5000}})
    process = subprocess.Popen(
        line("run", "--config", config, "--out", tmp_path / "runs"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    for text in process.stderr:
        if text.startswith("round 2/"):
            break
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"fedshot resume {tmp_path / 'runs' / 'small'}" in err
    assert "Traceback" not in err


def test_methods_lists_all_and_shows_the_options_of_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["methods"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in METHODS)
    assert main(["methods", "fedfsl_naive"]) == 0
    assert "--method.inner.steps" in capsys.readouterr().out
    assert main(["methods", "fedfsl"]) == 2
    assert "Did you mean 'fedfsl_naive'?" in capsys.readouterr().err


def test_data_show_describes_the_deal_and_draws_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path)
    assert main(["data", "show", "--config", str(config), "--out", str(tmp_path / "p")]) == 0
    out = capsys.readouterr().out
    assert "1797 images of 8 x 8 x 1, 10 classes" in out
    assert "6 clients can form a 5-way 1-shot, 5 queries episode" in out
    assert {p.name for p in (tmp_path / "p").iterdir()} >= {
        "digits-classes.png", "digits-histogram.svg", "digits-partition.svg",
    }  # fmt: skip


def test_the_command_runs_as_a_program(tmp_path: Path) -> None:
    done = command("run", "--config", written(tmp_path), "--out", tmp_path, "--name", "a b")
    assert done.returncode == 2
    assert "name is 'a b'" in done.stderr
