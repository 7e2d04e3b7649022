"""The classifier of a run: it answers as the run's own test does, and takes what people have."""

from __future__ import annotations

import copy
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from covering import slow
from fedshot.core.errors import CheckpointError, ConfigError, InputError
from fedshot.evaluation.episodic_test import EpisodicTest
from fedshot.runs.dataset_info import FILE, DatasetInfo
from fedshot.runs.experiment import Experiment
from fedshot.use.classifier import FewShotClassifier
from system.runs import CHOOSING, OWN, finished

PROTO: dict[str, Any] = {"method": {"name": "fl_proto", "local_steps": 2}}
LINEAR: dict[str, Any] = {"model": {"head": {"name": "linear", "way": 5}}}
CONV: dict[str, Any] = {"model": {"backbone": {"name": "conv4", "width": 4}}}
METHODS: dict[str, tuple[dict[str, Any], ...]] = {
    "prototypes": (PROTO,),
    "prototypes, conv": (PROTO, CONV),
    "probe": ({"method": {"name": "fedavg_probe", "probe": "ridge", "local_steps": 2}},),
    "maml": ({"method": {"name": "fedfsl_naive", "local_steps": 1}}, LINEAR),
    "maml, conv": ({"method": {"name": "fedfsl_naive", "local_steps": 1}}, LINEAR, CONV),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    made = finished(tmp_path_factory.mktemp("runs") / "run", PROTO, CHOOSING)
    made.result()
    return made


@pytest.fixture
def fitted(run: Experiment) -> FewShotClassifier:
    x, y = examples(run)
    return FewShotClassifier.from_run(run.folder).fit(x, y)


def examples(run: Experiment, shot: int = 2) -> tuple[np.ndarray[Any, Any], list[str]]:
    """Return images of the digits 7 to 9, some of each, and their names."""
    data = run.prepared.dataset
    rows = np.concatenate([data.images_of([c])[:shot] for c in (7, 8, 9)])
    return data.pixels[rows], [data.class_names[c] for c in data.y[rows]]


def score_of(classifier: FewShotClassifier, episodic_test: EpisodicTest, episodes: range) -> float:
    marks = []
    for u in episodes:
        eval_episode = episodic_test.eval_episodes[u]
        classifier.fit(eval_episode.support_x, eval_episode.support_y.numpy())
        marks.append(classifier.score(eval_episode.query_x, episodic_test.labels(u).numpy()))
    return statistics.fmean(marks)


@pytest.mark.parametrize(
    "name", ["prototypes, conv", *slow("probe", "maml", "prototypes", "maml, conv")]
)
def test_score_is_the_runs_own_test_accuracy(name: str, tmp_path: Path) -> None:
    made = finished(tmp_path / "run", *METHODS[name], {"run": {"rounds": 2}})
    result, episodic_test = made.result(), made.prepared.test
    classifier = FewShotClassifier.from_run(tmp_path / "run")
    assert score_of(classifier, episodic_test, range(len(episodic_test))) == result.accuracy


def test_the_round_that_validation_chose_answers(run: Experiment) -> None:
    episodic_test, classifier = run.prepared.test, FewShotClassifier.from_run(run.folder)
    assert score_of(classifier, episodic_test, range(len(episodic_test))) == run.result().accuracy
    assert classifier._run.round == run.best_round


@pytest.mark.slow
def test_a_client_answers_with_its_own_model(tmp_path: Path) -> None:
    made = finished(tmp_path / "run", {"run": {"rounds": 3, "cohort": 6}})
    result, episodic_test = made.result(), made.prepared.test
    for client in made.prepared.clients:
        own = FewShotClassifier.from_run(tmp_path / "run", client=client)
        turns = range(
            made.prepared.clients.index(client), len(episodic_test), len(made.prepared.clients)
        )
        assert score_of(own, episodic_test, turns) == pytest.approx(
            result.clients[client], abs=1e-15
        )
    x, y = examples(made)
    with pytest.raises(
        ConfigError, match=r"fsl_local predicts with the models of its clients.*0, 1, 2"
    ):
        FewShotClassifier.from_run(tmp_path / "run").fit(x, y)
    with pytest.raises(ConfigError, match=r"client is 9; the clients of this run are 0, 1"):
        FewShotClassifier.from_run(tmp_path / "run", client=9).fit(x, y)


def test_a_client_that_never_trained_is_refused(tmp_path: Path) -> None:
    made = finished(tmp_path / "run", {"run": {"rounds": 1, "cohort": 2}})
    x, y = examples(made)
    wrong = 0
    for client in made.prepared.clients:
        try:
            FewShotClassifier.from_run(tmp_path / "run", client=client).fit(x, y)
        except ConfigError as error:
            assert "was in no cohort up to the chosen round, 1" in str(error)  # noqa: PT017
            wrong += 1
    assert wrong == 4


def test_nothing_of_the_training_data_is_read(
    run: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = examples(run)
    monkeypatch.setattr(
        "fedshot.data.sources.registry.Digits.load", lambda *_: pytest.fail("read the data")
    )
    assert len(FewShotClassifier.from_run(run.folder).fit(x, y).predict(x)) == len(x)


def test_a_run_that_lost_its_dataset_info_gets_it_back_when_it_resumes(tmp_path: Path) -> None:
    made = finished(tmp_path / "run", PROTO, {"run": {"rounds": 1}})
    told = DatasetInfo.read(tmp_path / "run")
    (tmp_path / "run" / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"has lost its data\.json.*fedshot resume"):
        FewShotClassifier.from_run(tmp_path / "run")
    for _ in Experiment(made.prepared, tmp_path / "run").run():
        pass
    assert DatasetInfo.read(tmp_path / "run") == told


def test_facts_of_other_data_are_refused(tmp_path: Path) -> None:
    finished(tmp_path / "run", PROTO, {"run": {"rounds": 1}})
    path = tmp_path / "run" / FILE
    text = path.read_text(encoding="utf-8")
    digest = DatasetInfo.read(tmp_path / "run").digest
    path.write_text(text.replace(digest, "0" * 64), encoding="utf-8")
    with pytest.raises(CheckpointError, match="does not belong to the checkpoint"):
        FewShotClassifier.from_run(tmp_path / "run")
    path.write_text(text[:50], encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"data\.json is damaged"):
        FewShotClassifier.from_run(tmp_path / "run")


def test_examples_added_later_count_as_those_given_at_once(run: Experiment) -> None:
    x, y = examples(run, shot=4)
    at_once = FewShotClassifier.from_run(run.folder).fit(x, y)
    later = FewShotClassifier.from_run(run.folder)
    later.partial_fit(x[:5], y[:5], classes=["7", "8", "9"])
    later.partial_fit(x[5:], y[5:])
    np.testing.assert_array_equal(later.predict_proba(x), at_once.predict_proba(x))
    with pytest.raises(InputError, match="label 'cat' is not among `classes`"):
        later.partial_fit(x[:1], ["cat"], classes=["7"])


def test_ridge_adds_examples_and_gradient_steps_do_not(tmp_path: Path) -> None:
    ridge = {"method": {"name": "fedavg_probe", "probe": "ridge", "local_steps": 1}}
    made = finished(tmp_path / "ridge", ridge, {"run": {"rounds": 1}})
    x, y = examples(made, shot=3)
    FewShotClassifier.from_run(tmp_path / "ridge").partial_fit(x, y)
    for name, changes in (
        ("maml", METHODS["maml"]),
        ("logistic", ({"method": {"name": "fedavg_probe", "probe": "logistic"}},)),
    ):
        finished(tmp_path / name, *changes, {"run": {"rounds": 1}})
        with pytest.raises(ConfigError, match=r"adapts to all examples at once.*Call fit"):
            FewShotClassifier.from_run(tmp_path / name).partial_fit(x, y)


def test_more_ways_than_a_head_has_are_refused_and_prototypes_take_any(tmp_path: Path) -> None:
    made = finished(tmp_path / "maml", *METHODS["maml"], {"run": {"rounds": 1}})
    data = made.prepared.dataset
    rows = np.concatenate([data.images_of([c])[:2] for c in range(10)])
    with pytest.raises(InputError, match="10 classes; expected at most 5"):
        FewShotClassifier.from_run(tmp_path / "maml").fit(data.pixels[rows], data.y[rows])
    finished(tmp_path / "proto", PROTO, {"run": {"rounds": 1}})
    classifier = FewShotClassifier.from_run(tmp_path / "proto").fit(data.pixels[rows], data.y[rows])
    assert classifier.predict_proba(data.pixels[:3]).shape == (3, 10)


def test_a_classifier_over_base_classes_alone_is_no_few_shot_classifier(tmp_path: Path) -> None:
    made = finished(tmp_path / "run", OWN, {"method": {"name": "fedavg"}, "run": {"rounds": 1}})
    rows = np.concatenate([made.prepared.dataset.images_of([c])[:2] for c in range(3)])
    data = made.prepared.dataset
    with pytest.raises(
        ConfigError, match="fedavg predicts only the 10 classes that it was trained"
    ):
        FewShotClassifier.from_run(tmp_path / "run").fit(data.pixels[rows], data.y[rows])


def test_long_lists_of_queries_get_the_answers_of_short_ones(run: Experiment) -> None:
    x, y = examples(run)
    classifier = FewShotClassifier.from_run(run.folder).fit(x, y)
    many = run.prepared.dataset.pixels[:600]
    whole = classifier.predict_proba(many)
    parts = np.concatenate(
        [classifier.predict_proba(many[i : i + 100]) for i in range(0, 600, 100)]
    )
    np.testing.assert_allclose(whole, parts, atol=1e-5)
    assert classifier.predict_proba(many[:0]).shape == (0, 3)
    np.testing.assert_allclose(whole.sum(axis=1), 1, atol=1e-12)


@pytest.mark.parametrize(
    "labels",
    [[7, 7, 8, 8, 9, 9], [True, True, False, False, True, False], ["a", "a", 1, 1, b"", b""],
     [("x", 1), ("x", 1), ("y", 2), ("y", 2), ("z", 3), ("z", 3)], [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]],
)  # fmt: skip
def test_labels_of_any_kind_come_back_as_they_were(run: Experiment, labels: list[Any]) -> None:
    x, _ = examples(run)
    classifier = FewShotClassifier.from_run(run.folder).fit(x, labels)
    said = classifier.predict(x).tolist()
    assert set(said) <= set(labels)
    assert {type(one) for one in said} <= {type(one) for one in labels}
    assert len(classifier.classes_) == len(set(labels))


def test_clones_and_copies_need_the_folder_alone(
    run: Experiment, fitted: FewShotClassifier
) -> None:
    x, _ = examples(run)
    assert clone(fitted).get_params() == fitted.get_params()
    with pytest.raises(NotFittedError):
        clone(fitted).predict(x)
    copied = copy.deepcopy(fitted)
    assert "_run" not in vars(copied)
    np.testing.assert_array_equal(copied.predict_proba(x), fitted.predict_proba(x))


def test_a_model_that_diverged_says_so(tmp_path: Path) -> None:
    finished(tmp_path / "run", PROTO, {"run": {"rounds": 1}})
    classifier = FewShotClassifier.from_run(tmp_path / "run")
    body = classifier._run.server.theta["body"]["linear1"]
    body["bias"] += torch.nan
    x, y = np.zeros((4, 8, 8), np.uint8), [0, 0, 1, 1]
    with pytest.raises(CheckpointError, match="not finite for 4 of 4 examples"):
        classifier.fit(x, y).predict(x)
