"""What each partition promises, for any numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covering import slow
from fedshot.core.errors import DataError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.dirichlet import counts, shares
from fedshot.data.partitions.own_classes import Clusters, Pathological
from fedshot.data.partitions.partition import ClientSplit, Partition
from fedshot.data.partitions.pooled import Dirichlet, Iid, Shards, Users, WholeClasses

SPEC = EpisodeSpec(2, 1, 1)
quick = settings(max_examples=40, deadline=None, database=None)
seeds = st.integers(0, 2**32)
sizes = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def made(counts: list[int], n_users: int = 0) -> Dataset:
    rng = np.random.default_rng(sum(counts))
    y = rng.permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int64)
    users = rng.integers(0, n_users, len(y)) if n_users else None
    names = tuple(f"c{c}" for c in range(len(counts)))
    return Dataset("made", np.zeros((len(y), 1, 1, 1), np.uint8), y, names, users)


def dealt(options, dataset: Dataset, seed: int, rows: np.ndarray | None = None) -> ClientSplit:
    rows = np.arange(len(dataset)) if rows is None else rows
    return options.assign(dataset, rows, Key(seed), SPEC)


def assert_exact_cover(p: Partition, rows: np.ndarray, clients: int) -> None:
    assert len(p) == clients
    assert np.sort(p.indices).tolist() == np.sort(rows).tolist()
    assert p.indices.dtype == p.offsets.dtype == np.int64


@st.composite
def pools(draw) -> tuple[Dataset, int]:
    """A dataset, and a number of clients it can serve."""
    dataset = made(draw(sizes))
    return dataset, draw(st.integers(1, min(12, len(dataset))))


@quick
@given(pools(), seeds)
def test_iid_covers_exactly_and_differs_by_one_image_in_each_class_and_in_all(pool, seed):
    dataset, clients = pool
    p = dealt(Iid(clients), dataset, seed).train
    assert_exact_cover(p, np.arange(len(dataset)), clients)
    assert np.ptp(p.sizes) <= 1
    for c in range(dataset.n_classes):
        assert np.ptp([(dataset.y[rows] == c).sum() for rows in p]) <= 1


@quick
@given(pools(), st.floats(1e-4, 1e4), st.booleans(), seeds)
def test_dirichlet_covers_exactly_whatever_alpha(pool, alpha, cap, seed):
    dataset, clients = pool
    p = dealt(Dirichlet(clients, alpha, cap, redraws=3), dataset, seed).train
    assert_exact_cover(p, np.arange(len(dataset)), clients)


@pytest.mark.parametrize("options", [
    *slow(Dirichlet(10, alpha=10.0, redraws=0)),
    Dirichlet(10, alpha=1e12, redraws=0),  # nearly even: two images each
    Dirichlet(10, alpha=0.1, redraws=0),
    *slow(Clusters(10, clusters=1, way=1000, shot=2, alpha=10.0)),
])  # fmt: skip
def test_dirichlet_gives_every_client_the_same_in_the_mean(options):
    dataset = made([20 if isinstance(options, Dirichlet) else 60] * 1000)
    sizes = np.array([dealt(options, dataset, seed).train.sizes for seed in range(3)])
    assert sizes.sum(axis=1).tolist() == [20_000] * 3
    # Of n = 20 images of a class a client's part has the mean 2 and at most the deviation 6 of a
    # Dirichlet share at alpha 0.1; 3000 classes, and five standard errors.
    assert abs(sizes.mean(axis=0) - 2000).max() < 5 * 6 * np.sqrt(1000 / 3)
    if options.alpha >= 10:  # deviation 0.6, and 0.5 by rounding
        assert abs(sizes.mean(axis=0) - 2000).max() < 5 * 0.8 * np.sqrt(1000 / 3)


def test_a_cut_by_shares_loses_nothing_and_misses_no_share_by_an_image():
    rng = np.random.default_rng(0)
    for n in (0, 1, 7, 20, 600):
        for alpha in (0.01, 1.0, 100.0, 1e12):
            q = shares(10, alpha, rng)
            got = counts(q, n)
            assert got.sum() == n
            assert (abs(got - q * n) < 1).all()
    assert counts(np.array([0.3, 0.7]), 10).tolist() == [3, 7]
    assert counts(np.array([0.0, 0.34, 0.33, 0.33]), 4).tolist() == [0, 2, 1, 1]


@quick
@given(pools(), seeds, st.data())
def test_shards_cover_exactly_and_have_equal_sizes(pool, seed, data):
    dataset, clients = pool
    per_client = data.draw(st.integers(1, len(dataset) // clients))
    p = dealt(Shards(clients, per_client), dataset, seed).train
    assert_exact_cover(p, np.arange(len(dataset)), clients)
    low = len(dataset) // (clients * per_client)
    assert per_client * low <= p.sizes.min() <= p.sizes.max() <= per_client * (low + 1)


@quick
@given(pools(), seeds)
def test_spare_shards_go_to_nobody(pool, seed):
    dataset, clients = pool
    shards = min(2 * clients, len(dataset))
    p = dealt(Shards(clients, 1, shards), dataset, seed).train
    assert len(np.unique(p.indices)) == len(p.indices)
    assert len(p.indices) <= -(-len(dataset) // shards) * clients


@quick
@given(seeds)
def test_shards_of_600_images_hold_30_of_one_class_so_a_client_has_one_class_or_two(seed):
    dataset = made([120] * 5)
    p = dealt(Shards(clients=10), dataset, seed).train
    for rows in p:
        counts = np.bincount(dataset.y[rows])
        assert sorted(counts[counts > 0]) in ([30, 30], [60])


def test_a_client_of_20_shards_holds_a_single_class_in_3_of_19_cases():
    dataset = made([120] * 5)
    single = sum(
        len(np.unique(dataset.y[rows])) == 1
        for seed in range(300)
        for rows in dealt(Shards(clients=10), dataset, seed).train
    )
    assert abs(single / 3000 - 3 / 19) < 0.03  # 4.5 standard errors


def test_shards_of_a_3_class_episode_straddle_classes():
    dataset = made([120] * 3)  # shards of 18, 120 is no multiple: three classes become possible
    most = max(
        len(np.unique(dataset.y[rows]))
        for seed in range(30)
        for rows in dealt(Shards(clients=10), dataset, seed).train
    )
    assert most == 3


@quick
@given(sizes, seeds, st.data())
def test_whole_classes_are_never_divided_and_their_numbers_are_balanced(counts, seed, data):
    dataset = made(counts)
    clients = data.draw(st.integers(1, len(counts)))
    p = dealt(WholeClasses(clients), dataset, seed).train
    assert_exact_cover(p, np.arange(len(dataset)), clients)
    held = [np.unique(dataset.y[rows]) for rows in p]
    assert sum(map(len, held)) == len(counts)
    assert np.ptp([len(classes) for classes in held]) <= 1


@quick
@given(sizes, st.integers(1, 9), seeds, st.data())
def test_users_are_never_divided(counts, n_users, seed, data):
    dataset = made(counts, n_users)
    there = len(np.unique(dataset.users))
    clients = data.draw(st.none() | st.integers(1, there))
    p = dealt(Users(clients), dataset, seed).train
    assert_exact_cover(p, np.arange(len(dataset)), clients or there)
    held = [np.unique(dataset.users[rows]) for rows in p]
    assert sum(map(len, held)) == there
    assert np.ptp([len(users) for users in held]) <= 1


@quick
@given(st.integers(1, 8), st.integers(2, 5), st.integers(1, 5), seeds)
def test_pathological_clients_have_their_drawn_classes_and_twice_the_images_to_test(
    clients, way, shot, seed
):
    dataset = made([3 * (shot + 2) * clients] * (way + 1))
    got = dealt(Pathological(clients, way, shot), dataset, seed)
    assert_disjoint(got)
    for train, test in zip(got.train, got.test, strict=True):
        classes, counts = np.unique(dataset.y[train], return_counts=True)
        assert way - 1 <= len(classes) <= way + 1
        assert len(set(counts)) == 1
        assert max(1, shot - 2) <= counts[0] <= shot + 2
        assert same_classes_twice(dataset, train, test)


@quick
@given(st.integers(2, 8), st.integers(2, 5), st.integers(1, 5), st.integers(0, 2), seeds)
def test_overlapping_clients_draw_from_all_images_and_never_test_on_what_they_train_on(
    clients, way, shot, validation, seed
):
    dataset = made([(3 + validation) * (shot + 2)] * (way + 1))  # enough for one client alone
    got = dealt(Pathological(clients, way, shot, validation, overlap=True), dataset, seed)
    apart = dealt(Pathological(1, way, shot, validation), dataset, seed)
    assert len(got.train[0]) == len(apart.train[0])  # clients are as wide as without
    for k, (train, test) in enumerate(zip(got.train, got.test, strict=True)):
        assert same_classes_twice(dataset, train, test)
        parts = [train, test, *([got.validation[k]] if validation else [])]
        rows = np.concatenate(parts)
        assert len(np.unique(rows)) == len(rows) == (3 + validation) * len(train)


def test_an_overlapping_client_needs_its_images_all_the_same():
    dataset = made([20] * 4)
    assert len(dealt(Pathological(50, 2, 4, overlap=True), dataset, 0).train) == 50
    with pytest.raises(DataError, match=r"class 'c.' has 20 images; a client needs 2. "):
        dealt(Pathological(50, 2, 7, overlap=True), dataset, 0)


@quick
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), seeds)
def test_clusters_share_their_classes_and_deal_all_of_shot_times_clients(
    clusters, size, way, shot, seed
):
    dataset = made([3 * shot * size] * (clusters * way))
    got = dealt(Clusters(clusters * size, clusters, way, shot), dataset, seed)
    assert_disjoint(got)
    seen: list[int] = []
    for g in range(clusters):
        rows = np.concatenate([got.train[k] for k in range(g * size, (g + 1) * size)])
        classes, counts = np.unique(dataset.y[rows], return_counts=True)
        assert counts.tolist() == [shot * size] * way
        seen += classes.tolist()
    assert sorted(seen) == list(range(clusters * way))  # enough classes, so none is shared
    for train, test in zip(got.train, got.test, strict=True):
        assert same_classes_twice(dataset, train, test)


def test_clusters_use_classes_again_only_when_there_are_too_few():
    dataset = made([200] * 10)  # five clusters of five classes, as with ten-class data
    got = dealt(Clusters(10, 5, 5, 5), dataset, 0)
    assert_disjoint(got)
    for g in range(5):
        rows = np.concatenate([got.train[2 * g], got.train[2 * g + 1]])
        assert len(np.unique(dataset.y[rows])) == 5


@quick
@given(sizes, sizes, seeds)
def test_only_the_given_rows_are_dealt_so_novel_classes_stay_unseen(base, novel, seed):
    dataset = made([count + 4 for count in base] + novel, n_users=3)
    rows = dataset.images_of(range(len(base)))
    for options in (Iid(2), Dirichlet(2), Shards(2), Users(), WholeClasses(1)):
        p = dealt(options, dataset, seed, rows).train
        assert np.sort(p.indices).tolist() == rows.tolist()
        assert dataset.y[p.indices].max() < len(base)


def assert_disjoint(got: ClientSplit) -> None:
    assert len(got.train) == len(got.test)
    rows = np.concatenate([got.train.indices, got.test.indices])
    assert len(np.unique(rows)) == len(rows)


def same_classes_twice(dataset: Dataset, train: np.ndarray, test: np.ndarray) -> bool:
    count = [np.bincount(dataset.y[rows], minlength=dataset.n_classes) for rows in (train, test)]
    return (2 * count[0] == count[1]).all()
