"""Damaged and hostile records: each is refused in words or does no harm, whoever reads it."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedshot.cli.main import main
from fedshot.core.errors import FedshotError

from .runs import experiment, finished, last_hash, stopped

CHOOSING: dict[str, Any] = {
    "method": {"name": "fl_proto", "local_steps": 2},
    "split": {"base": ["0-4"], "validation": ["5-7"], "novel": ["8", "9"]},
    "test": {"way": 2, "episodes": 4, "validation_episodes": 4},
    "run": {"rounds": 2, "cohort": 3},
}
FILES = ("config.yaml", "metrics.jsonl", "result.json", "ledger.json", "data.json",
         "environment.json", "calibration.json")  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 0, 7, 2**63, -(2**70), 10**300, 1.5, 1e308, -1e308, float("nan"), float("inf"),
    "", "x", "ä\x00", [], {}, [[]], [None], ["x", 1], {"": None}, {"x": []}, [1e308] * 3,
]  # fmt: skip
SHORT = '{"accuracy": 1, "interval": 0}'
BOMB = "\n".join(
    [f"l0: &l0 [{', '.join(['x'] * 9)}]"]
    + [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 12)]
)
"""YAML of 500 bytes that stands for 9**12 words."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is at its end and calibrated."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    finished(folder, CHOOSING).result()
    words = ["calibrate", folder, "--way", 2, "--shot", 1, "--episodes", 8, "--quiet"]
    assert main([str(word) for word in words]) == 0
    return folder


def commands(folder: Path, other: Path) -> dict[str, list[Any]]:
    """Return the commands that read a run, cheap ones first."""
    return {
        "status": ["status", folder],
        "compare": ["compare", folder, other],
        "report": ["report", folder, "--without-data", "--to", other.parent / "page.html"],
        "export": ["export", folder, "--to", "safetensors", "--out", other.parent / "e"],
        "resume": ["resume", folder, "--quiet"],
        "evaluate": ["evaluate", folder, "--episodes", 2, "--quiet"],
    }


