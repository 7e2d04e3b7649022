"""What a classifier and `fedshot predict` do at the edges: labels, links, pipes, odd files."""

from __future__ import annotations

import csv
import io
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from fedshot.cli.main import main
from fedshot.core.errors import ConfigError, InputError
from fedshot.data.files.images import FORMATS, SUFFIXES
from fedshot.reports.answers import AnswersPage, Card, write_answers
from fedshot.reports.run_files import Run
from fedshot.runs.experiment import Experiment
from fedshot.use.calibration import CalibrationWarning, store
from fedshot.use.classifier import FewShotClassifier
from fedshot.use.exporting import export
from fedshot.use.measuring import measure
from fedshot.use.trained import TrainedRun

from .runs import finished
from .test_use_commands import PROTO, folders, predict, run  # noqa: F401  (fixtures)

# ruff: noqa: F811  (fixtures)


def digits(run: Experiment, shot: int = 2, classes: tuple[int, ...] = (8, 9)) -> Any:
    data = run.prepared.dataset
    rows = np.concatenate([data.images_of([c])[:shot] for c in classes])
    return data.pixels[rows], data.y[rows]


@pytest.mark.parametrize(
    "labels", [["a", "a", 1, 1], [("x", 1), ("x", 1), ("y", 2), ("y", 2)], [b"", b"", "b", "b"]]
)
def test_labels_of_any_kind_are_scored_by_equality(run: Experiment, labels: list[Any]) -> None:
    x, _ = digits(run)
    classifier = FewShotClassifier.from_run(run.folder).fit(x, labels)
    right = [a == b for a, b in zip(classifier.predict(x).tolist(), labels, strict=True)]
    assert classifier.score(x, labels) == np.mean(right)
    weights = [0.0, 1.0, 2.0, 5.0]
    wrong = [labels[0], labels[2], labels[2], labels[2]]
    hits = [a == b for a, b in zip(classifier.predict(x).tolist(), wrong, strict=True)]
    assert classifier.score(x, wrong, weights) == np.dot(hits, weights) / 8
    for bad in ([1.0, 2.0], [0.0] * 4, [-1.0, 1, 1, 1], [np.nan, 1, 1, 1]):
        with pytest.raises(InputError, match="sample_weight has shape"):
            classifier.score(x, labels, bad)


class NotAvailable:
    """As pandas' NA: it says of no comparison whether it is true."""

    def __ne__(self, other: object) -> bool:
        raise TypeError("boolean value of NA is ambiguous")

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["a", "b", np.nan, None], r"label of example 2 is missing \(nan, and 1 more\)"),
        (np.array(["a", "b", "a", None], object), r"label of example 3 is missing \(None\)"),
        ([1, 2, 1, None], "label of example 3 is missing"),
        (["a", NotAvailable(), "a", "b"], "label of example 1 is missing"),
        (np.ma.array(["a", "b", "a", "b"], mask=[0, 1, 0, 0]), "label of example 1 is missing"),
        (
            np.array(["2020-01-01", "NaT", "2020-01-02", "NaT"], "M8[D]"),
            "label of example 1 .*and 1 more",
        ),
    ],
)
def test_a_missing_label_is_refused_and_becomes_no_class(
    run: Experiment, labels: Any, said: str
) -> None:
    x, y = digits(run)
    classifier = FewShotClassifier.from_run(run.folder)
    with pytest.raises(InputError, match=f"{said}.*Leave out the examples"):
        classifier.fit(x, labels)
    with pytest.raises(InputError, match=said):
        classifier.fit(x, y).score(x, labels)


def test_a_first_batch_may_be_of_one_class_where_others_are_named(run: Experiment) -> None:
    x, y = digits(run)
    later = FewShotClassifier.from_run(run.folder)
    later.partial_fit(x[:2], y[:2], classes=[8, 9])
    with pytest.raises(InputError, match="all examples so far are of one class, 8"):
        later.predict(x)
    later.partial_fit(x[2:], y[2:])
    at_once = FewShotClassifier.from_run(run.folder).fit(x, y)
    np.testing.assert_array_equal(later.predict_proba(x), at_once.predict_proba(x))
    with pytest.raises(InputError, match="all of one class"):
        FewShotClassifier.from_run(run.folder).partial_fit(x[:2], y[:2])


