"""Promise 7: what cannot work is refused before round 1, in words, with exit code 2."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedshot.cli import train
from fedshot.cli.main import main
from fedshot.core.errors import CheckpointError
from fedshot.runs.recorder import Record, Recorder

from .conftest import Trained
from .runs import experiment, finished, run_words, written


def refusal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *changes: dict[str, Any], extra: Any = ()
) -> str:
    """Start a run that must be refused; return what the person reads."""
    code = main([*run_words(tmp_path, *changes), *extra])
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("fedshot: error: ")
    assert "Traceback" not in err
    assert not (tmp_path / "runs" / "small" / "metrics.jsonl").exists(), "round 0 was begun"
    return err


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"episode": {"way": 6}, "model": {"head": "none"}},
            ["client 0 has 5 classes", "a 6-way episode needs 6", "Lower episode.way"],
        ),
        (
            {"episode": {"shot": 40}},
            ["6 of 6 clients cannot form a 5-way 40-shot", "with at least 45 examples"],
        ),
        (
            {"test": {"way": 7}, "model": {"head": "none"}},
            ["novel classes cannot fill the test", "needs 7 classes; there are 5"],
        ),
        ({"test": {"shot": 170}}, ["novel classes", "images; a 5-way 170-shot", "needs 185 of"]),
        ({"method": {"name": "fl_prot"}}, ["method.name is 'fl_prot'", "'fl_proto'"]),
        (
            {"run": {"quorum": 1.5}},
            ["run.quorum is 1.5", "expected a number of at least 0 and at most 1"],
        ),
        ({"name": "../up"}, ["name is '../up'", "names a folder"]),
        ({"split": {"base": ["0-3"], "novel": ["3-9"]}}, ["class '3'", "disjoint"]),
        ({"split": {"base": ["0-4"], "novel": ["ten"]}}, ["'ten'"]),
        ({"model": {"backbone": {"name": "mlp", "hidden": []}}}, ["hidden is []", "[64]"]),
        ({"run": {"cohort": 100}}, ["run.cohort is 100", "6 clients"]),
        ({"test": {"way": 1}}, ["test.way is 1", "expected at least 2"]),
        ({"episode": {"way": 1}}, ["episode.way is 1", "Expected at least 2"]),
        (
            {"episode": {"augment": {"crop_padding": 8}}},
            ["crop_padding is 8, and images are 8 pixels", "such as 1"],
        ),
        (
            {
                "split": {"base": ["0-9"]},
                "partition": {"name": "pathological", "clients": 6, "way": 3, "shot": 4},
                "episode": {"way": 2, "shot": 1, "query": 5, "queries": "up_to"},
                "method": {"name": "frl"},
            },
            [
                "of 6 clients cannot form",
                "client 0 has no support",
                "divided 1 to 5",
                "Lower episode.way, episode.shot or episode.query",
            ],
        ),
        (
            {"method": {"name": "fedfsl_naive"}, "model": {"head": {"way": 3}}},
            ["model.head.way is 3", "Set model.head.way to 5"],
        ),
        (
            {
                "split": {"base": ["0-9"]},
                "partition": {"name": "pathological", "clients": 6, "way": 3, "shot": 4},
                "episode": {"way": 2, "query": 1, "queries": "up_to"},
                "method": {"name": "pfedfsl", "m": 2, "l1": "proximal"},
                "run": {"fleet": "vectorised", "cohort": 4, "choose": "last"},
            },
            [
                "run.fleet is 'vectorised'",
                "method.l1 'proximal'",
                "Set method.l1 to 'subgradient', or run.fleet",
            ],
        ),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_impossible_requests_name_the_value_and_the_fix(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    changes: dict[str, Any],
    expected: list[str],
) -> None:
    text = refusal(capsys, tmp_path, changes)
    for words in expected:
        assert words in text


def test_an_option_of_the_command_line_is_checked_like_one_of_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = refusal(capsys, tmp_path, extra=["--method.optimiser.lr", "0.1"])
    assert "there is no option 'method.optimiser.lr'" in text
    assert "method.optimizer.lr" in text
    assert "Did you mean --config?" in refusal(capsys, tmp_path, extra=["--confg", "x"])
    for words, told in (
        (["--quiet", "run"], "--quiet comes before the command; write it after"),
        (["evaluate", "x", "--epsiodes", "5"], "Did you mean '--episodes'?"),
        (["compare", "x", "y", "--jsn"], "Did you mean '--json'?"),
        (
            ["report", "x", "--test.shot", "5"],
            "Valid: --data-dir, --help, --title, --to, --without-data.",
        ),
    ):
        assert main(words) == 2
        assert told in capsys.readouterr().err


def test_a_client_without_data_is_named_or_left_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = tmp_path / "three.npz"
    users = np.repeat([0, 1, 2], 40)
    y = np.tile(np.arange(4), 30)
    users[users == 1] = np.where(np.arange(40) < 1, 1, 0)  # client 1 holds a single image
    np.savez(data, x=np.zeros((120, 6, 6), np.uint8), y=y, users=users)
    changes = {
        "data": {"name": "npz", "path": str(data)},
        "split": {"base": ["0", "1"], "novel": ["2", "3"]},
        "partition": {"name": "users"},
        "episode": {"way": 2},
        "test": {"way": 2, "query": 3},
        "run": {"cohort": 2, "rounds": 1},
    }
    text = refusal(capsys, tmp_path, changes)
    assert "1 of 3 clients cannot form a 2-way 1-shot" in text
    assert "client 1 has 0 classes with at least 6 examples" in text
    assert "run.infeasible_clients" in text
    words = run_words(tmp_path, changes)
    assert main([*words, "--run.infeasible_clients", "leave_out"]) == 0
    assert "left out: client 1 has 0 classes" in capsys.readouterr().err


def test_an_unreadable_image_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("ash", "oak", "yew", "fir"):
        folder = tmp_path / "trees" / name
        folder.mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (6, 6), (i, i, i)).save(folder / f"{i}.png")
    (tmp_path / "trees" / "oak" / "3.png").write_bytes(b"\x89PNG\r\n\x1a\nnot really")
    changes = {
        "data": {"name": "folder", "path": str(tmp_path / "trees")},
        "split": {"base": ["ash", "oak"], "novel": ["yew", "fir"]},
    }
    text = refusal(capsys, tmp_path, changes)
    assert "oak/3.png" in text


def test_a_damaged_checkpoint_is_named_with_the_way_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    finished(tmp_path / "run", {"method": {"name": "fl_proto"}})
    last = tmp_path / "run" / "checkpoints" / "round-000004.safetensors"
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    assert main(["resume", str(tmp_path / "run")]) == 2
    text = capsys.readouterr().err
    assert "round-000004.safetensors is damaged" in text
    assert "Delete it to resume the run from round 3" in text
    last.unlink()
    assert main(["resume", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("command", ["resume", "evaluate"])
def test_a_run_whose_checkpoints_are_gone_is_not_begun_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Trained, command: str
) -> None:
    trained(tmp_path / "run")
    records = (tmp_path / "run" / "metrics.jsonl").read_text()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert main([command, str(tmp_path / "run")]) == 2
    text = capsys.readouterr().err
    assert "checkpoints holds no checkpoint any more, and records of 4 rounds" in text
    assert "Restore it from a copy" in text
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == records


def test_a_config_edited_between_run_and_resume_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Trained
) -> None:
    path = trained(tmp_path / "run") / "config.yaml"
    path.write_text(path.read_text().replace("local_steps: 2", "local_steps: 3"))
    assert main(["resume", str(tmp_path / "run")]) == 2
    text = capsys.readouterr().err
    assert "method.local_steps was 2, is 3" in text
    assert "Restore it" in text


def test_other_data_under_the_same_configuration_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = tmp_path / "four.npz"
    changes = {
        "data": {"name": "npz", "path": str(data)},
        "split": {"base": ["0", "1"], "novel": ["2", "3"]},
        "partition": {"name": "iid", "clients": 2},
        "run": {"cohort": 2},
        "episode": {"way": 2},
        "test": {"way": 2, "query": 3},
    }
    x, y = np.zeros((120, 6, 6), np.uint8), np.tile(np.arange(4), 30)
    np.savez(data, x=x, y=y)
    finished(tmp_path / "run", changes)
    np.savez(data, x=x + 1, y=y)
    assert main(["resume", str(tmp_path / "run")]) == 2
    assert "started on other data" in capsys.readouterr().err


def test_a_run_whose_split_means_other_classes_than_when_it_began_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A split at random depends on the version of numpy; here ranges mean other classes."""
    names = sorted(map(str, range(12)))
    np.savez(
        tmp_path / "twelve.npz",
        x=np.arange(240 * 36, dtype=np.uint8).reshape(240, 6, 6),
        y=np.tile(np.arange(12), 20),
        class_names=np.array(names),
    )
    changes = {
        "data": {"name": "npz", "path": str(tmp_path / "twelve.npz")},
        "split": {"base": ["0-4"], "validation": ["5-7"], "novel": ["8-11"]},
        "partition": {"name": "iid", "clients": 2},
        "episode": {"way": 2},
        "test": {"way": 2, "query": 3},
        "run": {"rounds": 1, "cohort": 2},
    }
    with monkeypatch.context() as patch:
        patch.setattr(
            "fedshot.data.class_split._Names.read",
            lambda _names, _part, entry: range(int(entry[0]), int(entry.split("-")[1]) + 1),
        )
        finished(tmp_path / "run", changes)
        experiment(tmp_path / "run", changes)
    with pytest.raises(
        CheckpointError, match=r"other base classes \('0', '1', '10', '11', '2'\) t"
    ):
        experiment(tmp_path / "run", changes)


