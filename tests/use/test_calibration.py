"""Confidence: temperatures, calibration errors and thresholds against closed forms and counts."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.locks import locked
from fedshot.core.seeds import Key
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.protocol.method import Prediction
from fedshot.use.calibration import FILE, calibration_of, store, stored
from fedshot.use.classifier import FewShotClassifier
from fedshot.use.confidence import (
    LabelledLogits,
    error_interval,
    expected_calibration_error,
    share_interval,
    signals,
    temperature,
    thresholds,
    thresholds_of,
)
from fedshot.use.measuring import _halves, _labelled, measure
from fedshot.use.trained import TrainedRun
from system.runs import OWN, finished

PROTO: dict[str, Any] = {
    "method": {"name": "fl_proto", "local_steps": 2},
    "split": {"base": ["0-4"], "validation": ["5-7"], "novel": ["8", "9"]},
}


def drawn(heat: float, n: int = 20000) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits, `heat` times those that the labels are drawn from."""
    random = torch.Generator().manual_seed(0)
    true = torch.randn(n, 4, generator=random, dtype=torch.float64) * 2
    y = torch.multinomial(torch.softmax(true, 1), 1, generator=random)[:, 0]
    return true * heat, y


@pytest.mark.parametrize("heat", [0.05, 1.0, 30.0])
def test_the_temperature_that_made_the_labels_is_found(heat: float) -> None:
    logits, y = drawn(heat)
    found, end = temperature(logits, y)
    assert found == pytest.approx(heat, rel=0.03)
    assert not end
    scale = torch.tensor(found, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.cross_entropy(logits / scale, y).backward()
    assert scale.grad is not None
    assert abs(float(scale.grad)) * found < 1e-5  # the least cross-entropy


def test_answers_that_are_all_right_end_at_the_bound() -> None:
    logits = torch.eye(3, dtype=torch.float64).repeat(4, 1)
    y = torch.arange(3).repeat(4)
    assert temperature(logits, y) == (1.0, "cold")
    assert temperature(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))[1] != "cold"
    assert temperature(logits, (y + 1) % 3) == (1.0, "hot")  # surer of what is wrong


def test_the_calibration_error_of_made_up_bins() -> None:
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.62, 0.38], [0.62, 0.38]], dtype=torch.float64)
    y = torch.tensor([0, 1, 0, 0])  # right: 1 of 2 at 0.9, 2 of 2 at 0.62
    assert expected_calibration_error(p, y) == pytest.approx((2 * 0.4 + 2 * 0.38) / 4)
    assert expected_calibration_error(torch.eye(2), torch.tensor([0, 1])) == 0
    logits, y = drawn(1.0)
    assert expected_calibration_error(torch.softmax(logits, 1), y) < 0.015


def test_thresholds_accept_no_more_than_asked_and_are_measured_elsewhere() -> None:
    random = torch.Generator().manual_seed(1)
    logits, y = drawn(1.0, 4000)
    y = torch.where(torch.rand(4000, generator=random) < 0.5, -1, y)
    half = torch.arange(4000) % 2 == 1
    sure = torch.softmax(logits, 1).max(1).values
    episode = torch.arange(4000) // 20
    lines = thresholds_of(sure.numpy(), (y >= 0).numpy(), half.numpy(), episode.numpy())
    for one in lines:
        assert one.interval is not None
        assert one.interval[0] <= one.false_accept <= one.interval[1]
        fitted, measured = sure[(y < 0) & ~half], sure[(y < 0) & half]
        assert float((fitted >= one.threshold).double().mean()) <= one.asked
        assert float((fitted >= one.threshold).double().mean()) >= one.asked - 0.002
        assert one.false_accept == float((measured >= one.threshold).double().mean())
        known = sure[(y >= 0) & half]
        assert one.false_reject == float((known < one.threshold).double().mean())


