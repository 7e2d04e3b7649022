"""Damaged and hostile records: each is refused in words or does no harm, whoever reads it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedshot.cli import main
from fedshot.errors import FedshotError

from .runs import finished, merged

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
        "export": ["export", "--run", folder, "--to", "safetensors", "--out", other.parent / "e"],
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
        return draw.choice([b"", b"[]", b"{}", b"null", b"3", b"\xff\xfe", b"[" * 9999, b'{"a":' * 9999])
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