def test_a_run_goes_on_only_where_its_clients_hold_what_they_held(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A split, a numpy or a fedshot that deals otherwise is another partition of the same data."""
    finished(
        tmp_path / "dealt", {"partition": {"name": "dirichlet", "clients": 6}, "run": {"rounds": 1}}
    )
    longer = {"partition": {"name": "dirichlet", "clients": 6}, "run": {"rounds": 2}}
    experiment(tmp_path / "dealt", longer)
    with monkeypatch.context() as patch:
        patch.setattr("fedshot.runs.prepare.FederatedDataset.partition_digest", "another")
        with pytest.raises(CheckpointError, match="started with another partition of its data"):
            experiment(tmp_path / "dealt", longer)


def test_a_folder_that_holds_no_run_and_one_that_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Trained
) -> None:
    assert main(["resume", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    trained(tmp_path / "runs" / "small")
    assert main(run_words(tmp_path)) == 2
    text = capsys.readouterr().err
    assert "holds a run already" in text
    assert "fedshot resume" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--out", "FILE"], ["taken", "Not a directory", "A file is where a folder is expected"]),
        (["--out", "FOLDER", "--name", "taken"], ["taken", "A file is where a folder is expected"]),
        (["--out", "/proc/x"], ["/proc/x", "Correct the path"]),
        (["--name", "n" * 300], ["name is 'nnn", "up to 100 letters"]),
        (["--out", "FOLDER/" + "n" * 300], ["File name too long", "Choose a shorter name"]),
        (["--config", "FOLDER"], ["it is not a regular file", "Name a YAML file"]),
        (["--config", "FILE/x"], ["Not a directory"]),
    ],
)
def test_a_place_that_cannot_be_written_is_named_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], expected: list[str]
) -> None:
    (tmp_path / "taken").write_text("a file")
    config = written(tmp_path)
    places = {"FILE": str(tmp_path / "taken"), "FOLDER": str(tmp_path)}
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    assert main(["run", "--config", str(config), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for text in expected:
        assert text in err


def test_pictures_that_cannot_be_written_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "digits", "--out", "/dev/null/x"]) == 2
    assert "/dev/null/x: Not a directory" in capsys.readouterr().err


def test_a_full_disk_is_told_with_the_way_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Recorder.append

    def full(self: Recorder, record: Record) -> None:
        if record.round > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, record)

    monkeypatch.setattr(Recorder, "append", full)
    assert main(run_words(tmp_path)) == 75
    err = capsys.readouterr().err
    assert "No space left on device. Free some space on that disk" in err
    assert f"o on with `fedshot resume {tmp_path / 'runs' / 'small'}`" in err
    monkeypatch.undo()
    assert main(["resume", str(tmp_path / "runs" / "small")]) == 0


def test_too_little_memory_is_told_and_a_mistake_of_ours_is_not_hidden(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = run_words(tmp_path)
    said = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."

    def fails(*_: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(train, "PreparedRun", fails)
    assert main(words) == 75
    assert "this machine has too little memory" in capsys.readouterr().err
    said = "a mistake of ours"
    with pytest.raises(RuntimeError, match=said):
        main(words)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--episodes", "99999999999999999999", "test.episodes is 99999999999999999999"),
        ("--way", "x", "test.way is 'x'; expected a whole number"),
        ("--shot", "0", "shot is 0"),
    ],
)
def test_evaluate_checks_its_options_like_those_of_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Trained, option: str, value: str,
    expected: str,
) -> None:  # fmt: skip
    assert main(["evaluate", str(trained(tmp_path / "run")), option, value]) == 2
    assert expected in capsys.readouterr().err
