"""Trackers hold every round once, whatever happened to the run."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedshot.cli.main import main
from fedshot.core.errors import ConfigError
from fedshot.runs.trackers import tracking as trackers

from .runs import CHOOSING, experiment, finished, merged, run_words

MARK = "cost/megabytes_down"


SETTINGS = merged(CHOOSING, {"method": {"name": "fl_proto", "local_steps": 1}})


def run(tmp_path: Path, kind: str) -> Path:
    assert main([*run_words(tmp_path, SETTINGS), "--quiet", "--tracker", kind]) == 0
    return tmp_path / "runs" / "small"


def killed(tmp_path: Path, kind: str, after: int) -> Path:
    """Train with a tracker until a round that no checkpoint has, and then stop at once."""
    slow = {"run": {"checkpoint_every": 3, "validate_every": 3}}
    begun = experiment(tmp_path / "small", SETTINGS, slow)
    tracker = trackers.Tracker(kind, begun.folder, begun.config.settings, pytest.fail)
    for record in begun.run():
        tracker.record(record)
        if record.round == after:
            break
    return begun.folder


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    seen = module.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    seen.Reload()
    tags = seen.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in seen.Scalars(tag)] for tag in tags}


def test_tensorboard_reads_back_what_the_records_say(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = run(tmp_path, "tensorboard")
    found, told = tensorboard(folder), records(folder)
    assert [step for step, _ in found[MARK]] == [0, 1, 2, 3, 4]
    for record in told:
        step = record["round"]
        assert dict(found[MARK])[step] == pytest.approx(record["bytes_down"] / 1e6)
        assert dict(found["cost/seconds"])[step] == pytest.approx(record["seconds"])
        if step:
            assert dict(found["train/loss"])[step] == pytest.approx(record["metrics"]["loss"])
        if record["validation"]:
            score = record["validation"]["accuracy"]
            assert dict(found["validation/accuracy"])[step] == pytest.approx(score)
    result = json.loads((folder / "result.json").read_text())
    [(step, accuracy)] = found["test/accuracy"]
    assert (step, accuracy) == (result["round"], pytest.approx(result["test"]["accuracy"]))


@pytest.mark.parametrize("after", [1, 2])
def test_a_killed_run_goes_on_in_tensorboard_without_a_round_twice(
    tmp_path: Path, after: int
) -> None:
    pytest.importorskip("tensorboard")
    folder = killed(tmp_path, "tensorboard", after)
    assert [step for step, _ in tensorboard(folder)[MARK]] == list(range(after + 1))
    for _ in range(2):  # the second time there is nothing left to do
        assert main(["resume", str(folder), "--tracker", "tensorboard", "--quiet"]) == 0
        found = tensorboard(folder)
        assert [step for step, _ in found[MARK]] == [0, 1, 2, 3, 4]
        assert len(found["test/accuracy"]) == 1


def test_rounds_before_the_tracker_are_sent_when_it_joins(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = finished(tmp_path / "small", SETTINGS).folder
    assert main(["resume", str(folder), "--tracker", "tensorboard", "--quiet"]) == 0
    assert [step for step, _ in tensorboard(folder)[MARK]] == [0, 1, 2, 3, 4]


def test_a_tracker_changes_nothing_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = run(tmp_path, "tensorboard")
    plain = finished(tmp_path / "plain", SETTINGS).folder
    same = [
        [
            {k: v for k, v in r.items() if k not in ("seconds", "elapsed", "ended")}
            for r in records(f)
        ]
        for f in (folder, plain)
    ]
    assert same[0] == same[1]


def test_mlflow_has_every_round_once_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # as it is set, and put back at the end
    folder = killed(tmp_path, "mlflow", 2)
    for _ in range(2):
        assert main(["resume", str(folder), "--tracker", "mlflow", "--quiet"]) == 0
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    [held] = client.search_runs([client.get_experiment_by_name("fedshot").experiment_id])
    assert held.data.params["method.name"] == "fl_proto"
    assert held.info.run_name == "small"
    told = {r["round"]: r for r in records(folder)}
    seen = client.get_metric_history(held.info.run_id, "train/loss")
    assert sorted(m.step for m in seen) == [1, 2, 3, 4]
    assert all(m.value == pytest.approx(told[m.step]["metrics"]["loss"]) for m in seen)
    assert len(client.get_metric_history(held.info.run_id, "test/accuracy")) == 1


def test_a_run_that_died_is_failed_in_mlflow_and_a_deleted_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    begun = experiment(tmp_path / "small", SETTINGS)
    settings = begun.config.settings

    def opened() -> trackers.Tracker:
        return trackers.Tracker("mlflow", begun.folder, settings, pytest.fail)

    tracker = opened()
    tracker.record(next(iter(begun.run())))
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    held = json.loads((begun.folder / "mlflow.json").read_text())["id"]
    tracker.close()
    assert client.get_run(held).info.status == "FAILED"
    again = opened()
    assert client.get_run(held).info.status == "RUNNING"
    for _ in begun.run():
        pass
    again.result(begun.result(), begun.best_round)
    again.close()
    assert client.get_run(held).info.status == "FINISHED"
    client.delete_run(held)
    with pytest.raises(ConfigError, match=r"was deleted in MLflow. Restore it there, or delete"):
        opened()


def test_a_tracker_is_told_whether_the_training_ended(tmp_path: Path) -> None:
    ends: list[bool] = []

    class Seen:
        last = -1

        def log(self, *_: object) -> None: ...

        end = log

        def close(self, *, done: bool) -> None:
            ends.append(done)

    begun = experiment(tmp_path / "small", CHOOSING, {"run": {"rounds": 1}})
    for tested in (False, True):
        tracker = trackers.Tracker(None, begun.folder, begun.config.settings, pytest.fail)
        tracker._sink = Seen()
        for record in begun.run():
            tracker.record(record)
        if tested:
            tracker.result(begun.result(), begun.best_round)
        tracker.close()
    assert ends == [False, True]


@pytest.mark.slow
def test_wandb_offline_has_every_round_once_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "SILENT": "true", "DISABLE_GIT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    folder = killed(tmp_path, "wandb", 2)
    import wandb

    wandb.finish()
    assert main(["resume", str(folder), "--tracker", "wandb", "--quiet"]) == 0
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    ids = {file.stem.removeprefix("run-") for file in files}
    assert (len(files), len(ids)) == (2, 1)
    found: dict[int, dict[str, float]] = {}
    for file in files:
        for step, values in history(file):
            assert step not in found
            found[step] = values
    assert sorted(found) == [0, 1, 2, 3, 4]
    for record in records(folder):
        megabytes = found[record["round"]]["cost/megabytes_down"]
        assert megabytes == pytest.approx(record["bytes_down"] / 1e6)


def history(file: Path) -> list[tuple[int, dict[str, float]]]:
    """Read the steps in a file of wandb's offline mode: protobuf in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in logged(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {
                (i.key or "/".join(i.nested_key)): json.loads(i.value_json)
                for i in record.history.item
            }
            found.append((int(items["_step"]), items))
    return found


