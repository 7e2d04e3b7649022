"""The command line as a person uses it."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedshot.cli import train
from fedshot.cli.main import main
from fedshot.core import console
from fedshot.data.sources import fetch, verification
from fedshot.evaluation.episodic_test import Score
from fedshot.methods.base.fl_proto import FLProto
from fedshot.methods.registry import METHODS

from .conftest import Trained
from .runs import (
    CHOOSING,
    experiment,
    finished,
    last_hash,
    line,
    run_words,
    stopped,
    written,
)


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from fedshot.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'rich', 'yaml', 'pydantic', 'shtab'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "recognise new classes" in done.stdout


def test_a_run_prints_rounds_to_stderr_and_the_result_to_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(run_words(tmp_path)) == 0
    out, err = capsys.readouterr()
    assert out.startswith("fsl_local: ")
    assert "on novel classes, 20 episodes, worst tenth" in out
    assert [text for text in err.splitlines() if text.startswith("round 4/4")]
    assert "the last round is tested" in err


def test_json_gives_one_object_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*run_words(tmp_path, CHOOSING), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "round 0/" not in err  # the rounds are on stdout alone
    rows = [json.loads(text) for text in out.splitlines()]
    assert [row["round"] for row in rows[:-1]] == [0, 1, 2, 3, 4]
    best = max(rows[:-1], key=lambda row: (row["validation"] or {"accuracy": -1})["accuracy"])
    assert rows[-1]["round"] == best["round"]
    assert 0 <= rows[-1]["result"]["accuracy"] <= 1


def test_quiet_prints_the_result_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*run_words(tmp_path, CHOOSING), "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert [text.split(":")[0] for text in out.splitlines()] == ["fsl_local", "raw pixels"]
    assert err == ""
    assert main([*run_words(tmp_path, CHOOSING), "--quiet", "--json", "--name", "again"]) == 0
    assert "result" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_every_character_is_printed_in_a_terminal_of_any_encoding(
    tmp_path: Path, encoding: str, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result has a plus-minus sign, a table has lines, and classes have names of any kind."""
    for name in ("a", "b"):
        experiment(trained(tmp_path / name)).result()
    printed = io.BytesIO()
    for stream in ("stdout", "stderr"):
        wrapped = io.TextIOWrapper(printed, encoding, write_through=True)
        monkeypatch.setattr(sys, stream, wrapped)
    assert main(["evaluate", str(tmp_path / "a")]) == 0
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    console.say("\N{LATIN SMALL LETTER L WITH STROKE}")
    plus_minus = "+/-" if encoding == "ascii" else "\N{PLUS-MINUS SIGN}"
    *lines, name = printed.getvalue().decode(encoding).splitlines()
    assert name == "\\u0142"
    assert sum(f" {plus_minus} " in line for line in lines) >= 4
    assert any("-----" in line for line in lines)


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


