"""Train from Python: settings, resuming, interrupts, output, data in memory."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fedshot as fs
from fedshot.api.training import given_settings
from fedshot.cli.main import main
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun
from fedshot.runs.trackers.tracking import Tracker


def trained(folder: Path, small: dict[str, Any], **settings: Any) -> fs.TrainingRun:
    """Train FL-Proto on digits as in the run `first`."""
    given = {"data": "digits", "method": "fl_proto", "clients": 4, "way": 2, "progress": False}
    return fs.train(small, out=folder, **{**given, **settings})


def test_keyword_arguments_are_settings_by_section_by_key_path_and_by_short_name(tmp_path, small):
    run = trained(
        tmp_path / "x", small, seed=3, rounds=1, shot=2,
        method={"name": "fl_proto", "local_steps": 2}, run={"cohort": 2},
        **{"method.optimizer.lr": 0.01, "partition.name": "dirichlet"},
    )  # fmt: skip
    config = run.config
    assert (config["name"], config["seed"]) == ("x", 3)
    assert config["method"]["local_steps"] == 2
    assert config["method"]["optimizer"] == {
        "name": "adam", "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0
    }  # fmt: skip
    assert (config["run"]["rounds"], config["run"]["cohort"]) == (1, 2)
    assert config["partition"]["clients"] == 4
    assert [config[one]["way"] for one in ("episode", "test")] == [2, 2]
    assert [config[one]["shot"] for one in ("episode", "test")] == [2, 2]
    assert config["episode"]["query"] == 5  # from the mapping


def test_a_file_gives_the_run_that_the_command_line_gives(tmp_path, small, first):
    file = tmp_path / "first.yaml"
    file.write_text((first.path / "config.yaml").read_text())
    assert main(["run", "--config", str(file), "--out", str(tmp_path), "--quiet"]) == 0
    told = fs.open_run(tmp_path / "first")
    assert told.result == first.result
    assert fs.train(file, out=tmp_path / "again", progress=False).result == first.result


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"data": "digitz"}, "data.name is 'digitz'. Did you mean 'digits'"),
        ({"ruonds": 3}, "no option 'ruonds'. Did you mean 'rounds'"),
        ({"tracker": "trakker"}, "tracker is 'trakker'"),
    ],
)
def test_errors_are_those_of_the_configuration(tmp_path, small, settings, text):
    with pytest.raises(fs.ConfigError, match=text):
        trained(tmp_path / "x", small, **settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rounds": 1, "run": {"rounds": 2}}, "run.rounds is 1 by the argument 'rounds', and 2 by"),
        ({"run": {"rounds": 2}, "rounds": 1}, "run.rounds is 2 by the argument 'run', and 1 by"),
        ({"shot": 1, "test": {"shot": 5}}, "test.shot is 1 by the argument 'shot', and 5 by"),
        (
            {"method.optimizer.lr": 0.1, "method": {"optimizer": {"lr": 0.2}}},
            r"lr is 0.1 by the argument 'method.optimizer.lr', and 0.2 by 'method'\. Give one",
        ),
        ({"data": "digits", "data.name": "texts"}, "data.name is 'texts' by the argument 'data.n"),
    ],
)
def test_two_arguments_that_contradict_each_other_are_refused(settings, text):
    given = {name: value for name, value in settings.items() if name != "data"}
    with pytest.raises(fs.ConfigError, match=text):
        given_settings(settings.get("data"), given)


def test_two_arguments_may_set_an_option_to_the_same_value():
    both = {"method": "fl_proto", "method.name": "fl_proto", "shot": 1, "test": {"shot": 1}}
    assert given_settings(None, both)[0]["test"] == {"shot": 1}


def test_a_method_given_as_the_configuration_is_named():
    with pytest.raises(fs.ConfigError, match=r"config is 'fl_proto', a method\. Write method="):
        fs.train("fl_proto")


def test_a_run_is_resumed_only_if_asked_and_with_its_settings(tmp_path, small, first):
    folder = tmp_path / "first"
    trained(folder, small, rounds=1)
    with pytest.raises(fs.ConfigError, match=r"holds a run already\. Continue it with resume=True"):
        trained(folder, small)
    with pytest.raises(fs.CheckpointError, match=r"episode\.shot was 1, is 2"):
        trained(folder, small, resume=True, shot=2)
    trained(folder, small, rounds=2, resume=True)
    run = fs.train(out=folder, rounds=3, resume=True, progress=False)
    assert run.result == first.result
    with pytest.raises(fs.CheckpointError, match=r"configuration: seed was 0, is 3\. Restore"):
        fs.train(out=folder, seed=3, shot=1, resume=True, progress=False)
    with pytest.raises(fs.CheckpointError, match="holds no run"):
        fs.train(out=tmp_path / "none", resume=True)
    held = (np.zeros((20, 8, 8), np.uint8), np.arange(20) // 10)
    with pytest.raises(fs.DataError, match="2 classes"):  # it begins a run
        fs.train(data=held, out=tmp_path / "none", resume=True)


def test_a_run_that_trained_no_round_says_why_and_starts_over(tmp_path, small, capsys):
    folder = tmp_path / "first"
    with pytest.raises(fs.QuorumError, match=r"lower the step sizes, in a new run\."):
        trained(folder, small, **{"method.optimizer.lr": 1e30, "method.optimizer.name": "sgd"})
    assert main(["status", str(folder)]) == 0
    assert f"{folder} stopped in round 1: 0 of 4 clients gave a usable" in capsys.readouterr().out
    assert main(["report", str(folder), "--without-data"]) == 0
    page = (folder / "report.html").read_text()
    assert page.count("0 of 4 clients gave a usable reply") == 2
    assert "No reply was lost or rejected" not in page
    with pytest.raises(fs.DataError, match="9-way"):  # refused before anything is deleted
        trained(folder, small, way=9)
    assert (folder / "stopped.json").exists()
    assert main(["run", "--config", str(folder / "config.yaml"), "--out", str(tmp_path)]) == 2
    assert "had trained no round, and starts over" in capsys.readouterr().err
    (folder / "calibration.json").write_text("[]")
    run = trained(folder, small, seed=9, tracker="tensorboard")
    assert not (folder / "stopped.json").exists()
    assert not (folder / "calibration.json").exists()
    events = EventAccumulator(str(folder / "tensorboard")).Reload().Scalars("validation/accuracy")
    assert events[0].value == pytest.approx(run.history["validation_accuracy"].iloc[0])
    assert "resumed" not in (folder / "environment.json").read_text()
    assert (
        run.result.accuracy == trained(tmp_path / "again" / "first", small, seed=9).result.accuracy
    )


def test_a_run_that_another_process_trains_meanwhile_is_kept(tmp_path, small, monkeypatch):
    folder = tmp_path / "first"
    with pytest.raises(fs.QuorumError):
        trained(folder, small, **{"method.optimizer.lr": 1e30, "method.optimizer.name": "sgd"})
    prepared = PreparedRun.__init__

    def slow(self: PreparedRun, *arguments: Any) -> None:
        monkeypatch.undo()
        trained(folder, small)
        prepared(self, *arguments)

    monkeypatch.setattr(PreparedRun, "__init__", slow)
    with pytest.raises(fs.BusyError, match=r"another process has trained in .* meanwhile"):
        trained(folder, small)
    assert fs.open_run(folder).result is not None


def test_a_configuration_alone_is_no_run_to_replace(tmp_path, small):
    (tmp_path / "config.yaml").write_text("# by hand\nseed: 3\n")
    with pytest.raises(fs.ConfigError, match="holds a run already"):
        trained(tmp_path, small)
    assert (tmp_path / "config.yaml").read_text().startswith("# by hand")


def test_an_interrupt_keeps_the_checkpoint_from_which_the_run_continues(
    tmp_path, small, first, monkeypatch
):
    one_round = Experiment._one_round

    def interrupted(self: Experiment) -> Any:
        if self.round == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return one_round(self)

    folder, handler = tmp_path / "first", signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "_one_round", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trained(folder, small)
    assert signal.getsignal(signal.SIGINT) is handler
    run = fs.open_run(folder)
    assert not run.finished
    with pytest.raises(fs.CheckpointError, match="1 of 3 rounds are trained"):
        _ = run.result
    assert trained(folder, small, resume=True).result == first.result


def test_without_progress_nothing_is_printed(tmp_path, small, capfd):
    trained(tmp_path / "x", small, rounds=1, split={"validation": []})  # has a notice
    assert capfd.readouterr() == ("", "")


def test_without_progress_a_tracker_prints_nothing(tmp_path, small, monkeypatch, capfd):
    def opened(kind: str | None, *others: Any) -> Tracker:
        others[-1]("the tracker failed")
        return Tracker(kind, *others)

    monkeypatch.setattr("fedshot.api.training.Tracker", opened)
    trained(tmp_path / "x", small, rounds=1)
    assert capfd.readouterr() == ("", "")
    trained(tmp_path / "y", small, rounds=1, progress=True)
    assert "the tracker failed\n" in capfd.readouterr().err


def test_a_log_gets_the_first_and_the_last_round_of_a_short_run(tmp_path, small, capfd):
    trained(tmp_path / "x", small, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split()[1] for line in err.splitlines()] == ["0/3", "3/3"]


def test_a_notebook_gets_one_output_that_is_updated(tmp_path, small, monkeypatch):
    texts: list[str] = []

    class Output:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            texts.append(data["text/plain"])

    def display(data: dict[str, str], **_: object) -> Output:
        texts.append(data["text/plain"])
        return Output()

    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    trained(tmp_path / "x", small, progress=True)
    assert texts[0] == "starting"
    assert texts[-1].startswith("round 3/3  accuracy")


def test_data_in_memory_are_split_and_recorded_by_their_hash(tmp_path, small, arrays):
    settings = {key: value for key, value in small.items() if key != "split"}
    folder = tmp_path / "x"
    run = trained(folder, settings, data=arrays, rounds=1)
    config = run.config
    assert config["split"]["random"] == [6, 2, 2]
    assert config["data"]["name"] == "memory"
    assert config["data"]["digest"] == fs.as_dataset(arrays).digest
    x, y = arrays
    with pytest.raises(fs.CheckpointError, match="or are in another order: their SHA-256 was"):
        fs.train(data=(255 - x, y), out=folder, rounds=2, resume=True)
    with pytest.raises(fs.DataError, match=r"fedshot\.train\(data=dataset, out=folder"):
        fs.train(out=folder, rounds=2, resume=True)
    again = fs.train(data=arrays, out=folder, rounds=2, resume=True, progress=False)
    assert list(again.history["round"]) == [0, 1, 2]


def test_texts_in_memory_find_their_word_vectors_in_data_dir(tmp_path, small, monkeypatch):
    monkeypatch.delenv("FEDSHOT_DATA", raising=False)
    (tmp_path / "glove").mkdir()
    (tmp_path / "glove" / "glove.6B.100d.txt").write_text(f"a{' 1' * 100}\nb{' 2' * 100}\n")
    texts, labels = ["a b", "b a b"] * 150, [i % 10 for i in range(300)]
    settings = {**small, "model": {"backbone": {"name": "gru", "hidden": 4}}}
    run = trained(
        tmp_path / "x", settings, data=(texts, labels), data_dir=str(tmp_path), rounds=1, clients=2
    )
    assert run.config["data"]["digest"] == fs.as_dataset((texts, labels), data_dir=tmp_path).digest
    with pytest.raises(fs.DataError, match=r"as_dataset\(data, vectors=file\)"):
        trained(tmp_path / "y", settings, data=(texts, labels))


def test_an_object_in_place_of_a_section_is_named_by_its_type(tmp_path, small):
    for path, expected in (
        ("model", "model is a list"),
        ("model.backbone", r"model\.backbone is a"),
    ):
        with pytest.raises(fs.ConfigError, match=f"{expected}.*; expected"):
            trained(tmp_path / "x", {}, data="digits", **{path: [object()]})


def test_options_of_a_source_are_refused_for_data_in_memory(tmp_path, small, arrays):
    expected = "'size' is an option of a source, and the data are in memory"
    with pytest.raises(fs.ConfigError, match=expected):
        trained(tmp_path / "x", small, data=arrays, **{"data.size": 8})


def test_each_dataset_of_a_mapping_is_one_client(tmp_path, small, arrays):
    x, y = arrays
    method = {"name": "fsl_local", "learner_name": "proto", "local_steps": 1}
    data = {f"hospital {k}": (x[k::3], y[k::3]) for k in range(3)}
    run = fs.train(
        small, data=data, method=method, rounds=1, way=2, out=tmp_path / "x", progress=False
    )
    assert run.config["partition"] == {"name": "users", "clients": None}
    assert list(run.clients["client"]) == [0, 1, 2]
    assert run.clients["accuracy"].between(0, 1).all()