def test_what_is_refused_leaves_no_examples_behind(run: Experiment) -> None:
    x, y = digits(run)
    classifier = FewShotClassifier.from_run(run.folder).fit(x, y)
    before = classifier.predict_proba(x)
    classifier.set_params(accept_unknown=0.05)
    for again in (classifier.fit, classifier.partial_fit):
        with pytest.raises(ConfigError, match="needs a calibration"):
            again(x, [1, 2, 3, 4])
        assert classifier.classes_.tolist() == [8, 9]
        assert len(classifier.support_) == 4
    with pytest.raises(ConfigError, match="needs a calibration"):
        classifier.predict(x)
    np.testing.assert_array_equal(
        classifier.set_params(accept_unknown=None).predict_proba(x), before
    )


@pytest.mark.parametrize(
    ("name", "value"), [("run", "elsewhere"), ("client", 1), ("calibrated", False)]
)
def test_what_examples_were_fitted_with_cannot_be_changed(
    run: Experiment, name: str, value: Any
) -> None:
    x, y = digits(run)
    classifier = FewShotClassifier.from_run(run.folder).fit(x, y).set_params(**{name: value})
    with pytest.raises(ConfigError, match=rf"{name} is .*, but .*Call fit again"):
        classifier.predict(x)


def test_what_is_no_run_no_client_and_no_format_is_refused_in_plain_words(run: Experiment) -> None:
    opened = TrainedRun(run.folder)
    asked: list[tuple[Callable[[], Any], str]] = [
        (lambda: FewShotClassifier.from_run(run.folder, client=0), "clients of fl_proto keep no m"),
        (lambda: FewShotClassifier.from_run(5), "run is 5; expected a path"),  # type: ignore[arg-type]
        (lambda: FewShotClassifier.from_run(None), "run is None; expected a path"),  # type: ignore[arg-type]
        (lambda: TrainedRun(b"runs/x"), "folder is b'runs/x'; expected a path"),  # type: ignore[arg-type]
        (lambda: Run.read(5), "folder is 5; expected a path"),  # type: ignore[arg-type]
        (lambda: export("runs/x", "onnx", Path()), "run is 'runs/x'; expected an object of type T"),  # type: ignore[arg-type]
        (lambda: export(opened, "pickle", Path()), "to is 'pickle'. Valid: onnx"),  # type: ignore[arg-type]
        (lambda: measure(run.folder), "expected an object of type TrainedRun. Open one with"),  # type: ignore[arg-type]
    ]
    for call, words in asked:
        with pytest.raises(ConfigError) as error:
            call()
        assert words in str(error.value)


def test_an_answer_that_is_also_a_class_is_refused(run: Experiment) -> None:
    x, _ = digits(run)
    labels = ["none of these", "none of these", "b", "b"]
    FewShotClassifier.from_run(run.folder).fit(x, labels)  # nothing is turned away
    with pytest.raises(InputError, match="which is also one of the classes"):
        FewShotClassifier.from_run(run.folder, accept_unknown=0.05).fit(x, labels)


def test_a_page_keeps_a_class_and_what_is_turned_away_apart(tmp_path: Path) -> None:
    cards = [Card(str(i), "none", 0.9, "none", bool(i), "words") for i in range(2)]
    write_answers(tmp_path / "p.html", AnswersPage("t", {}, {"none": ["a"]}, cards))
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert text.count("<h3") == 3
    assert "1 look like none of them" in text


def test_a_page_has_some_of_every_answer_where_there_are_too_many(tmp_path: Path) -> None:
    many = {"a": 700, "b": 3, "c": 650}
    cards = [Card(f"{k}{i}", k, 0.9, k, False, "words") for k, n in many.items() for i in range(n)]
    write_answers(tmp_path / "p.html", AnswersPage("t", {}, {k: ["x"] for k in many}, cards))
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    shown = {k: len(re.findall(f'class="file" title="{k}', text)) for k in many}
    assert shown == {"a": 299, "b": 3, "c": 298}
    assert [f"And {n} more, in the CSV or JSON" in text for n in (401, 352)] == [True, True]