def logged(data: bytes) -> Iterator[bytes]:
    """Yield the records: pieces of at most a block, each after checksum, length and kind."""
    at, whole, block, head = 7, b"", 32768, 7
    while at + head <= len(data):
        if block - at % block < head:  # no piece begins this near to the end of a block
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + head : at + head + length]
        at += head + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def test_a_missing_package_is_refused_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else find(name, *a)
    )
    assert main([*run_words(tmp_path), "--tracker", "wandb"]) == 2
    err = capsys.readouterr().err
    assert "the tracker 'wandb' needs wandb, which is not installed" in err
    assert "pip install 'fedshot[tracking]'" in err
    assert not (tmp_path / "runs").exists()


def test_a_tracker_that_fails_on_the_way_does_not_end_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        last = -1

        def __init__(self, *_: object) -> None: ...

        def log(self, round: int, values: object) -> None:
            if round == 2:
                raise OSError("no connection")

    monkeypatch.setattr(trackers, "check", print)
    monkeypatch.setattr(trackers, "_SINKS", {"mlflow": Broken})
    monkeypatch.setattr("fedshot.cli.train.check", print)
    folder = run(tmp_path, "mlflow")
    err = capsys.readouterr().err
    assert err.count("no connection") == 1
    assert f"fedshot resume {folder} --tracker mlflow" in err
    assert (folder / "result.json").exists()


def test_a_tracker_that_cannot_be_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no key")

    monkeypatch.setattr(trackers, "check", print)
    monkeypatch.setattr(trackers, "_SINKS", {"wandb": refuse})
    with pytest.raises(ConfigError, match=r"tracker wandb cannot be opened: no key\."):
        trackers.Tracker("wandb", tmp_path / "run", {"name": "x"}, print)
