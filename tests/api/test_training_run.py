"""A run as Python sees it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

import fedshot as fs
from fedshot.cli.main import main
from fedshot.use.trained import TrainedRun


def test_the_result_is_that_of_the_run_folder(first):
    stored = json.loads((first.path / "result.json").read_text())
    assert first.result.accuracy == stored["test"]["accuracy"]
    assert first.result.interval == stored["test"]["interval"]
    assert first.result.round == stored["round"]
    assert first.result.baselines["raw pixels"][0] == stored["baselines"]["raw pixels"]["accuracy"]
    text = repr(first.result)
    assert f"{100 * first.result.accuracy:.2f} ± " in text
    assert "20 2-way 1-shot test episodes of classes that no client trained on" in text
    assert "chosen by validation" in text


def test_a_run_is_tested_on_other_episodes(first, capsys):
    stored = first.result
    assert first.evaluate() == stored
    found = first.evaluate(shot=3, episodes=10)
    assert (found.tested.shot, found.episodes) == (3, 10)
    assert found.tasks != stored.tasks
    assert main(["evaluate", str(first.path), "--shot", "3", "--episodes", "10", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (found.accuracy, found.interval) == (
        said["result"]["accuracy"], said["result"]["interval"],
    )  # fmt: skip
    assert found.baselines["raw pixels"][0] == said["baselines"]["raw pixels"]["accuracy"]
    assert first.result == stored
    with pytest.raises(fs.ConfigError, match="shots"):
        first.evaluate(shots=3)


def test_a_run_on_data_in_memory_is_tested_again_and_calibrated(small, arrays, tmp_path):
    x, y = arrays
    options = {"method": "fl_proto", "clients": 4, "way": 2, "rounds": 1}
    run = fs.train(small, data=(x, y), **options, out=tmp_path / "x", progress=False)
    assert run.evaluate((x, y)) == run.result
    assert run.evaluate((x, y), shot=2).tested.shot == 2
    with pytest.raises(fs.DataError, match=r"pass it: to fedshot.train.*or to `evaluate`"):
        fs.open_run(run.path).evaluate(shot=2)
    with pytest.raises(fs.CheckpointError, match="are not those that"):
        run.evaluate((x[::-1], y))
    with pytest.raises(fs.DataError, match="was trained on other data"):
        run.calibrate((x[::-1], y), episodes=8)
    found = run.calibrate((x, y), episodes=8)
    assert (found.way, found.episodes) == (2, 8)
    held = json.loads((run.path / "calibration.json").read_text())["calibrations"]
    assert [one["temperature"] for one in held] == [found.temperature]


def test_the_history_has_a_row_for_each_round(first):
    history = first.history
    assert list(history["round"]) == [0, 1, 2, 3]
    records = [json.loads(x) for x in (first.path / "metrics.jsonl").read_text().splitlines()]
    assert history["loss"].iloc[1:].tolist() == [r["metrics"]["loss"] for r in records[1:]]
    assert math.isnan(history["loss"][0])
    assert history["mb_up"].tolist() == [r["bytes_up"] / 1e6 for r in records]
    validated = history.dropna(subset="validation_accuracy")
    assert list(validated["round"]) == [0, 3]


def test_the_history_of_a_private_run_has_its_epsilon(small, tmp_path):
    run = fs.train(
        small, data="digits", method="fl_proto", clients=4, way=2, rounds=1, out=tmp_path / "x",
        progress=False, privacy={"name": "client", "noise": 1.0},
    )  # fmt: skip
    spent = json.loads((run.path / "result.json").read_text())["privacy"]["epsilon"]
    assert run.history["epsilon"].tolist() == [0, spent]


def test_a_metric_with_the_name_of_a_column_is_kept(first, tmp_path):
    for name in ("config.yaml", "metrics.jsonl"):
        text = (first.path / name).read_text()
        (tmp_path / name).write_text(text.replace('"loss"', '"faults"'))
    history = fs.open_run(tmp_path).history
    assert history["faults"].tolist() == [0, 0, 0, 0]
    assert history["metric_faults"].iloc[1:].tolist() == first.history["loss"].iloc[1:].tolist()


def test_clients_that_the_data_name_are_known_by_their_names(small, arrays, tmp_path):
    x, y = arrays
    held = {f"<b>ward {k}": (x[k::4], y[k::4]) for k in (3, 0, 1, 2)}
    method = {"name": "fsl_local", "learner_name": "proto", "local_steps": 1}
    out = tmp_path / "x"
    run = fs.train(small, data=held, method=method, way=2, rounds=1, out=out, progress=False)
    assert run.clients["name"].tolist() == list(held)
    query = x[20:24]
    first, by_number, other = (
        run.classifier(client=c).fit(x[:4], list("abab")).predict_proba(query)
        for c in ("<b>ward 3", 0, "<b>ward 0")
    )
    assert np.array_equal(first, by_number)
    assert not np.array_equal(first, other)
    with pytest.raises(
        fs.ConfigError, match=r"'ward'; the clients .* are 0 \(<b>ward 3\), 1 \(<b>"
    ):
        run.classifier(client="ward")
    page = run.report(tmp_path / "page.html").read_text()
    assert "client 0 (&amp;lt;b&amp;gt;ward 3)" in page or r"client 0 (\u0026lt;b" in page
    assert main(["export", str(out), "--to", "safetensors", "--client", "<b>ward 1"]) == 0
    assert "the encoder of client 2" in (out / "export" / "README.md").read_text()


def test_a_text_that_is_the_name_of_a_client_and_the_number_of_another_is_refused(first):
    info = replace(TrainedRun(first.path).dataset_info, client_names=("2", "0", "1", "x"))
    assert [info.client_number(client) for client in (0, "x", "3")] == [0, 3, 3]
    with pytest.raises(fs.ConfigError, match=r"'0', the name of client 1 and the number of anothe"):
        info.client_number("0")


def test_clients_with_models_have_accuracies(second):
    clients = second.clients
    assert list(clients["client"]) == [0, 1, 2, 3]
    assert clients["accuracy"].tolist() == [second.result.clients[c] for c in range(4)]


def test_the_plot_is_a_figure_to_edit(first, tmp_path):
    figure = first.plot()
    assert isinstance(figure, Figure)
    (axes,) = figure.axes
    assert axes.get_ylabel() == "accuracy on validation episodes (%)"
    line = axes.lines[0]
    validated = first.history.dropna(subset="validation_accuracy")
    assert np.allclose(line.get_ydata(), 100 * validated["validation_accuracy"])
    axes.set_title("edited")
    figure.savefig(tmp_path / "x.pdf")
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_it_is_shown_as_text_and_as_html(first, tmp_path):
    assert repr(first).startswith(f"<TrainingRun {first.path}: fl_proto on digits, 3 of 3 rounds, ")
    assert "fl_proto</td>" in first._repr_html_()
    folder = tmp_path / "<b>"
    folder.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (folder / name).write_bytes((first.path / name).read_bytes())
    run = fs.open_run(folder)
    assert "unfinished" in repr(run)
    assert "<b>" not in run._repr_html_()


def test_it_has_a_report_and_a_classifier(first, arrays, tmp_path):
    page = first.report(tmp_path / "page.html", with_data=False)
    assert page == tmp_path / "page.html"
    assert "fl_proto" in page.read_text()
    x, y = arrays
    classifier = first.classifier().fit(x[:6], y[:6])
    assert set(classifier.predict(x[6:9])) <= set(y[:6])


def test_a_configuration_can_be_trained_again(first, tmp_path):
    run = fs.train({**first.config, "seed": 1}, out=tmp_path / "x", progress=False)
    assert run.result.tasks == first.result.tasks
    assert run.config == {**first.config, "seed": 1}


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(fs.CheckpointError, match="holds no run"):
        fs.open_run(tmp_path)