def test_a_threshold_of_another_shape_is_told(tmp_path: Path) -> None:
    made = finished(tmp_path / "run", PROTO, {"run": {"rounds": 1}})
    store(made.folder, measure(TrainedRun(made.folder), way=2, shot=2, episodes=8))
    classifier = FewShotClassifier.from_run(made.folder, accept_unknown=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classifier.fit(*digits(made, 2))
    words = rf"Run `fedshot calibrate {made.folder} --way 2 --shot 5`"
    with pytest.warns(CalibrationWarning, match=words):
        classifier.fit(*digits(made, 5))
    x, y = digits(made, 2)
    with pytest.warns(
        CalibrationWarning, match="2 to 3 examples of each: the share of .* may differ from 0.1"
    ):
        classifier.fit(np.concatenate([x, x[:1]]), np.concatenate([y, y[:1]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FewShotClassifier.from_run(made.folder).fit(*digits(made, 5))  # no threshold is asked for


def test_the_threshold_accepts_about_the_share_asked_for_of_strangers(tmp_path: Path) -> None:
    """Strangers are of classes that nothing was trained or calibrated on."""
    split = {"base": ["0", "1", "2"], "validation": ["3-6"], "novel": ["7-9"]}
    few = {"episode": {"way": 3}, "run": {"rounds": 4}, "test": {"way": 2}}
    made = finished(tmp_path / "run", PROTO, {"split": split}, few)
    found = measure(TrainedRun(made.folder), way=2, shot=5, episodes=200)
    store(made.folder, found)
    data, random = made.prepared.dataset, np.random.default_rng(0)
    classifier = FewShotClassifier.from_run(made.folder, accept_unknown=0.2)
    accepted, kept = [], []
    for u in range(45):
        *known, stranger = np.roll([7, 8, 9], u)
        rows = {c: random.permutation(data.images_of([int(c)])) for c in (*known, stranger)}
        support = np.concatenate([rows[c][:5] for c in known])
        classifier.fit(data.pixels[support], data.y[support])
        said = classifier.predict(data.pixels[rows[stranger][:20]])
        accepted.append(np.mean(said != "none of these"))
        own = np.concatenate([rows[c][5:15] for c in known])
        kept.append(np.mean(classifier.predict(data.pixels[own]) != "none of these"))
    # Another threshold would do: accepting all accepts all strangers, and none turns all away.
    assert np.mean(accepted) == pytest.approx(0.2, abs=0.15)
    assert np.mean(kept) > np.mean(accepted) + 0.1
    assert found.at(0.2).false_accept == pytest.approx(0.2, abs=0.1)


def test_predict_prints_what_a_threshold_rests_on(
    run: Experiment, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(run.folder), "--shot", "2", "--episodes", "8"]) == 0
    capsys.readouterr()
    assert predict(run, folders, "--none-of-these", "0.1") == 0
    err = capsys.readouterr().err
    assert f"Run `fedshot calibrate {run.folder} --way 2 --shot 5`" in err
    assert "expected calibration error there" in err
    assert "are rejected. On the validation classes, this accepted" in err
    (run.folder / "calibration.json").unlink()


def test_links_in_a_circle_and_pipes_are_skipped(
    run: Experiment, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, query = folders
    (query / "loop.png").symlink_to(query / "loop.png")
    os.mkfifo(query / "pipe.png")
    (query / "photo.HEIC").write_bytes(b"x")
    (query / "scan.avif").write_bytes(b"x")
    assert predict(run, folders) == 0
    err = capsys.readouterr().err
    assert "loop.png is a broken link" in err
    assert "pipe.png cannot be read (it is not a regular file)" in err
    assert "2 skipped, 2 files of other kinds left out (.heic 1, .avif 1)" in err


def test_names_do_no_harm_to_terminals_and_spreadsheets(
    run: Experiment, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    support, query = folders
    (query / "8-8.png").rename(query / "=cmd().png")
    (query / "\x1b[31mred.png").write_bytes(b"no picture")
    (query / "8-9.png").rename(query / "\n +cmd().png")
    (support / "digit 8").rename(support / "@digit 8")
    assert predict(run, folders) == 0
    out, err = capsys.readouterr()
    rows = list(csv.reader(io.StringIO(out)))
    assert {"'=cmd().png", "'\n +cmd().png"} <= {row[0] for row in rows}
    assert {row[1] for row in rows[1:]} <= {"'@digit 8", "digit 9"}
    assert "\x1b" not in err
    assert "\N{REPLACEMENT CHARACTER}[31mred.png" in err


def test_numbers_of_nothing_are_refused_and_places_are_checked_first(
    run: Experiment, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for option, told in (
        ("--episodes", "episodes is 0; expected at least 4"),
        ("--way", "way is 0, but there are 3 validation classes"),
        ("--shot", "shot is 0; expected at least 1"),
    ):
        assert main(["calibrate", str(run.folder), option, "0"]) == 2
        assert told in capsys.readouterr().err
    opened: list[object] = []
    first = TrainedRun.__init__
    monkeypatch.setattr(
        TrainedRun, "__init__", lambda self, *a, **k: (opened.append(a), first(self, *a, **k))[1]
    )
    monkeypatch.setattr("fedshot.cli.use.predict_files", lambda *_: pytest.fail("answered first"))
    assert predict(run, folders, "--to", folders[0] / "missing" / "out.csv") == 2
    assert "missing is not a folder. Create it" in capsys.readouterr().err
    assert len(opened) == 1


def test_pictures_of_other_formats_are_not_opened_by_any_name(
    run: Experiment, tmp_path: Path
) -> None:
    assert {s.lstrip(".") for s in SUFFIXES} == {
        "png", "jpg", "jpeg", "bmp", "webp", "gif", "tif", "tiff", "ppm",
    }  # fmt: skip
    for kind in FORMATS:
        if kind != "WEBP" or features.check("webp"):
            place = tmp_path / f"ok.{kind.lower()}"
            Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(place, kind)
            assert FewShotClassifier.from_run(run.folder).inputs([place]).shape == (1, 8, 8, 1)
    Image.new("RGB", (8, 8)).save(tmp_path / "script.eps", "EPS")
    (tmp_path / "script.eps").rename(tmp_path / "script.png")
    with pytest.raises(InputError, match=r"\(it is none of PNG, JPEG"):
        FewShotClassifier.from_run(run.folder).inputs([tmp_path / "script.png"])


def test_a_single_picture_is_not_taken_for_grey_ones(run: Experiment) -> None:
    inputs = FewShotClassifier.from_run(run.folder).inputs
    colour = np.zeros((8, 6, 3), np.uint8)
    with pytest.raises(InputError, match=r"one image with 3 channels or 8 grey images of 6 x 3"):
        inputs(colour)
    assert inputs([colour]).shape == (1, 8, 8, 1)
    assert inputs(colour[..., None]).shape == (8, 8, 8, 1)


@pytest.mark.parametrize("name", ["transductive", "one by one"])
def test_transductive_answers_do_not_depend_on_blocks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"model": {"backbone": {"name": "conv4", "width": 4}}}
    if name == "transductive":
        changes["model"]["norm_policy"] = "transductive"  # type: ignore[assignment]
    made = finished(tmp_path / "run", PROTO, changes, {"run": {"rounds": 1}})
    data = made.prepared.dataset
    for c in (8, 9):
        (tmp_path / "support" / str(c)).mkdir(parents=True)
        (tmp_path / "query").mkdir(exist_ok=True)
        for i, row in enumerate(data.images_of([c])[:6]):
            place = tmp_path / ("query" if i > 1 else f"support/{c}") / f"{c}-{i}.png"
            Image.fromarray(data.pixels[row][..., 0]).save(place)
    asked: list[int] = []
    logits = FewShotClassifier.logits
    monkeypatch.setattr(
        FewShotClassifier, "logits", lambda self, x: (asked.append(len(x)), logits(self, x))[1]
    )
    monkeypatch.setattr("fedshot.use.folders._BLOCK", 3)
    place = (tmp_path / "support", tmp_path / "query")
    assert predict(made, place) == 0
    assert asked == ([8] if name == "transductive" else [3, 3, 2])
    monkeypatch.setattr("fedshot.use.folders.WHOLE", 7)
    assert predict(made, place) == (2 if name == "transductive" else 0)
    told = "holds more than 7 files, and fl_proto predicts all of them together"
    assert (told in capsys.readouterr().err) == (name == "transductive")
