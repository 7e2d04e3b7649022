"""Exams and scores against brute force, and against scikit-learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import NearestCentroid
from sklearn.pipeline import make_pipeline
from torch import Tensor

from fedshot.config.load import Config
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.evaluation.episodic_test import (
    EpisodicTest,
    TestOptions,
    ValidationResult,
    far_below,
    score,
    total_confusion,
    worst_tenth,
)
from fedshot.evaluation.raw_baselines import pixel_logits, tf_idf_logits
from fedshot.fleets.sequential import Sequential
from fedshot.learners.feature_cache import worth_caching
from fedshot.learners.learner import EvalEpisode
from fedshot.methods.base.fl_proto import FLProto
from fedshot.nn.models.backbones import Conv4
from fedshot.nn.models.model import Model
from fedshot.protocol.clients import Clients
from fedshot.protocol.method import Prediction, predict_at_server
from fedshot.reports.significance import ComparisonRow, compare

SPEC = EpisodeSpec(way=3, shot=2, query=4)


def dataset() -> Dataset:
    rng = np.random.Generator(np.random.Philox(0))
    y = np.repeat(np.arange(6), 12)
    x = 30 * y[:, None, None, None] + rng.integers(0, 100, (len(y), 5, 5, 1))
    return Dataset("shades", x.astype(np.uint8), y, tuple("abcdef"))


def episodic_test(
    episodes: int = 8, seed: int = 0, classes: tuple[int, ...] = (1, 2, 3, 5)
) -> EpisodicTest:
    return EpisodicTest.draw(dataset(), classes, SPEC, episodes, Key(seed))


def test_equal_accuracies_have_no_interval() -> None:
    test = episodic_test(4)
    answers = [Prediction(u, None, torch.nn.functional.one_hot(test.labels(u), 3).double())
               for u in range(4)]  # fmt: skip
    assert str(score(answers, test)) == "100.00 % (no interval: all 4 accuracies are equal)"
    row, other = ComparisonRow("a", score(answers, test)), ComparisonRow("b", {"accuracy": 0.5,
    "interval": 0.0,
                                                           "episodes": 4})  # fmt: skip
    assert compare(row, other).outcome == "unclear"


def test_word_counts_are_weighed_and_told_apart_as_by_scikit_learn() -> None:
    rng = np.random.Generator(np.random.Philox(3))
    words = np.array(["", "?", *(f"w{i}" for i in range(20))])
    support, query = (rng.integers(2, 20, (n, 6)).astype(np.int32) for n in (9, 12))
    support[0, 4:], query[3] = 0, 21  # a short text; a text of words that no support has
    y = torch.arange(9) % 3
    asked = EvalEpisode(torch.from_numpy(support), y, torch.from_numpy(query), torch.arange(3))
    joined = [[" ".join(words[row]) for row in ids] for ids in (support, query)]
    oracle = make_pipeline(TfidfVectorizer(), LogisticRegression(max_iter=1000))
    oracle.fit(joined[0], y.numpy())
    found = tf_idf_logits(asked).numpy()
    np.testing.assert_allclose(found, oracle.decision_function(joined[1]), atol=1e-3)


def random_logits(u: int, client: int = 0) -> Tensor:
    return torch.randn(12, 3, generator=Key(u).at(client).torch())


def share_right(logits: Tensor, truth: Tensor) -> float:
    right = [int(row.tolist().index(max(row.tolist())) == y) for row, y in zip(logits, truth)]  # noqa: B905
    return sum(right) / len(right)


def exact_half_width(values: Any) -> float:
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return float(high - low) / 2


def test_a_score_is_the_mean_over_episodes_with_its_interval() -> None:
    e = episodic_test()
    found = score([Prediction(u, None, random_logits(u)) for u in range(8)], e)
    each = [share_right(random_logits(u), e.labels(u)) for u in range(8)]
    assert len(set(each)) > 2
    assert found.per_episode == pytest.approx(each, rel=1e-15)
    assert found.accuracy == pytest.approx(np.mean(each), rel=1e-14)
    assert found.interval == pytest.approx(exact_half_width(each), rel=1e-12)
    assert (found.episodes, found.unanswered, found.clients) == (8, 0, {})
    assert found.worst_tenth is None
    assert found.tasks == e.digest


def test_confusions_are_counted_by_the_names_of_the_classes() -> None:
    e = episodic_test()
    answers = [Prediction(u, None, random_logits(u)) for u in range(8)]
    answers[3].logits[5] = math.nan  # no guess
    want: dict[str, dict[str, int]] = {}
    for u, _, logits in answers:
        names = ["abcdef"[c] for c in e.classes(u).tolist()]
        for i, (y, row) in enumerate(zip(e.labels(u).tolist(), logits.tolist(), strict=True)):
            if (u, i) != (3, 5):
                said, counts = names[row.index(max(row))], want.setdefault(names[y], {})
                counts[said] = counts.get(said, 0) + 1
    assert score(answers, e).confusion == want
    assert want.keys() == set("bcdf")


def test_confusions_of_seeds_add_up() -> None:
    seeds = [
        {"confusion": {"a": {"a": 2, "b": 1}}},
        {},
        {"confusion": {"a": {"b": 3}, "b": {"b": 4}}},
    ]
    assert total_confusion(seeds) == {"a": {"a": 2, "b": 4}, "b": {"b": 4}}
    assert seeds[0] == {"confusion": {"a": {"a": 2, "b": 1}}}, "the scores stay as they are"
    assert total_confusion([{}, {"confusion": {}}]) == {}


def test_an_episode_that_every_client_answered_counts_once_with_their_mean() -> None:
    e, clients = episodic_test(4), (2, 5, 9)
    found = score([Prediction(u, k, random_logits(u, k)) for k in clients for u in range(4)], e)
    table = np.array(
        [[share_right(random_logits(u, k), e.labels(u)) for k in clients] for u in range(4)]
    )
    assert found.episodes == 4
    assert found.per_episode == pytest.approx(table.mean(1), rel=1e-14)
    assert found.accuracy == pytest.approx(table.mean(), rel=1e-14)
    assert found.interval == pytest.approx(exact_half_width(table.mean(1)), rel=1e-12)
    assert found.clients == pytest.approx(dict(zip(clients, table.mean(0), strict=True)), rel=1e-14)
    assert found.worst_tenth == pytest.approx(table.mean(0).min(), rel=1e-14)


def test_clients_that_take_turns_are_scored_on_their_own_episodes() -> None:
    e = episodic_test(7)
    found = score([Prediction(u, u % 3, random_logits(u)) for u in range(7)], e)
    each = [share_right(random_logits(u), e.labels(u)) for u in range(7)]
    assert found.accuracy == pytest.approx(np.mean(each), rel=1e-14)
    assert found.clients == pytest.approx({k: np.mean(each[k::3]) for k in range(3)}, rel=1e-14)


def test_the_order_of_the_answers_does_not_matter() -> None:
    answers = [Prediction(u, k, random_logits(u, k)) for k in (0, 1) for u in range(8)]
    assert score(answers, episodic_test()) == score(answers[::-1], episodic_test())


def test_unanswered_episodes_are_counted_and_left_out_of_the_mean() -> None:
    e = episodic_test()
    found = score([Prediction(u, 0, random_logits(u)) for u in (1, 4, 6)], e)
    each = [share_right(random_logits(u), e.labels(u)) for u in (1, 4, 6)]
    assert (found.episodes, found.unanswered) == (3, 5)
    assert found.accuracy == pytest.approx(np.mean(each), rel=1e-14)


@pytest.mark.parametrize("answered", [0, 1])
def test_fewer_than_two_answers_are_no_score(answered: int) -> None:
    with pytest.raises(ValueError, match=f"{answered} episodes have a prediction"):
        score([Prediction(u, None, random_logits(u)) for u in range(answered)], episodic_test())


def test_a_score_says_whether_it_is_transductive() -> None:
    answers = [Prediction(u, None, random_logits(u)) for u in range(8)]
    assert not score(answers, episodic_test()).transductive
    assert score(answers, episodic_test(), transductive=True).transductive


def test_the_worst_tenth_is_the_mean_of_the_lowest_values() -> None:
    values = np.random.Generator(np.random.Philox(1)).random(37)
    assert worst_tenth(values.tolist()) == pytest.approx(np.sort(values)[:3].mean(), rel=1e-15)
    assert worst_tenth([0.4, 0.2, 0.9]) == 0.2


def test_logits_that_are_not_numbers_are_not_scored_as_guesses() -> None:
    # argmax of a row of NaN is 0, which would pass a diverged model off as one that guesses.
    nan = torch.full((12, 3), math.nan)
    found = score([Prediction(u, None, nan) for u in range(8)], episodic_test())
    assert (found.accuracy, found.diverged) == (0.0, 8)


def test_only_the_queries_that_diverged_count_as_wrong() -> None:
    e = episodic_test()
    answers = []
    for u in range(8):
        logits = torch.nn.functional.one_hot(e.labels(u), 3).double()
        logits[0] = math.inf
        answers.append(Prediction(u, None, logits))
    found = score(answers, e)
    assert found.accuracy == pytest.approx(11 / 12)
    assert found.diverged == 8


# Exams


def test_a_question_has_no_answers_and_the_examiner_has_them() -> None:
    e = episodic_test()
    assert EvalEpisode._fields == ("support_x", "support_y", "query_x", "classes", "held")
    for u, q in enumerate(e.eval_episodes):
        assert type(q) is EvalEpisode
        assert q.held == ()
        assert q.support_x.shape == (6, 5, 5, 1)
        assert q.query_x.shape == (12, 5, 5, 1)
        assert torch.bincount(e.labels(u)).tolist() == [4, 4, 4]


def test_labels_are_those_of_the_images() -> None:
    e, data = episodic_test(), dataset()
    where = {data.x[i].tobytes(): int(data.y[i]) for i in range(len(data))}
    for u, q in enumerate(e.eval_episodes):
        for images, y in ((q.support_x, q.support_y), (q.query_x, e.labels(u))):
            for image, label in zip(images, y.tolist(), strict=True):
                assert where[image.numpy().tobytes()] == int(q.classes[label])
        assert set(q.classes.tolist()) <= {1, 2, 3, 5}


def test_one_seed_is_one_exam_and_another_seed_another() -> None:
    first, same, other = episodic_test(), episodic_test(), episodic_test(seed=1)
    assert first.digest == same.digest != other.digest
    assert all(
        torch.equal(a.query_x, b.query_x)
        for a, b in zip(first.eval_episodes, same.eval_episodes, strict=True)
    )
    assert not all(
        torch.equal(a.query_x, b.query_x)
        for a, b in zip(first.eval_episodes, other.eval_episodes, strict=True)
    )
    assert torch.equal(first.eval_episodes[3].query_x, first.eval_episodes[3].query_x)


def test_the_digest_tells_data_classes_shape_and_number_apart() -> None:
    data = dataset()
    brighter = Dataset("shades", data.x + 1, data.y, data.class_names)
    digests = [
        episodic_test().digest,
        episodic_test(7).digest,
        episodic_test(classes=(0, 1, 2, 3)).digest,
        EpisodicTest.draw(data, (1, 2, 3, 5), EpisodeSpec(3, 2, 3), 8, Key(0)).digest,
        EpisodicTest.draw(brighter, (1, 2, 3, 5), SPEC, 8, Key(0)).digest,
    ]
    assert len(set(digests)) == 5


@pytest.mark.parametrize("name", ["episodes", "validation_episodes"])
def test_one_episode_is_not_a_test(name: str) -> None:
    with pytest.raises(ConfigError, match=f"test.{name} is 1"):
        TestOptions(**{name: 1})


# The floor


def test_pixel_logits_predict_as_nearest_centroids_of_scikit_learn() -> None:
    e = episodic_test(20)
    for q in e.eval_episodes:
        floor = NearestCentroid().fit(q.support_x.flatten(1).numpy() / 255, q.support_y.numpy())
        want = floor.predict(q.query_x.flatten(1).numpy() / 255)
        assert pixel_logits(q).argmax(1).tolist() == want.tolist()


def test_the_floor_is_above_chance_where_pixels_tell_the_classes() -> None:
    e = episodic_test(20)
    found = score(predict_at_server(pixel_logits, e.eval_episodes), e)
    assert found.accuracy > 0.8
    assert found.episodes == 20


def test_embedding_every_example_once_gives_the_same_answers() -> None:
    """Against one pass for each question, in float64; a running batch norm asks for no company."""
    model = Model(Conv4(width=8), None, (8, 8, 1), dtype="float64")
    method = FLProto(model, EpisodeSpec(3, 1, 2))
    server = method.init(Key(3))
    config = Config.of({"data": "digits"})
    data = config.data.load(None)
    drawn = EpisodicTest.draw(data, [5, 6, 7, 8, 9], EpisodeSpec(3, 2, 4), 60, Key(0))
    assert worth_caching(drawn.eval_episodes)
    clients = Clients(Sequential(None), range(3))  # type: ignore[arg-type]
    once = method.evaluate(server, clients, drawn.eval_episodes, Key(1))
    apart = method.evaluate(server, clients, list(drawn.eval_episodes), Key(1))
    assert [a.eval_episode for a in once] == [a.eval_episode for a in apart] == list(range(60))
    for a, b in zip(once, apart, strict=True):
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-9, atol=1e-9)


def test_a_few_questions_of_many_examples_are_answered_one_by_one() -> None:
    data = Config.of({"data": "digits"}).data.load(None)
    few = EpisodicTest.draw(data, [5, 6, 7, 8, 9], EpisodeSpec(5, 1, 1), 2, Key(0))
    assert few.eval_episodes.distinct == 20
    assert not worth_caching(few.eval_episodes)
    assert not worth_caching(list(few.eval_episodes))


def test_a_look_beats_another_over_the_episodes_that_both_answered() -> None:
    whole, better = ValidationResult((0.2, 0.4, 0.9)), ValidationResult((0.3, 0.5), missing=(2,))
    assert whole.beats(None)
    assert better.beats(whole)  # 0.4 against 0.3, though 0.5 is the mean of all three
    assert not whole.beats(better)
    assert not ValidationResult((0.2, 0.4), missing=(2,)).beats(
        whole
    )  # a tie keeps the earlier round
    early, late = (
        ValidationResult((0.9,), missing=(1, 2)),
        ValidationResult((0.1, 0.1), missing=(0,)),
    )
    assert late.beats(early)  # nothing in common: the better known goes on
    assert not early.beats(late)
    few = ValidationResult((0.9, 0.9), missing=tuple(range(2, 10)))
    assert ValidationResult((0.5,) * 10).beats(few)  # of which two episodes tell little
    assert not few.beats(ValidationResult((0.95,) * 10))
    assert few.beats(ValidationResult((0.5,) * 10))


def test_a_score_names_the_episodes_that_nobody_answered() -> None:
    e = episodic_test(5)
    found = score([Prediction(u, None, random_logits(u)) for u in (0, 2, 3)], e)
    assert (found.missing, found.unanswered, found.episodes) == ((1, 4), 2, 3)
    assert ValidationResult.from_json(found.to_json()) == ValidationResult.of(found)


def test_a_client_whose_accuracy_is_far_below_the_others_is_told() -> None:
    honest = {0: 0.62, 1: 0.60, 2: 0.65, 3: 0.58, 4: 0.61}
    assert far_below(honest | {5: 0.21}) == {5: 0.21}
    assert far_below(honest | {5: 0.45}) == {}, "0.2 below the median at least"
    assert far_below({0: 0.9, 1: 0.7, 2: 0.5, 3: 0.3, 4: 0.1}) == {}, "they all differ"
    assert far_below({0: 0.6, 1: 0.6, 2: 0.1}) == {}, "of three nobody can tell"
