"""Episodes dealt to groups of clients: who holds what, and that no image is held twice."""

from __future__ import annotations

import hashlib
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from fedshot.core.errors import ConfigError, DataError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import ClientData, Tasks, divide
from fedshot.data.episodes.group_sampler import GroupSampler, GroupTasks
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition, infeasible_clients
from fedshot.data.partitions.resampled import Resampled, _max_shards_below
from fedshot.evaluation.episodic_test import EpisodicTest

CLASSES, EACH = 9, 240


def images() -> Dataset:
    x = np.zeros((CLASSES * EACH, 2, 2, 1), dtype=np.uint8)
    x[:, 0, 0, 0] = np.arange(len(x)) % 251
    return Dataset("n", x, np.repeat(np.arange(CLASSES), EACH), tuple("abcdefghi"))


DATA = images()
POOL = ClientData(DATA, np.arange(len(DATA)))
PAPER = EpisodeSpec(5, 60, 60)


def gathered(group: GroupSampler, spec: EpisodeSpec = PAPER, t: int = 0) -> Any:
    return group.sample(POOL, spec, Key(0).at(t))


def counts(rows: Any) -> dict[int, int]:
    found, n = np.unique(DATA.y[rows], return_counts=True)
    return dict(zip(found.tolist(), n.tolist(), strict=True))


def test_iid_gives_every_client_as_many_of_each_class() -> None:
    classes, hands = gathered(GroupSampler(10))
    for hand in hands:
        assert counts(hand.support) == counts(hand.query) == dict.fromkeys(sorted(classes), 6)


def test_shards_have_one_class_at_five_ways() -> None:
    """A client has two classes, 15 and 15 of each, or one, with probability 3/19."""
    lonely = 0
    for t in range(60):
        _, hands = gathered(GroupSampler(10, "shards", shards=20), t=t)
        for hand in hands:
            assert counts(hand.support) == counts(hand.query)
            assert sorted(counts(hand.support).values()) in ([15, 15], [30])
            lonely += len(counts(hand.support)) == 1
    assert abs(lonely / 600 - 3 / 19) < 4 * (3 / 19 * 16 / 19 / 600) ** 0.5


@pytest.mark.parametrize(("way", "most"), [(3, 3), (4, 2), (5, 2), (6, 4), (7, 4)])
def test_shards_straddle_classes_at_other_ways(way: int, most: int) -> None:
    """20 shards of 6 images times the way: they end with a class only at 4 and 5 ways."""
    spec, held = EpisodeSpec(way, 60, 60), 0
    for t in range(40):
        classes, hands = gathered(GroupSampler(10, "shards"), spec, t)
        assert len(classes) == way
        sizes = {len(hand.support) + len(hand.query) for hand in hands}
        assert sizes == {12 * way}
        held = max(held, *(len(counts(np.concatenate(hand))) for hand in hands))
    assert held <= most
    assert held > 2 or most == 2


def test_half_of_an_odd_share_is_rounded_down() -> None:
    _, hands = gathered(GroupSampler(10, "shards", shards=20), EpisodeSpec(5, 30, 30))
    for hand in hands:
        supports, queries = counts(hand.support), counts(hand.query)
        for c, n in supports.items():
            assert (n, queries[c]) in ((7, 8), (15, 15))


@pytest.mark.parametrize("spare", [0, 4, 10])
def test_no_image_is_held_twice(spare: int) -> None:
    for by in ("iid", "shards"):
        spec = EpisodeSpec((3, 7), 60, 60)
        classes, hands = gathered(GroupSampler(10, by, spare=spare), spec)
        assert len(hands) == 10 + spare
        rows = np.concatenate([np.concatenate(hand) for hand in hands])
        assert len(np.unique(rows)) == len(rows)
        assert set(DATA.y[rows].tolist()) == set(classes.tolist())
        group = np.concatenate([np.concatenate(hand) for hand in hands[:10]])
        assert counts(group) == dict.fromkeys(sorted(classes.tolist()), 120)
        if spare:
            others = np.concatenate([np.concatenate(hand) for hand in hands[10:]])
            assert counts(others) == dict.fromkeys(sorted(classes.tolist()), 12 * spare)