def places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all values in a tree."""
    if above:
        yield above
    inside: dict[Any, Any] = dict(enumerate(tree)) if isinstance(tree, list) else tree
    for key, value in inside.items() if isinstance(inside, dict) else ():
        yield from places(value, (*above, key))


def changed(tree: Any, draw: random.Random) -> Any:
    """Return a tree of which one value is another, is gone, or is nested deeply."""
    found = deepcopy(tree)
    *above, last = draw.choice(list(places(found)) or [(0,)])
    at = found
    for key in above:
        at = at[key]
    kind = draw.randrange(8)
    if kind == 0:
        del at[last]
    elif kind == 1:
        for _ in range(60):
            at[last] = [at[last]]
    else:
        at[last] = draw.choice(VALUES)
    return found


def damaged(name: str, data: bytes, draw: random.Random) -> bytes:
    """Return a record with one change."""
    kind = draw.randrange(10)
    if kind == 0:
        return data[: draw.randrange(len(data))]
    if kind == 1:
        return draw.choice(
            [b"", b"[]", b"{}", b"null", b"3", b"\xff\xfe", b"[" * 9999, b'{"a":' * 9999]
        )
    if kind == 2:  # a byte
        i = draw.randrange(len(data))
        return data[:i] + bytes([draw.randrange(256)]) + data[i + 1 :]
    if kind == 3:  # a number of the text
        spots = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
        i = draw.choice(spots)
        put = draw.choice([b"9" * 5000, b"1e999", b"-1e999", b"[" * 5000, b"9" * 40])
        return data[:i] + put + data[i + 1 :]
    if name == "config.yaml":
        if kind == 4:
            return data + BOMB.encode()
        return yaml.safe_dump(changed(yaml.safe_load(data), draw)).encode()
    if name == "metrics.jsonl":
        lines = [json.loads(line) for line in data.splitlines()]
        i = draw.randrange(len(lines))
        lines[i] = changed(lines[i], draw)
        return "".join(json.dumps(line) + "\n" for line in lines).encode()
    return json.dumps(changed(json.loads(data), draw), indent=1).encode()


def outcome(run: Path, name: str, command: str, seed: int, place: Path) -> int:
    """Run a command on a copy of a run with one damaged record, and return the exit code."""
    folder = place / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, folder)
    data = damaged(name, (run / name).read_bytes(), random.Random(seed))
    (folder / name).write_bytes(data)
    return main([str(word) for word in commands(folder, run)[command]])


# Of every file two or one.
COUNTS = dict.fromkeys(("status", "compare", "report", "export", "resume", "evaluate"), 7)
SLOW = {"status": 200, "compare": 200, "report": 96, "export": 56, "resume": 40, "evaluate": 40}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("counts", [
    pytest.param(COUNTS, id="some"),
    pytest.param(SLOW, id="many", marks=pytest.mark.slow),
])  # fmt: skip
def test_no_record_ends_in_anything_but_a_result_or_a_refusal(
    run: Path, tmp_path: Path, counts: dict[str, int]
) -> None:
    for command, n in counts.items():
        for seed in range(n):
            name = FILES[seed % len(FILES)]
            assert outcome(run, name, command, seed, tmp_path) in (0, 2), (command, name, seed)


@pytest.mark.parametrize(("name", "text", "told"), [
    ("config.yaml", BOMB, "more than 100000 values. Use fewer anchors"),
    ("config.yaml", "[" * 600, "is nested too deeply"),
    ("config.yaml", "a: " + "[" * 40 + "]" * 40, "line 1: nested deeper than 32 lists and"),
    ("config.yaml", "name: x\nrun:\n  rounds: [3]\n", "run.rounds is [3]; input should be a valid "
     "integer (line 3)"),
    ("config.yaml", "name: x\nseed: " + "9" * 40, "seed is a whole number of 133 bits, expected"),
    ("config.yaml", "name: !!binary aGk=\n", "line 1: the tag 'tag:yaml.org,2002:binary' is not"),
    ("config.yaml", "seed: !!int x\n", "line 1: the tag 'tag:yaml.org,2002:int' is not"),
    ("metrics.jsonl", '{"round": 0}\n', "has no 'metrics' (line 1)"),
    ("result.json", '{\n"test":\n{"accuracy": 1e999}}', "test.accuracy is inf; input should be"),
    ("result.json", f'{{"test": {SHORT}}}', "test has no 'episodes'"),
    ("result.json", '{"test": ' + "9" * 5000 + "}", "a whole number of thousands of digits"),
    ("result.json", b"\n\xff\xfe", "it is not text in UTF-8 (invalid start byte) (line 2)"),
    ("result.json", "[" * 99999, "nested deeper than 32"),
    ("ledger.json", '[\n{"phase": "train"}]', "0 has no 'work' (line 2)"),
    ("environment.json", '{"resumed": 3}', "resumed is 3; input should be a valid list"),
])  # fmt: skip
def test_a_damaged_record_is_refused_by_file_key_and_line(
    run: Path, tmp_path: Path, name: str, text: str | bytes, told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["compare", str(tmp_path / "run"), str(run)]) == 2
    err = capsys.readouterr().err
    assert str(path) in err
    assert told in err
    assert len(err) < 600


def test_a_pipe_in_the_place_of_a_record_is_not_waited_for(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in FILES[:-1]:
        folder = tmp_path / name
        shutil.copytree(run, folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        command = ["export", folder, "--to", "safetensors"]
        words = command if name == "data.json" else ["compare", folder, run]
        assert main([str(word) for word in words]) == 2
        err = capsys.readouterr().err
        assert str(folder / name) in err
        assert "not a regular file" in err


def test_a_record_beyond_its_bound_is_refused_before_it_is_read(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    os.truncate(tmp_path / "run" / "result.json", 1 << 40)  # a sparse file takes no room
    assert main(["compare", str(tmp_path / "run"), str(run)]) == 2
    assert "it has 1,099,511,627,776 bytes, more than" in capsys.readouterr().err


THREE: dict[str, Any] = {"run": {"rounds": 3, "cohort": 4, "workers": 2}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of a run of three rounds that nothing has stopped."""
    return last_hash(finished(tmp_path_factory.mktemp("whole") / "run", THREE).folder)


@pytest.mark.parametrize(("part", "code", "ends"), [
    ("clients/", errno.ESTALE, 75), ("clients/", errno.EACCES, 2), ("checkpoints/", errno.EIO, 75),
    pytest.param("config.yaml", errno.EIO, 75, marks=pytest.mark.slow),
    pytest.param("metrics.jsonl", errno.EIO, 75, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_disk_that_fails_while_it_is_read_is_told_and_resume_goes_on(
    tmp_path: Path, whole: str, part: str, code: int, ends: int,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = tmp_path / "run"
    stopped(folder, 1, THREE)
    real = os.open

    def failing(path: Any, *more: Any, **named: Any) -> int:
        if f"{folder}/{part}" in str(path):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *more, **named)

    monkeypatch.setattr(os, "open", failing)
    assert main(["resume", str(folder), "--quiet"]) == ends
    err = capsys.readouterr().err
    assert f"{folder}/{part}" in err
    assert os.strerror(code) in err
    assert f"Go on with `fedshot resume {folder}`." in err
    monkeypatch.undo()
    assert main(["resume", str(folder), "--quiet"]) == 0
    assert last_hash(folder) == whole


def test_a_run_that_never_began_says_that_nothing_is_trained(tmp_path: Path) -> None:
    with pytest.raises(FedshotError, match=r"run holds no run yet: no round has been trained"):
        experiment(tmp_path / "run").result()
