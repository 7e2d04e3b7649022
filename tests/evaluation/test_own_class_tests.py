"""Exams of clients on images of their own classes: whose question, which images, what mark."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from covering import slow
from fedshot.config.load import Config
from fedshot.core.errors import ConfigError, DataError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.own_classes import Clusters, Pathological
from fedshot.data.partitions.partition import Partition
from fedshot.evaluation.episodic_test import EpisodicTest, score
from fedshot.protocol.method import Prediction
from fedshot.runs.prepare import PreparedRun
from system.runs import SMALL, finished, merged

OWN: dict[str, Any] = {
    "split": {"base": ["0-9"]},
    "partition": {"name": "pathological", "clients": 6, "way": 3, "shot": 4},
    "episode": {"way": 2, "shot": 1, "query": 1, "queries": "up_to"},
    "method": {"name": "fedavg", "local_steps": 2},
    "run": {"rounds": 3},
}


def setting(*changes: dict[str, Any]) -> PreparedRun:
    return PreparedRun(Config.of(merged(SMALL, OWN, *changes)))


def test_a_question_holds_a_clients_training_images_and_asks_for_its_tests() -> None:
    made = setting()
    episodic_test, deal, y = made.test, made.client_split, made.dataset.y
    assert deal.test is not None
    assert episodic_test.owners == tuple(made.clients)
    assert len(episodic_test) == 6
    for u, client in enumerate(episodic_test.owners):
        q, train, asked = episodic_test.eval_episodes[u], deal.train[client], deal.test[client]
        assert q.classes.tolist() == sorted(set(y[train].tolist()))
        assert sorted(q.classes[q.support_y].tolist()) == sorted(y[train].tolist())
        pool = {made.dataset.x[row].tobytes() for row in train}
        assert {image.numpy().tobytes() for image in q.support_x} == pool
        truth = {made.dataset.x[row].tobytes(): int(y[row]) for row in asked}
        for image, label in zip(q.query_x, episodic_test.labels(u), strict=True):
            assert truth[image.numpy().tobytes()] == int(q.classes[label])
        assert len(q.query_x) == len(asked) == 2 * len(train)
        assert not pool & truth.keys()


def test_the_order_of_queries_does_not_tell_their_labels() -> None:
    episodic_test = setting().test
    orders = [episodic_test.labels(u).tolist() for u in range(len(episodic_test))]
    assert all(order != sorted(order) for order in orders)


def test_all_seeds_and_methods_sit_one_exam_and_another_test_seed_another() -> None:
    one = setting()
    for changes in ({"seed": 5}, {"method": {"name": "pfedfsl", "m": 1}}, {"run": {"cohort": 2}}):
        other = setting(changes)
        assert other.test.digest == one.test.digest
        assert np.array_equal(other.client_split.train.indices, one.client_split.train.indices)
    assert setting({"test": {"seed": 1}}).test.digest != one.test.digest
    fewer = EpisodicTest.own(
        one.dataset, one.client_split.train, one.client_split.test, one.clients[:5], Key(0)
    )  # type: ignore[arg-type]
    assert fewer.digest != one.test.digest


def test_the_hash_tells_whose_questions_they_are() -> None:
    made = setting()
    episodic_test = made.test
    renamed = EpisodicTest(
        made.dataset, episodic_test._tasks, tuple(reversed(episodic_test.owners or ()))
    )
    assert renamed.digest != episodic_test.digest


def test_a_score_is_the_mean_over_clients_with_spread_and_worst_tenth() -> None:
    episodic_test = setting().test
    answers, each = [], {}
    for u in range(len(episodic_test)):
        truth = episodic_test.labels(u)
        logits = torch.nn.functional.one_hot(truth, len(episodic_test.classes(u))).double()
        logits[: u + 1] = -logits[: u + 1]  # the first u + 1 are wrong
        answers.append(
            Prediction(u, None, logits)
        )  # by the server's model: its owner's all the same
        each[u] = 1 - (u + 1) / len(truth)
    found = score(answers, episodic_test)
    marks = list(each.values())
    assert found.clients == pytest.approx(each)
    assert found.accuracy == pytest.approx(np.mean(marks))
    assert found.spread == pytest.approx(np.std(marks, ddof=1))
    assert found.interval == pytest.approx(stats.t.ppf(0.975, 5) * found.spread / math.sqrt(6))
    assert found.worst_tenth == pytest.approx(min(marks))
    assert found.to_json()["spread"] == found.spread


@pytest.mark.parametrize("partitioner", [Pathological, Clusters])
def test_validation_images_come_on_top_and_none_is_dealt_twice(partitioner: Any) -> None:
    y = np.repeat(np.arange(10), 200).astype(np.int64)
    data = Dataset("made", np.zeros((len(y), 1, 1, 1), np.uint8), y, tuple("abcdefghij"))
    options = {"clients": 6, "way": 3, "shot": 4} | (
        {"clusters": 2} if partitioner is Clusters else {}
    )
    for validation in (0, 1, 2):
        deal = partitioner(**options, validation=validation).assign(
            data, np.arange(len(y)), Key(0), EpisodeSpec(2, 1, 1)
        )
        parts = [deal.train, deal.test, *([deal.validation] if validation else [])]
        every = np.concatenate([part.indices for part in parts])
        assert len(every) == len(set(every.tolist()))
        if not validation:
            assert deal.validation is None
            continue
        for train, held in zip(deal.train, deal.validation, strict=True):
            counts = np.bincount(y[train], minlength=10)
            assert np.array_equal(np.bincount(y[held], minlength=10), validation * counts)


def test_the_round_is_chosen_on_validation_images_and_else_the_last(tmp_path: Path) -> None:
    last = finished(tmp_path / "last", OWN)
    last.result()
    assert last.prepared.validation is None
    assert last.best_round == 3
    assert "no images are set aside for validation: the last round is tested" in (
        last.prepared.notices()
    )
    chosen = finished(
        tmp_path / "chosen", OWN, {"partition": {"validation": 1}, "run": {"validate_every": 1}}
    )
    marks = {r["round"]: r["validation"]["accuracy"] for r in chosen.recorder.records()}
    assert len(marks) == 4
    assert marks[chosen.best_round] == max(marks.values())
    assert chosen.prepared.validation is not None
    assert chosen.prepared.validation.digest != chosen.prepared.test.digest


@pytest.mark.parametrize(
    "name", ["fedavg_probe", "fsl_local", *slow("fl_proto", "fedfsl_prox", "fedfsl_mi_adv")]
)
def test_methods_of_new_classes_sit_the_same_exam(name: str, tmp_path: Path) -> None:
    """Their support is what the client trains on; the head is as wide as the widest question."""
    run = finished(tmp_path / name, OWN, {
        "method": {"name": name, "local_steps": 1}, "run": {"rounds": 1},
        "model": {"head": {"name": "linear", "way": 10}},
    })  # fmt: skip
    found = run.result()
    assert found.tasks == setting().test.digest
    assert sorted(found.clients) == run.prepared.clients
    assert found.unanswered == 0
    answers = run.method.evaluate(
        run.server, run._clients(1, "evaluate"), run.prepared.test.eval_episodes, Key(0)
    )
    if name == "fsl_local":  # each by its owner, not in turns
        assert [(a.eval_episode, a.client) for a in answers] == list(
            enumerate(run.prepared.clients)
        )


@pytest.mark.parametrize("name", ["fedavg", *slow("ditto")])
def test_held_out_users_are_asked_for_base_classes_without_a_look_at_the_support(
    name: str, tmp_path: Path
) -> None:
    """Their classes are those of training, so that a classifier over these has an answer."""
    rng = np.random.default_rng(0)
    y = np.tile(np.arange(3), 200)
    x = (60 * y[:, None, None] + rng.integers(0, 40, (600, 6, 6))).astype(np.uint8)
    np.savez(tmp_path / "users.npz", x=x, y=y, users=np.repeat(np.arange(20), 30))
    run = finished(tmp_path / "run", {
        "data": {"name": "npz", "path": str(tmp_path / "users.npz")},
        "split": {"base": [], "users": [0.5, 0.25, 0.25]},
        "partition": {"name": "users", "clients": 4},
        "episode": {"way": 2, "shot": 1, "query": 5},
        "test": {"way": 2, "shot": 1, "query": 5, "episodes": 20},
        "method": {"name": name, "local_steps": 5, "optimizer": {"name": "adam", "lr": 0.01}},
        "run": {"rounds": 10},
    })  # fmt: skip
    eval_episodes = run.prepared.test.eval_episodes
    assert eval_episodes[0].classes.tolist() != eval_episodes[1].classes.tolist()
    blind = [q._replace(support_x=torch.zeros_like(q.support_x)) for q in eval_episodes]
    seen, unseen = (
        run.method.evaluate(run.server, run._clients(10, "evaluate"), asked, Key(0))
        for asked in (eval_episodes, blind)
    )
    for a, b in zip(seen, unseen, strict=True):
        assert torch.equal(a.logits, b.logits)
    assert run.result().accuracy > 0.9  # chance is 0.5


def test_a_held_out_user_with_a_class_of_its_own_is_refused(tmp_path: Path) -> None:
    """A classifier over the base classes has no answer about it."""
    y = np.tile(np.arange(3), 200)
    users = np.repeat(np.arange(20), 30)
    x = np.zeros((600, 6, 6), np.uint8)
    changes = {
        "data": {"name": "npz", "path": str(tmp_path / "users.npz")},
        "split": {"base": [], "users": [0.5, 0.25, 0.25]},
        "partition": {"name": "users", "clients": 4},
        "episode": {"way": 2, "shot": 1, "query": 5},
        "test": {"way": 2, "shot": 1, "query": 5, "episodes": 20},
        "method": {"name": "fedavg"},
    }
    np.savez(tmp_path / "users.npz", x=x, y=y, users=users)
    held_out = PreparedRun(Config.of(merged(SMALL, changes))).rows.novel
    y[held_out[0]] = 3
    np.savez(tmp_path / "users.npz", x=x, y=y, users=users)
    with pytest.raises(ConfigError, match="the split has novel classes"):
        PreparedRun(Config.of(merged(SMALL, changes)))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"partition": {"name": "iid", "clients": 3}}, DataError, "'iid' sets no images aside"),
        (
            {"split": {"base": ["0-7"], "validation": ["8", "9"]}},
            DataError,
            "set partition.validation",
        ),
        (
            {"split": {"base": ["0-4"], "novel": ["5-9"]}, "partition": {"way": 2}},
            ConfigError,
            "'fedavg' can predict only classes that it has trained on, but the split has",
        ),
        (
            {
                "method": {"name": "fedfsl_mi_adv"},
                "model": {"head": {"name": "linear", "way": 3}},
            },
            ConfigError,
            "the largest number of classes of a client is 4; model.head.way is 3",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        setting(changes)


def test_a_client_is_not_tested_on_what_it_never_saw() -> None:
    data = Dataset(
        "made", np.zeros((6, 1, 1, 1), np.uint8), np.array([0, 0, 1, 1, 2, 2]), ("a", "b", "c")
    )
    train = Partition.of([np.array([0, 2])])
    with pytest.raises(DataError, match="client 0 is tested on class 'c'"):
        EpisodicTest.own(data, train, Partition.of([np.array([1, 4])]), [0], Key(0))
    with pytest.raises(DataError, match="client 0 has no images to test on"):
        EpisodicTest.own(data, train, Partition.of([np.array([], np.int64)]), [0], Key(0))


def test_own_tests_have_no_other_shape() -> None:
    made = setting()
    assert made.episodic_test(made.config.test) is made.test
    other = Config.of(merged(SMALL, OWN, {"test": {"way": 2}})).test
    with pytest.raises(ConfigError, match="the test cannot have another shape or seed"):
        made.episodic_test(other)


@pytest.mark.parametrize("method", ["fedfsl_naive", "fl_proto", *slow("fedfsl_mi_adv")])
def test_clients_of_two_and_of_four_classes_train_on_all_of_them(
    method: str, tmp_path: Path
) -> None:
    """Whoever has fewer classes than the way gives what it has; fleets that stack say the same."""
    whole = {"way": 4, "query": 5, "classes": "up_to", "labels": "fixed"}
    change = {
        "episode": whole,
        "method": {"name": method, "local_steps": 1},
        "model": {"dtype": "float64"} | ({} if method == "fl_proto" else {"head": {"way": 4}}),
    }
    alone, stacked = (
        finished(tmp_path / fleet, OWN, change, {"run": {"fleet": fleet, "rounds": 2}})
        for fleet in ("sequential", "vectorised")
    )
    held = {len(q.classes) for q in alone.prepared.test.eval_episodes}
    assert held >= {2, 4}
    found = [
        run.evaluate_state(run.prepared.test, run.server, 2).per_episode for run in (alone, stacked)
    ]
    assert found[0] == found[1]


GLOBAL = {
    "episode": {"way": 4, "query": 5, "classes": "up_to", "labels": "global"},
    "model": {"dtype": "float64", "head": {"way": 10}},
}
WITH_OUTPUTS = (
    "fedmeta",
    *slow("fedfsl_naive", "fedfsl_prox", "fedfsl_mi", "fedfsl_mi_adv", "fsl_local"),
)


@pytest.mark.parametrize("method", WITH_OUTPUTS)
def test_with_global_labels_fleets_say_the_same(method: str, tmp_path: Path) -> None:
    budget = {"episodes": 2} if method == "fedmeta" else {"local_steps": 2}
    change = GLOBAL | {"method": {"name": method, **budget}}
    alone, stacked = (
        finished(tmp_path / fleet, OWN, change, {"run": {"fleet": fleet, "rounds": 2}})
        for fleet in ("sequential", "vectorised")
    )
    found = [
        run.evaluate_state(run.prepared.test, run.server, 2).per_episode for run in (alone, stacked)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["fedfsl_naive", "fedfsl_mi_adv"])
def test_global_labels_move_no_output_of_another_class(method: str, tmp_path: Path) -> None:
    """Of two clients' classes the head learns; the outputs of all others stay as they were."""
    change = GLOBAL | {"method": {"name": method, "local_steps": 2}}
    two = {"partition": {"name": "pathological", "clients": 2, "way": 3, "shot": 4}}
    run = finished(tmp_path / "run", OWN, change, two, {"run": {"rounds": 2, "cohort": 2}})
    made = run.prepared
    held = set(made.dataset.y[made.client_split.train.indices].tolist())
    start = made.method.init(made.key.at("init")).w["head"]
    moved = (run.server.w["head"]["weight"] - start["weight"]).abs().sum(1) > 0
    assert 2 <= len(held) < 10
    assert set(moved.nonzero()[:, 0].tolist()) == held


