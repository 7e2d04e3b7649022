"""`fedshot reproduce`: killed and begun again, it repeats no cell and changes no number."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import time
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from fedshot.cli.main import main
from fedshot.core.machine import cores
from fedshot.recipes import provenance
from fedshot.recipes.index import load
from fedshot.recipes.jobs import Job, Jobs
from fedshot.recipes.results import CellResult, Results

from .runs import line, merged

WORDS = ("reproduce", "digits", "--seeds", "1", "--budget", "paper")


def reproduce(folder: Path, *words: str, code: int = 0) -> tuple[str, str]:
    """Run the command in this process, whose workers are processes of their own; return texts."""
    with chdir(folder), redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        found = main(words)
    assert found == code, err.getvalue()
    return out.getvalue(), err.getvalue()


def numbers(folder: Path) -> dict[str, Any]:
    """Everything of the results that must not change: all but seconds, memory and machine."""
    found = {}
    for result in Results(folder / "results").every():
        for seed, one in result.seeds.items():
            kept = {k: v for k, v in one.items() if k not in ("seconds", "peak", "made")}
            found[f"{result.row}/{result.column} {seed}"] = kept
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("undisturbed")
    assert "FL-Proto" in reproduce(folder, *WORDS)[0]
    assert len(numbers(folder)) == 4
    return folder


@pytest.mark.slow
def test_killed_and_begun_again_it_ends_in_the_same_numbers(
    undisturbed: Path, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        line(*WORDS), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not numbers(tmp_path) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 0 < len(numbers(tmp_path)) < 4
    before = numbers(tmp_path)
    _, err = reproduce(tmp_path, *WORDS)
    for cell in before:
        assert f"train {cell}" not in err, "a finished cell was trained again"
    assert numbers(tmp_path) == numbers(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent(tmp_path: Path, asked: signal.Signals) -> None:
    process = subprocess.Popen(
        line("reproduce", "digits", "--seeds", "50", "--budget", "paper"),
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while not (children := workers_of(process.pid)) and process.poll() is None:
            time.sleep(0.05)
    finally:
        process.send_signal(asked)
        _, err = process.communicate()
    assert children
    assert asked == signal.SIGKILL or process.returncode == 130
    assert asked == signal.SIGKILL or "stopped; the same command continues" in err
    while any(alive(child) for child in children):
        time.sleep(0.05)


@pytest.mark.slow
def test_what_is_finished_is_shown_without_training(undisturbed: Path) -> None:
    out, err = reproduce(undisturbed, *WORDS, "--json")
    rows = json.loads(out)
    assert len(rows) == 4
    assert all(row["seeds"] == [0] for row in rows)
    assert err == ""


@pytest.mark.slow
def test_the_command_beside_a_cell_gives_the_same_number(undisturbed: Path, tmp_path: Path) -> None:
    path = undisturbed / "results" / "digits" / "paper" / "local.iid-5.json"
    words = shlex.split(json.loads(path.read_text(encoding="utf-8"))["command"])
    assert words[0] == "fedshot"
    reproduce(tmp_path, *words[1:])
    again = numbers(tmp_path)
    assert len(again) == 1
    assert again == {key: value for key, value in numbers(undisturbed).items() if key in again}


@pytest.mark.slow
def test_a_committed_cell_is_had_again_to_the_last_digit(tmp_path: Path) -> None:
    """On the kind of machine that made it; elsewhere the last digit may differ, and it skips."""
    root = Path(__file__).parents[2]
    cell = load("digits").cells("small", ["fl-proto/iid-1"])[0]
    held = Results(root / "results").of(cell, "small", None)
    assert held is not None, "the demonstration's cells are committed and up to date"
    names = ("torch", "numpy", "processor", "cpu_capability", "kernels")
    there, here = held.first["made"][0]["machine"], provenance.machine()
    if any(there[name] != here[name] for name in names):
        pytest.skip("this machine is of another kind than the one that made the committed cell")
    reproduce(tmp_path, *shlex.split(held.command())[1:])
    again = Results(tmp_path / "results").of(cell, "small", None)
    assert again is not None
    assert accuracies(again) == accuracies(held)


def accuracies(result: CellResult) -> list[tuple[int, float, list[int]]]:
    return [(s, one["test"]["accuracy"], one["right"]) for s, one in sorted(result.seeds.items())]


@pytest.mark.slow
def test_tuning_gives_every_method_the_same_trials_and_keeps_them(tmp_path: Path) -> None:
    words = ("reproduce", "digits", "--cells", "*/iid-1", "--seeds", "1", "--tune", "3")
    _, err = reproduce(tmp_path, *words)
    trials = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("results/*/*/*.tune.json"))]
    assert [len(one["trials"]) for one in trials] == [3, 3]
    tried = [[t["options"] for t in one["trials"]] for one in trials]
    assert tried[0] == tried[1]
    assert err.count("tune ") > 0
    # A trial has no result: the novel classes were not looked at.
    runs = [path.parent for path in tmp_path.glob("runs/recipes/*/*/*/config.yaml")]
    trial_runs = [run for run in runs if ".s1000-" in run.name]
    assert len(trial_runs) == 6
    assert not any((run / "result.json").exists() for run in trial_runs)
    assert "tune " not in reproduce(tmp_path, *words)[1]


@pytest.mark.slow
def test_two_cells_are_trained_at_once_where_two_cores_are(tmp_path: Path) -> None:
    if cores() < 2:
        pytest.skip("this machine has one core")
    cells = load("digits").cells("paper", ["*/iid-1"])
    jobs = []
    for cell in cells:
        settings = merged(cell.settings(), {"run": {"rounds": 200, "validate_every": 200}})
        jobs.append(Job(cell.key, "tune", settings, tmp_path / cell.stem, None))
    kinds = [(event.job.key, event.kind) for event in Jobs(jobs)]
    first, second = (cell.key for cell in cells)
    assert kinds.index((second, "begun")) < kinds.index((first, "done"))
    assert [kind for _, kind in kinds].count("done") == 2


def test_a_worker_that_is_cut_off_or_prints_to_stdout_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\nread order\necho Downloading...\nprintf \'{"event": "do\'\n')
    fake.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(fake))
    cell = load("digits").cells("small")[0]
    events = list(Jobs([Job("it", "train", cell.settings(), tmp_path, None)]))
    assert [event.kind for event in events] == ["failed"]
    assert events[0].facts["reason"].startswith("the worker ended with code")


@pytest.mark.slow
def test_a_result_keeps_the_code_that_trained_it(tmp_path: Path) -> None:
    """Not the one that found it finished."""
    reproduce(tmp_path, *WORDS, "--cells", "fl-proto/iid-1")
    (run,) = tmp_path.glob("runs/recipes/*/*/*/trained_by.json")
    held = json.loads(run.read_text(encoding="utf-8"))
    held[0]["commit"] = "an older one"
    run.write_text(json.dumps(held), encoding="utf-8")
    (result,) = tmp_path.glob("results/*/*/*.json")
    result.unlink()
    reproduce(tmp_path, *WORDS, "--cells", "fl-proto/iid-1")
    seed = json.loads(result.read_text(encoding="utf-8"))["seeds"]["0"]
    assert [one["commit"] for one in seed["made"]] == ["an older one"]


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file", encoding="utf-8")
    _, err = reproduce(tmp_path, *WORDS, code=2)
    assert "results" in err
    assert "round" not in err


def workers_of(parent: int) -> list[int]:
    try:
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii")
    except OSError:
        pytest.skip("this system does not list children")
    return [int(word) for word in text.split()]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow
def test_digits_that_everybody_has_stand_in_for_mnist_and_it_is_said(tmp_path: Path) -> None:
    words = ("reproduce", "fedfsl-fig6", "--plan", "--data-dir", str(tmp_path))
    out, err = reproduce(tmp_path, *words)
    assert "holds no half of the set" in err
    assert "digits is used instead (--budget digits)" in err
    assert "budget digits" in out
    out, err = reproduce(tmp_path, *words, "--budget", "small")
    assert "is used instead" not in err
    assert "no data" in out