def test_ctrl_c_in_compiled_code_is_still_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it was caught and another error raised in its place."""

    def interrupted(options: object) -> int:
        del options
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None
        return 0

    monkeypatch.setattr("fedshot.cli.describe.methods", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["methods"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "stopped" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_what_stops_a_run_says_how_to_go_on(tmp_path: Path, asked: signal.Signals) -> None:
    # A shell that runs the tests in the background lets its children ignore Ctrl-C; undo that.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    words = run_words(tmp_path, {"run": {"rounds": 5000}})
    code = f"{heed}import sys; from fedshot.cli.main import main; sys.exit(main({words!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    for text in process.stderr:
        if text.startswith("round 2/"):
            break
    time.sleep(0.05)
    process.send_signal(asked)
    process.send_signal(asked)  # by an impatient person
    _, err = process.communicate()
    assert process.returncode == 130, err
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
    assert main(["methods", "fedfsl_naiv"]) == 2
    assert "Did you mean 'fedfsl_naive'?" in capsys.readouterr().err


def test_data_show_describes_the_deal_and_draws_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path)
    assert main(["data", "show", "--config", str(config), "--out", str(tmp_path / "p")]) == 0
    out = capsys.readouterr().out
    assert "1797 images of 8 x 8 x 1, 10 classes" in out
    assert "6 clients can form a 5-way 1-shot, 5 queries episode" in out
    assert f"wrote into {tmp_path / 'p'} (--out names another folder):" in out
    assert "digits-classes.png: images of 5 of the 5 base classes" in out
    assert "digits-devices.svg: what client 0 would have among 2, 5, 10, 20 and 30 clients" in out
    assert {p.name for p in (tmp_path / "p").iterdir()} >= {
        "digits-classes.png", "digits-histogram.svg", "digits-partition.svg", "digits-devices.svg",
    }  # fmt: skip


def test_data_show_takes_a_name_and_needs_no_model_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "words.jsonl"
    rows = [{"text": "good bad", "label": f"c{i % 4}", "who": f"secret{i % 8}"} for i in range(80)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("good 1 2\nbad 3 4\n")
    words = ["--data.path", data, "--data.vectors", vectors, "--data.dim", 2, "--data.user", "who"]
    words += ["--split.random", "[2, 0, 2]", "--partition", "classes", "--partition.clients", 2]
    words += ["--episode.way", 1, "--out", tmp_path / "p"]
    assert main(["data", "show", "texts", *map(str, words)]) == 0
    out = capsys.readouterr().out
    assert "80 texts of at most" in out
    assert "8 users, identified by numbers" in out
    assert "secret" not in out
    drawn = list((tmp_path / "p").iterdir())
    assert {p.name.partition("-")[2] for p in drawn} == {
        "histogram.svg", "partition.svg", "devices.svg",
    }  # fmt: skip
    assert not any(b"secret" in p.read_bytes() for p in drawn)
    devices = (tmp_path / "p" / "words-devices.svg").read_text()
    assert "2 clients: 20" in devices
    assert "30 clients: clients is 30, but there are only 2 classes" in devices


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("predict c --suport a --query b", "There is no --suport. Did you mean '--support'"),
        ("export b --too=a", "required: --to. There is no --too. Did you mean '--to'"),
        ("export b", "required: --to\n"),
        ("export b --to", "argument --to: expected one argument\n"),
        ("export -- b --too", "required: --to\n"),
        ("flower partition --data.name digits", "required: --to\n"),
        (
            "resume -runs/x",
            "required: folder. A path that begins with a dash needs ./ in front: ./-runs/x",
        ),
        (
            "run --out -runs",
            "expected one argument. A path that begins with a dash needs ./ in front: ./-runs",
        ),
    ],
)
def test_a_slip_in_an_option_that_is_needed_is_named(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2
    assert told in capsys.readouterr().err


def test_data_list_says_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "omniglot").mkdir()
    (tmp_path / "omniglot" / "images_background.zip").write_bytes(b"x")
    assert main(["data", "list", "--data-dir", str(tmp_path)]) == 0
    rows = {row.split()[0]: row for row in capsys.readouterr().out.splitlines()}
    assert "downloaded  " in rows["omniglot"]
    assert "missing: `fedshot data get NAME`" in rows["mnist"]
    assert "missing: manual download" in rows["sent140"]
    assert "included" in rows["digits"]
    assert "Synthetic characters" in rows["glyphs"]
    assert "your files" in rows["npz"]
    assert "Word vectors" in rows["glove"]


def test_data_get_says_where_files_went_or_what_to_do_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSHOT_DATA", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    asked = []

    def bring(name: str, folder: Path, progress: object) -> list[fetch.Fetched]:
        asked.append((name, folder))
        return [fetch.Fetched(folder / "a.gz", 2_000_000, True, already=False)]

    monkeypatch.setattr(fetch, "get", bring)
    assert main(["data", "get", "mnist"]) == 0
    assert asked == [("mnist", tmp_path / "fedshot")]
    out = capsys.readouterr().out
    assert f"fetched, 2.0 MB, checksum as published: {tmp_path / 'fedshot' / 'a.gz'}" in out
    monkeypatch.undo()
    for name, words in (
        ("sent140", "Open http://help.sentiment140.com"),
        ("digits", "digits needs no download"),
        ("digts", "no publisher is known for 'digts'"),
    ):
        assert main(["data", "get", name, "--data-dir", str(tmp_path)]) == 2
        assert words in capsys.readouterr().err


def test_data_get_says_in_a_pipe_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bring(name: str, folder: Path, progress: fetch.Progress) -> list[fetch.Fetched]:
        for done in (5_000_000, 12_000_000, 19_000_000, 25_000_000):
            progress("a.gz", done, 25_000_000)
        progress("b.gz", 11_000_000, None)
        return []

    monkeypatch.setattr(fetch, "get", bring)
    assert main(["data", "get", "mnist", "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "a.gz: 10 of 25 MB\na.gz: 20 of 25 MB\nb.gz: 10 MB\n"


def test_data_check_ends_in_2_only_when_something_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["data", "check", "mnist", "--data-dir", str(tmp_path)]) == 2
    assert "mnist: 1 problem" in capsys.readouterr().out
    found = [verification.Finding("ok", "whole"), verification.Finding("note", "a subset")]
    monkeypatch.setattr(verification, "check", lambda *_: found)
    assert main(["data", "check", "mnist", "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "ok: whole\nnote: a subset\nmnist: 0 problems\n"


@pytest.mark.parametrize("moment", ["start", "result"])
def test_ctrl_c_at_any_moment_ends_in_130_without_a_traceback(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    if moment == "start":
        monkeypatch.setattr(train, "PreparedRun", stop)
    else:
        monkeypatch.setattr(train.Experiment, "result", stop)
    data = tmp_path / "my data"
    data.mkdir()
    assert main([*run_words(tmp_path), "--data-dir", str(data)]) == 130
    err = capsys.readouterr().err
    assert ("o on with `fedshot resume" in err) == (moment == "result")
    assert (f"--data-dir '{data}'`" in err) == (moment == "result")
    assert "stopped" in err


def test_ctrl_c_while_evaluating_ends_in_130(
    tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    folder = trained(tmp_path / "run")
    monkeypatch.setattr(train.Experiment, "evaluate", stop)
    assert main(["evaluate", str(folder)]) == 130
    assert capsys.readouterr().err == "\nstopped\n"


@pytest.mark.slow
def test_a_run_goes_on_when_its_reader_leaves(tmp_path: Path) -> None:
    words = line(*run_words(tmp_path), "--json")
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["round"] == 0
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 0
    assert "Broken" not in err
    assert (tmp_path / "runs" / "small" / "result.json").exists()


def test_evaluating_an_unfinished_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(tmp_path / "run", 3, {"run": {"rounds": 50}})
    assert main(["evaluate", str(tmp_path / "run"), "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == "round 3 of 50: the run is not finished\n"
    assert [text.split(":")[0] for text in out.splitlines()] == ["fsl_local", "raw pixels"]


def test_unanswered_and_diverged_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    found = Score(0.5, 0.1, 18, 2, 3, "0" * 64, False, {}, None, (0.5,) * 18)
    train.say_score(
        found,
        argparse.Namespace(json=False),
        cast(
            Any,
            SimpleNamespace(
                method=FLProto,
                best_round=4,
                spent={},
                config=SimpleNamespace(settings={}),
                prepared=SimpleNamespace(own_tests=False),
            ),
        ),
        {},
    )
    assert capsys.readouterr().out == (
        "fl_proto: 50.00 ± 10.00 % on novel classes, 18 episodes, 2 unanswered, 3 diverged "
        "(counted as wrong), round 4, tasks 000000000000\n"
    )


def test_what_another_kind_leaves_out_is_told_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*run_words(tmp_path), "--run.rounds", "1", "--partition", "iid"]) == 0
    assert "partition.alpha, set for 'dirichlet'" in capsys.readouterr().err


def test_the_command_runs_as_a_program() -> None:
    done = subprocess.run(line("--name", "x"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--name comes before the command" in done.stderr


def test_a_run_names_the_clients_whose_replies_do_not_count(tmp_path, capfd):
    lossy = {"run": {"quorum": 0.0, "below_quorum": "skip", "unreliable": {"drop": 0.3}}}
    assert main(run_words(tmp_path, lossy)) == 0
    told = capfd.readouterr().err
    lost = [
        (record["round"], fault["client"])
        for record in map(json.loads, (tmp_path / "runs" / "small" / "metrics.jsonl").open())
        for fault in record["faults"]
    ]
    assert lost
    for client in {c for _, c in lost}:
        first = min(r for r, c in lost if c == client)
        start = f"round {first}: lost or rejected reply of client {client}"
        assert f"{start}: lost, dropped by plan\n" in told
    replies = "reply" if len(lost) == 1 else "replies"
    rounds = len({r for r, _ in lost})
    assert f"{len(lost)} lost or rejected {replies}, in {rounds} of 4 rounds: " in told