def test_global_labels_of_clients_with_all_classes_are_fixed_ones(tmp_path: Path) -> None:
    change = {
        "partition": {"name": "clusters", "clients": 3, "clusters": 1, "way": 10, "alpha": 1e4},
        "model": {"head": {"way": 10}},
        "method": {"name": "fedfsl_mi_adv", "local_steps": 1},
        "run": {"rounds": 2, "cohort": 3},
    }
    shape = {"way": 10, "query": 5, "classes": "up_to"}
    one, other = (
        finished(tmp_path / labels, OWN, change, {"episode": {**shape, "labels": labels}})
        for labels in ("fixed", "global")
    )
    assert {len(q.classes) for q in one.prepared.test.eval_episodes} == {10}
    found = [
        run.evaluate_state(run.prepared.test, run.server, 2).per_episode for run in (one, other)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": {"name": "fl_proto"}}, "'fl_proto' does not have an output for each class"),
        ({"method": {"name": "f2l"}}, "'f2l' does not have an output for each class"),
        (
            {"method": {"name": "fsl_local", "learner_name": "proto"}},
            "'fsl_local' does not have an output for each class",
        ),
        (
            {"method": {"name": "fedfsl_naive"}, "model": {"head": {"way": 9}}},
            "numbers up to 9\\. Set model.head.way to 10",
        ),
        (
            {
                "method": {"name": "fedfsl_naive"},
                "split": {"base": ["0-4"], "novel": ["5-9"]},
                "test": {"way": 5},
            },
            "'fedfsl_naive' with episode.labels 'global' can predict only classes",
        ),
        (
            {"method": {"name": "fedfsl_naive"}, "episode": {"labels": "globl"}},
            "episode.labels is 'globl'. Did you mean 'global'",
        ),
    ],
)
def test_global_labels_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        setting(GLOBAL, change)
