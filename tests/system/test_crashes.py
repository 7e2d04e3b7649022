"""Promise 2: kill a run at any instant, resume it, and it ends in the same bits."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedshot.cli.main import main
from fedshot.core import storage

from .runs import CHOOSING, SMALL, experiment, finished, last_hash, line, merged

LONGER = merged(SMALL, {"run": {"rounds": 60}, "method": {"local_steps": 10}})


class Crash(BaseException):
    """Nobody catches this: the process is gone."""


class Fuse:
    """Lets `n` disk operations through, then crashes, before or in the middle of the next one."""

    def __init__(self, n: int) -> None:
        self.left = n

    def burn(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Crash


def plant(monkeypatch: pytest.MonkeyPatch, fuse: Fuse) -> None:
    """Make every write, rename, flush and deletion of a run go through the fuse."""
    write, flush, unlink = Path.write_bytes, storage.flush, Path.unlink

    def torn(path: Path, *pieces: bytes | memoryview, sync: bool) -> None:
        data = b"".join(pieces)
        partial = path.with_name(f"{path.name}{storage.PARTIAL}")
        write(partial, data[: len(data) // 2])
        fuse.burn()  # dies with half of the file written
        write(partial, data)
        fuse.burn()  # dies between writing and renaming
        partial.replace(path)

    def flushed(path: Path) -> None:
        fuse.burn()
        flush(path)

    def unlinked(path: Path, **options: Any) -> None:
        fuse.burn()
        unlink(path, **options)

    monkeypatch.setattr(storage, "write_bytes", torn)
    monkeypatch.setattr(storage, "flush", flushed)
    monkeypatch.setattr(Path, "unlink", unlinked)


FAILING = {
    "run": {
        "quorum": 0.5,
        "below_quorum": "skip",
        "checkpoint_every": 2,
        "unreliable": {"drop": 0.3, "delay": 0.2, "corrupt": 0.2},
    }
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="last round", marks=pytest.mark.slow),
        pytest.param(
            merged(CHOOSING, FAILING), id="chosen round, failing clients", marks=pytest.mark.slow
        ),
    ],
)
def test_a_crash_at_any_disk_operation_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    short = merged(changes, {"run": {"rounds": 4}})
    whole = finished(tmp_path / "whole", short)
    expected, scored = last_hash(tmp_path / "whole"), whole.result()
    crashes = 0
    while True:
        folder = tmp_path / "cut"
        shutil.rmtree(folder, ignore_errors=True)
        with monkeypatch.context() as patch:
            plant(patch, Fuse(7 * crashes))
            try:
                finished(folder, short)
                break  # the fuse was longer than the run
            except Crash:
                crashes += 1
        resumed = finished(folder, short)
        assert last_hash(folder) == expected
        assert resumed.result() == scored
        assert private_states(folder) == private_states(tmp_path / "whole")
        assert len(resumed.recorder.records()) == 5  # rounds 0 to 4, none twice
    assert crashes > 10


def private_states(folder: Path) -> list[str]:
    """Return the hash of the newest state of every client."""
    clients = sorted((folder / "clients").iterdir())
    newest = [max(held) for client in clients if (held := list(client.glob("*.safetensors")))]
    return [storage.read(path)[2] for path in newest]


def kill_and_resume(folder: Path, config: Path, kills: int, rng: random.Random) -> None:
    """Start a run, then kill and resume it at random instants, most of them in its rounds.

    On a fast machine a run may end before its kill; the others count.
    """
    killed = 0
    for life in range(kills):
        words = ("resume", folder) if (folder / "config.yaml").exists() else (
            "run", "--config", config, "--out", folder.parent)  # fmt: skip
        process = subprocess.Popen(
            line(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stderr is not None
        if life % 5:  # every fifth life ends anywhere, start-up included
            for text in process.stderr:
                if text.startswith("round") and not text.startswith("round 0/"):
                    break
            time.sleep(rng.uniform(0, 0.25))
        else:
            time.sleep(rng.uniform(0.5, 4))
        killed += process.poll() is None
        process.kill()
        process.communicate()
    assert killed > 0, "no run could be killed; make it longer"


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    kills = 4
    settings = merged(LONGER, {"run": {"rounds": 12 * kills}})
    finished(tmp_path / "whole", settings)
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    folder = tmp_path / "out" / "small"
    folder.parent.mkdir()
    kill_and_resume(folder, config, kills, random.Random(7))
    assert main(["resume", str(folder)]) == 0
    assert last_hash(folder) == last_hash(tmp_path / "whole")
    assert private_states(folder) == private_states(tmp_path / "whole")


@pytest.mark.slow
def test_two_worker_threads_killed_in_mid_round_end_like_undisturbed_ones(tmp_path: Path) -> None:
    threads = {"run": {"rounds": 36, "fleet": "threads", "workers": 2}, "name": "cut"}
    settings = merged(LONGER, CHOOSING, threads)
    finished(tmp_path / "whole", settings).result()
    config = tmp_path / "cut.yaml"
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    folder = tmp_path / "out" / "cut"
    folder.parent.mkdir()
    kill_and_resume(folder, config, 3, random.Random(11))
    assert main(["resume", str(folder)]) == 0
    for path in ("ledger.json", "result.json", "checkpoints/*", "clients/*/*"):
        held = [sorted(place.glob(path)) for place in (folder, tmp_path / "whole")]
        assert held[0]
        for mine, theirs in zip(*held, strict=True):
            assert mine.relative_to(folder) == theirs.relative_to(tmp_path / "whole")
            assert mine.read_bytes() == theirs.read_bytes(), mine
    assert timeless(folder) == timeless(tmp_path / "whole")


def timeless(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all rounds, without the times, which no two runs share."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) | {"seconds": 0, "elapsed": 0, "ended": ""} for line in lines]


def test_what_follows_the_last_checkpoint_is_done_when_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        named = [folder / "ledger.json", *(folder / "checkpoints").iterdir()]
        return {path.name: path.read_bytes() for path in named}

    finished(tmp_path / "whole")
    crashes = iter([False] * 4 + [True])  # of the ledgers of rounds 0 to 4, the last
    write = storage.write_bytes

    def crashing(path: Path, *data: bytes | memoryview, sync: bool) -> None:
        if path.name == "ledger.json" and next(crashes):
            raise Crash
        write(path, *data, sync=sync)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_bytes", crashing)
        with pytest.raises(Crash):
            finished(tmp_path / "cut")
    assert files(tmp_path / "cut") != files(tmp_path / "whole")
    finished(tmp_path / "cut")
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_finished_run_resumes_to_the_same_result(tmp_path: Path) -> None:
    first = finished(tmp_path / "run").result()
    again = experiment(tmp_path / "run")
    assert list(again.run()) == []
    assert again.result() == first