def test_spare_clients_do_not_change_what_the_group_holds_in_number() -> None:
    group = gathered(GroupSampler(10, "shards", shards=20, spare=10))
    sizes = [(len(hand.support), len(hand.query)) for hand in group.shares]
    assert sizes == [(30, 30)] * 20


def test_an_episode_follows_from_its_key_alone() -> None:
    pool = Resampled(10, "shards").assign(DATA, np.arange(len(DATA)), Key(0), PAPER).train
    key = Key(5).at("round", 3)
    forth = [pool.data(DATA, k).share(PAPER, key) for k in range(10)]
    for t in range(20):  # others in between, more than are remembered
        pool.data(DATA, 0).share(PAPER, key.at(t))
    back = [pool.data(DATA, k).share(PAPER, key) for k in reversed(range(10))][::-1]
    for (classes, hand), (again, other) in zip(forth, back, strict=True):
        assert np.array_equal(classes, again)
        assert all(np.array_equal(a, b) for a, b in zip(hand, other, strict=True))
    assert not np.array_equal(
        forth[0][1].support, pool.data(DATA, 0).share(PAPER, key.at(1))[1].support
    )


def test_every_client_of_a_resampled_pool_can_form_an_episode() -> None:
    rows = np.flatnonzero(DATA.y < 6)
    deal = Resampled(4).assign(DATA, rows, Key(0), PAPER)
    assert infeasible_clients(DATA, deal.train, PAPER) == {}
    assert all(np.array_equal(held, rows) for held in deal.train)
    assert deal.train.data(DATA, 2).n == len(rows)


def test_an_exam_hides_labels_and_tells_holders() -> None:
    episodic_test = EpisodicTest.draw(
        DATA, range(5), PAPER, 3, Key(1), None, GroupSampler(10, "shards", spare=10)
    )
    for u, eval_episode in enumerate(episodic_test.eval_episodes):
        held = eval_episode.held
        assert held
        assert set(held.support.tolist()) == set(held.query.tolist()) == set(range(10))
        assert set(held.spare.tolist()) == set(range(10, 20))
        assert len(held.spare_x) == len(held.spare_y) == len(held.spare) == 300
        assert len(eval_episode.query_x) == len(episodic_test.labels(u)) == 300
        # The order of the queries tells neither label nor holder.
        assert (np.diff(episodic_test.labels(u).numpy()) != 0).sum() > 150
        assert (np.diff(held.query.numpy()) != 0).sum() > 200


def test_an_exam_is_named_by_all_that_is_in_it() -> None:
    def digest(group: GroupSampler, n: int = 2, seed: int = 1) -> str:
        return EpisodicTest.draw(DATA, range(6), PAPER, n, Key(seed), None, group).digest

    one = digest(GroupSampler(10))
    assert one == digest(GroupSampler(10))
    others = [
        GroupSampler(10, "shards"),
        GroupSampler(5),
        GroupSampler(10, spare=10),
        GroupSampler(),
    ]
    assert len({one, digest(GroupSampler(10), seed=2), *map(digest, others)}) == 6
    long = GroupTasks.sample(DATA, POOL.indices, PAPER, GroupSampler(10), 3, Key(1))
    short = GroupTasks.sample(DATA, POOL.indices, PAPER, GroupSampler(10), 2, Key(1))
    assert np.array_equal(long.support[:2], short.support)


def test_an_exam_in_one_hand_has_the_name_it_always_had() -> None:
    tasks = Tasks.draw(DATA, range(6), EpisodeSpec(3, 1, 2), 4, Key(1))
    sha = hashlib.sha256(DATA.digest.encode())
    for i in range(4):
        for rows in (tasks.classes[i], tasks.support[i], tasks.query[i]):
            sha.update(len(rows).to_bytes(8, "little") + rows.astype("<i8").tobytes())
    assert tasks.digest(DATA) == sha.hexdigest()
    episodic_test = EpisodicTest.draw(DATA, range(6), EpisodeSpec(3, 1, 2), 4, Key(1))
    assert episodic_test.digest == sha.hexdigest()
    assert episodic_test.eval_episodes[0].held == ()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: GroupSampler(spare=2), "spare is 2 and clients is 0"),
        (lambda: GroupSampler(10, "shards", shards=3), "shards is 3"),
        (
            lambda: Resampled(5, "shards").assign(
                DATA, POOL.indices, Key(0), EpisodeSpec((3, 6), 3, 5)
            ),
            "in an episode of 3 classes a client may get images but no support",
        ),
        (
            lambda: Resampled(10).assign(DATA, POOL.indices, Key(0), EpisodeSpec(5, 2, 8)),
            "in an episode of 5 classes a client may get images but no support",
        ),
        (
            lambda: Resampled(50).assign(DATA, POOL.indices, Key(0), EpisodeSpec(3, 5, 5)),
            "episode.shot and episode.query count the images of a class that all clients hold",
        ),
        (
            lambda: EpisodicTest.draw(
                DATA, range(5), PAPER, 2, Key(0), None, GroupSampler(10, spare=20)
            ),
            "has 240 images; a 5-way 60-shot, 300 queries episode needs 360",
        ),
        (
            lambda: gathered(GroupSampler(10), EpisodeSpec(1, 1, 19)),
            "a client has 2 images and no support set",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, text: str) -> None:
    with pytest.raises((DataError, ConfigError), match=text):
        make()