def test_the_signal_that_tells_better_is_chosen() -> None:
    """Unknown examples have logits as far apart as the others', and a hundred lower."""
    logits, y = drawn(1.0, 400)
    unknown = torch.arange(400) % 4 < 2
    logits = logits - 100.0 * unknown[:, None]
    half = torch.arange(400) % 2 == 1
    marked = LabelledLogits(logits, torch.where(unknown, -1, y), half, torch.arange(400) // 8)
    found = thresholds(marked, 1.0)
    assert found["signal"] == "logit"
    assert found["auroc"] == 1.0
    assert [one.false_reject for one in found["unknown"]] == [0.0] * 7


def test_intervals_are_as_wide_as_episodes_differ() -> None:
    """Every answer of an episode is alike, so that there are as many drawings as episodes."""
    random = torch.Generator().manual_seed(2)
    alike = torch.rand(400, generator=random) < 0.3
    low, high = share_interval(alike.repeat_interleave(15), torch.arange(400).repeat_interleave(15))
    exact = 1.96 * float(alike.double().std()) / 20
    share = float(alike.double().mean())
    assert (low, high) == pytest.approx((share - exact, share + exact), abs=0.15 * exact)
    p = torch.tensor([[0.9, 0.1]], dtype=torch.float64).repeat(6000, 1)
    y = (~alike).long().repeat_interleave(15)  # right where `alike`, so the error is 0.9 - share
    none = share_interval(torch.zeros(60, dtype=torch.bool), torch.arange(60) // 15)
    assert none == (0.0, pytest.approx(stats.binomtest(0, 4).proportion_ci().high))
    found = error_interval(p, y, torch.arange(400).repeat_interleave(15))
    assert found == pytest.approx((0.9 - high, 0.9 - low), abs=1e-9)


def test_the_halves_share_no_image_and_every_client_is_in_both(folder: Path) -> None:
    run = TrainedRun(folder)
    data, rows = run.federated.dataset, run.federated.rows.validation
    for query, apart in ((5, True), (100, False)):
        spec = EpisodeSpec(3, 1, query)
        tasks, said = _halves(data, rows, [5, 6, 7], spec, 13, Key(0))
        assert (len(tasks), said) == (13, apart)
        first, second = (
            set(np.concatenate([tasks.support[part].ravel(), tasks.query[part].ravel()]).tolist())
            for part in (slice(0, 7), slice(7, 13))
        )
        assert first | second <= set(rows.tolist())
        assert bool(first & second) != apart
    answers = [Prediction(u, u % 6, torch.eye(2)) for u in range(24)]
    marked = _labelled(answers, [torch.arange(2)] * 24)
    for half in (True, False):
        assert {u % 6 for u in marked.episode[marked.measures == half].tolist()} == set(range(6))


def test_two_that_calibrate_at_once_keep_both_entries(folder: Path, tmp_path: Path) -> None:
    found = measure(TrainedRun(folder), way=2, shot=1, episodes=4)
    other = replace(found, shot=7)
    with locked(tmp_path / ".calibration.lock"):
        waiting = Thread(target=store, args=(tmp_path, other))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        text = json.dumps({"calibrations": [asdict(found)]})
        (tmp_path / FILE).write_text(text, encoding="utf-8")
    waiting.join()
    assert stored(tmp_path) == [found, other]


def test_a_temperature_at_an_end_changes_nothing_and_is_told(folder: Path) -> None:
    found = measure(TrainedRun(folder), way=2, shot=1, episodes=8)
    for end, words in (("cold", "All predictions"), ("hot", "Predictions are no better")):
        one = replace(found, temperature=1.0, end=end)  # type: ignore[arg-type]
        assert f"temperature 1: not fitted. {words}" in str(one)
    assert re.search(r"% after \([\d.]+ to [\d.]+\)", str(found))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs") / "run"
    finished(made, PROTO, {"test": {"way": 2}})
    return made


def test_what_was_measured_is_stored_and_used(folder: Path) -> None:
    run = TrainedRun(folder)
    found = measure(run, way=2, shot=1, episodes=60)
    again = measure(run, way=2, shot=1, episodes=60)
    assert found == again
    assert found.temperature != 1
    assert found.ece_after != found.ece_before
    store(folder, measure(run, way=2, shot=5, episodes=20))
    store(folder, measure(run, way=2, shot=1, episodes=20))
    store(folder, found)
    assert [(one.way, one.shot) for one in stored(folder)] == [(2, 1), (2, 5)]
    data = run.federated.dataset
    rows = np.concatenate([data.images_of([c])[:1] for c in (8, 9)])
    x, y = data.pixels[rows], data.y[rows]
    classifier = FewShotClassifier.from_run(folder).fit(x, y)
    assert classifier.calibration_ == found
    expected = torch.softmax(classifier.logits(x).double() / found.temperature, 1)
    np.testing.assert_array_equal(classifier.predict_proba(x), expected.numpy())
    plain = FewShotClassifier.from_run(folder, calibrated=False).fit(x, y)
    np.testing.assert_array_equal(
        plain.predict_proba(x), torch.softmax(plain.logits(x).double(), 1).numpy()
    )
    five = np.concatenate([data.images_of([c])[:4] for c in (8, 9)])
    classifier.fit(data.pixels[five], data.y[five])
    assert classifier.calibration_.shot == 5  # type: ignore[union-attr]


def test_what_is_none_of_the_classes_is_turned_away(folder: Path) -> None:
    run = TrainedRun(folder)
    found = measure(run, way=2, shot=1, episodes=60)
    store(folder, found)
    data = run.federated.dataset
    rows = np.concatenate([data.images_of([c])[:1] for c in (8, 9)])
    many = data.pixels[:300]
    classifier = FewShotClassifier.from_run(folder, accept_unknown=0.07, unknown_label=-1)
    classifier.fit(data.pixels[rows], data.y[rows])
    line = found.at(0.07)
    assert line.asked == 0.05
    said, logits = classifier.predict(many), classifier.logits(many)
    assert {-1} < set(said.tolist())
    sure = signals(logits, found.temperature)[found.signal]
    np.testing.assert_array_equal(said == -1, (sure < line.threshold).numpy())
    with pytest.raises(ConfigError, match=r"accept_unknown is 0.001; expected a share from 0.01"):
        FewShotClassifier.from_run(folder, accept_unknown=0.001).fit(
            data.pixels[rows], data.y[rows]
        )


def test_clients_that_are_tested_on_their_own_classes_leave_none_to_measure_on(
    tmp_path: Path,
) -> None:
    finished(tmp_path / "run", OWN, {"run": {"rounds": 1, "choose": "last"}})
    with pytest.raises(
        ConfigError, match="tests its clients on their own classes and has no validation"
    ):
        measure(TrainedRun(tmp_path / "run"))


def test_a_threshold_needs_a_measurement(tmp_path: Path) -> None:
    made = finished(tmp_path / "run", PROTO, {"test": {"way": 2}, "run": {"rounds": 1}})
    data = made.prepared.dataset
    rows = np.concatenate([data.images_of([c])[:1] for c in (8, 9)])
    classifier = FewShotClassifier.from_run(tmp_path / "run", accept_unknown=0.05)
    with pytest.raises(ConfigError, match=r"needs a calibration. Run `fedshot calibrate"):
        classifier.fit(data.pixels[rows], data.y[rows])
    store(tmp_path / "run", measure(TrainedRun(tmp_path / "run"), way=3, shot=1, episodes=8))
    with pytest.raises(ConfigError, match="there are only 3 validation classes"):
        classifier.fit(data.pixels[rows], data.y[rows])


def test_what_cannot_be_measured_is_told(folder: Path, tmp_path: Path) -> None:
    run = TrainedRun(folder)
    with pytest.raises(ConfigError, match=r"way is 4, but there are 3 validation classes"):
        measure(run, way=4)
    with pytest.raises(ConfigError, match="episodes is 3; expected at least 4"):
        measure(run, way=2, episodes=3)
    finished(tmp_path / "run", {"method": PROTO["method"]}, {"run": {"rounds": 1}})
    with pytest.raises(ConfigError, match="has no validation classes"):
        measure(TrainedRun(tmp_path / "run"))


def test_with_two_validation_classes_the_fix_is_a_run_with_three(tmp_path: Path) -> None:
    split = {"base": ["0-5"], "validation": ["6", "7"], "novel": ["8", "9"]}
    finished(tmp_path / "run", PROTO, {"split": split, "test": {"way": 2}, "run": {"rounds": 1}})
    run = TrainedRun(tmp_path / "run")
    needed = r"at least three.* \(split\.validation\)"
    with pytest.raises(ConfigError, match=rf"way is 3, .* 2 validation .*; expected 2\..*{needed}"):
        measure(run, way=3)
    found = measure(run, episodes=8)
    with pytest.raises(ConfigError, match=rf"only 2 validation classes\. Thresholds .*{needed}"):
        found.at(0.05)


def test_a_measurement_of_another_round_or_a_damaged_one_is_not_used(tmp_path: Path) -> None:
    made = finished(tmp_path / "run", PROTO, {"test": {"way": 2}, "run": {"rounds": 1}})
    data = made.prepared.dataset
    rows = np.concatenate([data.images_of([c])[:1] for c in (8, 9)])
    store(tmp_path / "run", measure(TrainedRun(tmp_path / "run"), episodes=8))
    path = tmp_path / "run" / FILE
    held = json.loads(path.read_text(encoding="utf-8"))
    held["calibrations"][0]["round"] += 1
    path.write_text(json.dumps(held), encoding="utf-8")
    classifier = FewShotClassifier.from_run(tmp_path / "run").fit(data.pixels[rows], data.y[rows])
    assert classifier.calibration_ is None
    path.write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"calibration.json is damaged: .*Delete it and run"):
        classifier.fit(data.pixels[rows], data.y[rows])


def test_clients_are_measured_together_or_one_by_one(tmp_path: Path) -> None:
    local = {"method": {"name": "fsl_local", "local_steps": 1}}
    split = {"split": PROTO["split"], "test": {"way": 2}, "run": {"rounds": 1, "cohort": 6}}
    finished(tmp_path / "run", local, split)
    run = TrainedRun(tmp_path / "run")
    store(tmp_path / "run", measure(run, episodes=12))
    store(tmp_path / "run", measure(run, episodes=12, client=2))
    data = run.federated.dataset
    rows = np.concatenate([data.images_of([c])[:1] for c in (8, 9)])
    for client, own in ((2, 2), (3, None)):
        classifier = FewShotClassifier.from_run(tmp_path / "run", client=client)
        classifier.fit(data.pixels[rows], data.y[rows])
        assert classifier.calibration_.client == own  # type: ignore[union-attr]


def test_none_of_these_takes_the_nearest_measurement_that_has_thresholds(tmp_path: Path) -> None:
    """With three validation classes a 3-way measurement has none, whatever is asked for."""
    finished(tmp_path / "run", PROTO, {"test": {"way": 3}, "split": {"validation": ["5", "6", "7"],
                                                                      "novel": ["8", "9", "4"],
                                                                      "base": ["0-3"]},
                                       "episode": {"way": 4}})  # fmt: skip
    run = TrainedRun(tmp_path / "run")
    wide = measure(run, way=3, shot=1, episodes=8)
    assert not wide.unknown
    store(run.folder, wide)
    assert calibration_of(run, 3, 1, None, thresholds=True) == wide
    narrow = measure(run, way=2, shot=1, episodes=8)
    store(run.folder, narrow)
    assert calibration_of(run, 3, 1, None) == wide
    assert calibration_of(run, 3, 1, None, thresholds=True) == narrow