def test_the_key_above_a_part() -> None:
    key = Key(0).at("round", 3, "step", 1, "work", "w", "client", 2)
    assert key.above("step") == Key(0).at("round", 3)
    assert Key(0).at("step", "step", 1).above("step") == Key(0).at("step")
    with pytest.raises(ValueError, match="there is no 'step' in the path"):
        Key(0).at("round").above("step")


def test_hands_without_a_support_are_found_by_trying_all() -> None:
    for (way, each), total in product([(2, 6), (3, 5), (4, 4), (5, 2)], [5, 6, 9]):
        classes = np.repeat(np.arange(way), each)
        shards = np.split(classes, np.arange(1, total) * len(classes) // total)
        for most in range(each):

            def bare(some: Any, most: int = most) -> bool:
                return not some or np.bincount(np.concatenate(some)).max() <= most

            sizes = range(total + 1)
            want = max(n for n in sizes if any(map(bare, combinations(shards, n))))
            assert _max_shards_below(shards, most) == want, (way, each, total, most)


def test_a_rare_hand_without_a_support_is_refused() -> None:
    with pytest.raises(DataError, match="a client may get images but no support"):
        Resampled(2, "shards", 3, 12).assign(DATA, POOL.indices, Key(0), EpisodeSpec(6, 1, 1))


@pytest.mark.parametrize("by", ["iid", "shards"])
def test_an_episode_of_training_can_be_dealt_whenever_the_first_could_be_dealt_for_sure(
    by: Any,
) -> None:
    """Where it is not refused, no episode of any way fails; where it is, some may."""
    refused = 0
    for shot, query in ((1, 4), (2, 3), (3, 5), (6, 6)):
        spec = EpisodeSpec((2, 4), shot, query)
        try:
            dealt = Resampled(4, by).assign(DATA, POOL.indices, Key(0), spec).train
        except DataError:
            refused += 1
            continue
        for u in range(60):
            hands = [dealt.data(DATA, k).share(spec, Key(1).at(u))[1] for k in range(4)]
            assert all(len(hand.support) for hand in hands)
    assert 0 < refused < 4


def test_clients_that_hold_what_they_hold_divide_it_independently() -> None:
    key = Key(3).at("episode")
    first, same, other = (POOL.share(PAPER, key, ("client", k))[1].support for k in (0, 0, 1))
    assert np.array_equal(first, same)
    assert not np.array_equal(np.sort(first), np.sort(other))


def test_who_would_have_no_support_is_unable_to_take_part() -> None:
    """As the clients themselves would find when they divide what they hold."""
    rng = np.random.default_rng(0)
    spec = EpisodeSpec(2, 2, 5, queries="up_to", classes="up_to")
    bare = 0
    for _ in range(40):
        rows = rng.permutation(POOL.indices)[: rng.integers(6, 40)]
        parts = np.array_split(rows, rng.integers(1, 6))
        partition = Partition.of(parts)
        reasons = infeasible_clients(DATA, partition, spec, divides=True)
        told = {k for k, text in reasons.items() if "has no support set if" in text}
        found = set()
        for k, part in enumerate(parts):
            try:
                divide(DATA, part, spec, rng)
            except DataError:
                found.add(k)
        assert told == found
        assert reasons.keys() - told == infeasible_clients(DATA, partition, spec).keys() - told
        bare += len(found)
    assert bare > 10
