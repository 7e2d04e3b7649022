from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedshot.core.errors import DataError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.overlapping import Overlapping
from fedshot.data.partitions.own_classes import Clusters, Pathological
from fedshot.data.partitions.partition import (
    ClientSplit,
    Partition,
    check_assigned,
    infeasible_clients,
)
from fedshot.data.partitions.pooled import Dirichlet, Iid, Shards, Users, WholeClasses
from fedshot.data.partitions.registry import PARTITIONS
from fedshot.data.partitions.resampled import Resampled

SPEC = EpisodeSpec(2, 1, 1)


def made(counts: list[int], users: bool = False) -> Dataset:
    y = np.repeat(np.arange(len(counts)), counts)
    y = np.random.default_rng(0).permutation(y).astype(np.int64)
    number = np.arange(len(y), dtype=np.int64) % 7 if users else None
    names = tuple(f"c{c}" for c in range(len(counts)))
    return Dataset("made", np.zeros((len(y), 1, 1, 1), np.uint8), y, names, number)


def deal(options, dataset, key=Key(0), spec=SPEC):  # noqa: B008  (a key is a constant)
    return options.assign(dataset, np.arange(len(dataset)), key, spec)


def test_a_partition_is_read_client_by_client():
    p = Partition.of([np.array([4, 2]), np.array([], np.int64), np.array([7])])
    assert len(p) == 3
    assert [rows.tolist() for rows in p] == [[4, 2], [], [7]]
    assert p.sizes.tolist() == [2, 0, 1]
    assert p.owners.tolist() == [0, 0, 2]
    assert np.shares_memory(p[0], p.indices)
    with pytest.raises(IndexError, match="client 3 does not exist; there are 3"):
        p[3]


def test_offsets_that_do_not_cut_the_rows_are_refused():
    with pytest.raises(DataError, match="numbers from 0 to 2"):
        Partition(np.array([1, 2]), np.array([0, 3]))


def test_only_the_rows_to_divide_may_be_assigned_and_to_some_client():
    rows = np.array([3, 5, 7])
    fits, outside = Partition.of([rows[:2], rows[1:]]), Partition.of([rows, np.array([5, 6])])
    check_assigned("mine", ClientSplit(fits, test=fits), rows)
    for split in (ClientSplit(outside), ClientSplit(fits, validation=outside)):
        with pytest.raises(DataError, match="assigned row 6, which is none of the 3 rows to divid"):
            check_assigned("mine", split, rows)
    with pytest.raises(DataError, match="partition 'mine' has no clients"):
        check_assigned("mine", ClientSplit(Partition.of([])), rows)
    with pytest.raises(DataError, match="returned a Partition; expected a ClientSplit"):
        check_assigned("mine", fits, rows)


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_a_partition_repeats_under_its_key_and_changes_with_it(name):
    options = {
        "iid": Iid(4),
        "dirichlet": Dirichlet(4),
        "shards": Shards(4),
        "pathological": Pathological(4, 3, 2),
        "clusters": Clusters(4, 2, 3, 2),
        "users": Users(3),
        "classes": WholeClasses(4),
        "resampled": Resampled(2),
        "overlapping": Overlapping(4, 3, 2),
    }[name]
    assert type(options) is PARTITIONS[name]
    dataset = made([40] * 8, users=True)
    spec = EpisodeSpec(2, 4, 4) if name == "resampled" else SPEC  # of all clients together
    one, same, other = (deal(options, dataset, Key(seed), spec) for seed in (0, 0, 1))
    assert (one.train.indices == same.train.indices).all()
    assert (one.train.offsets == same.train.offsets).all()
    if name == "resampled":  # all see everything: the deal of an episode is drawn later
        assert one.train.indices.tolist() == other.train.indices.tolist() == [*range(320)] * 2
        return
    assert [*map(list, one.train)] != [*map(list, other.train)]
    assert one.train.digest == same.train.digest != other.train.digest
    assert (one.test is not None) == (name in ("pathological", "clusters"))


def test_overlapping_clients_draw_classes_and_images_uniformly():
    dataset = made([10, 20, 30, 40])
    train = deal(Overlapping(4000, 2, 3), dataset).train
    seen = np.zeros(len(dataset))
    for rows in train:
        assert len(set(rows.tolist())) == 6
        assert np.unique(dataset.y[rows], return_counts=True)[1].tolist() == [3, 3]
        seen[rows] += 1
    # An image of a class with n images is drawn with probability 2/4 * 3/n.
    n = np.bincount(dataset.y)[dataset.y]
    p = 2 / 4 * 3 / n
    z = (seen - 4000 * p) / np.sqrt(4000 * p * (1 - p))
    assert np.abs(z).max() < 5
    assert 0.6 < z.std() < 1.4


def test_overlapping_clients_can_form_what_their_classes_allow():
    dataset = made([10, 20, 30, 40])
    train = deal(Overlapping(10**5, 2, 3), dataset).train
    assert (len(train), train.sizes.sum()) == (10**5, 6 * 10**5)
    assert not infeasible_clients(dataset, train, EpisodeSpec(2, 1, 2))
    assert len(infeasible_clients(dataset, train, EpisodeSpec(2, 2, 2))) == 10**5
    assert len(infeasible_clients(dataset, train, EpisodeSpec(3, 1, 1))) == 10**5
    for options, text in ((Overlapping(9, 5, 2), "there are only 4 classes"),
                          (Overlapping(9, 2, 11), "class 'c0' has 10 images")):  # fmt: skip
        with pytest.raises(DataError, match=text):
            deal(options, dataset)
    grouped = replace(dataset, groups=np.arange(len(dataset)))
    with pytest.raises(DataError, match="has groups"):
        deal(Overlapping(9, 2, 3), grouped)


def shares_of_class(p: Partition, dataset: Dataset) -> np.ndarray:
    """[client, class] share of the class's images."""
    table = np.zeros((len(p), dataset.n_classes))
    np.add.at(table, (p.owners, dataset.y[p.indices]), 1)
    return table / table.sum(axis=0)


def test_a_large_alpha_is_nearly_iid_and_a_tiny_one_gives_classes_to_single_clients():
    dataset = made([500] * 6)
    even = shares_of_class(deal(Dirichlet(5, alpha=1e6, redraws=0), dataset).train, dataset)
    huge = shares_of_class(deal(Dirichlet(5, alpha=1e300, redraws=0), dataset).train, dataset)
    tiny = shares_of_class(deal(Dirichlet(5, alpha=1e-3, redraws=0), dataset).train, dataset)
    none = shares_of_class(deal(Dirichlet(5, alpha=1e-320, redraws=0), dataset).train, dataset)
    assert abs(even - 0.2).max() < 0.01
    assert abs(huge - 0.2).max() < 0.01
    assert tiny.max(axis=0).min() > 0.99
    assert (none.max(axis=0) == 1).all()


def test_dirichlet_draws_again_until_every_client_can_form_an_episode():
    dataset, spec = made([60] * 6), EpisodeSpec(5, 1, 2)
    first = [deal(Dirichlet(5, redraws=0), dataset, Key(s), spec).train for s in range(10)]
    again = [deal(Dirichlet(5, redraws=200), dataset, Key(s), spec).train for s in range(10)]
    assert any(infeasible_clients(dataset, p, spec) for p in first)
    assert not any(infeasible_clients(dataset, p, spec) for p in again)


def test_dirichlet_keeps_the_draw_that_serves_the_most_clients():
    dataset, spec = made([60] * 6), EpisodeSpec(6, 1, 2)
    lost = [
        [len(infeasible_clients(dataset, deal(Dirichlet(10, redraws=n), dataset, Key(seed),
        spec).train, spec))
         for n in (0, 5, 50)]
        for seed in range(3)
    ]  # fmt: skip
    assert all(one == sorted(one, reverse=True) for one in lost)
    assert sum(one[-1] for one in lost) < sum(one[0] for one in lost)


def test_a_capped_client_gets_nothing_more_once_it_holds_its_equal_part():
    dataset = made([100] * 20)
    spread = []
    for cap in (False, True):
        p = deal(Dirichlet(10, 0.3, cap, redraws=0), dataset).train
        before = [
            sum(dataset.y[rows] < dataset.y[rows].max()) for rows in p
        ]  # held when the last class came
        spread.append(p.sizes.std())
        assert p.sizes.sum() == 2000
        assert (max(before) < 200) == cap
    assert spread[1] < spread[0]


def test_unable_names_the_clients_and_what_they_lack():
    dataset = made([12] * 4)
    by_class = [np.flatnonzero(dataset.y == c) for c in range(4)]
    p = Partition.of(
        [np.concatenate([rows[:6] for rows in by_class]), by_class[0][6:], np.array([], np.int64)]
    )
    assert infeasible_clients(dataset, p, EpisodeSpec(3, 1, 5)) == {
        1: "has 1 class with at least 6 examples, but a 3-way episode needs 3",
        2: "has 0 classes with at least 6 examples, but a 3-way episode needs 3",
    }
    assert list(infeasible_clients(dataset, p, EpisodeSpec(4, 1, 6))) == [0, 1, 2]
    random_way = infeasible_clients(dataset, p, EpisodeSpec((2, 5), 1, 5))
    assert (
        random_way[0] == "has 4 classes with at least 6 examples, but a 2-to-5-way episode needs 5"
    )


def test_users_without_a_number_of_clients_are_a_client_each():
    dataset = made([10] * 7, users=True)
    p = deal(Users(), dataset).train
    assert len(p) == 7
    for k in range(7):
        assert set(dataset.users[p[k]]) == {k}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Shards(5, 2, shards=9), "shards is 9; 5 clients that draw 2 each need 10"),
        (lambda: Clusters(3, 5), "clusters is 5, but there are only 3 clients"),
    ],
)
def test_impossible_options_are_refused_at_once(make, said):
    with pytest.raises(DataError, match=said):
        make()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Iid(41), "40 images among 41 clients"),
        (Dirichlet(41), "Lower `clients`"),
        (Shards(30), "cut 40 images into 60 shards"),
        (Users(), "has no users, which partition"),
        (WholeClasses(5), "clients is 5, but there are only 4 classes"),
        (Pathological(3, way=4), "may draw 5 classes; there are 4. Lower `way` to 3"),
        (Pathological(30, way=2, shot=3), r"class 'c\d' has run out: .*of 10 are left. Lower"),
        (Clusters(10, 2, way=5), "way is 5, but there are only 4 classes"),
        (Clusters(10, 2, way=2, shot=1), "needs 15 more images .* 10 of 10 are left"),
    ],
)
def test_a_deal_the_data_cannot_serve_is_refused(options, said):
    with pytest.raises(DataError, match=said):
        deal(options, made([10] * 4))


def test_rows_that_do_not_exist_are_refused():
    with pytest.raises(DataError, match=r"from 0 to 99; made has 40 images, 0\.\.39"):
        Iid(2).assign(made([10] * 4), np.array([0, 99]), Key(0), SPEC)


def test_more_clients_than_users_are_refused():
    with pytest.raises(DataError, match="clients is 8, but there are only 7 users"):
        deal(Users(8), made([10] * 7, users=True))


@pytest.mark.slow
def test_ten_thousand_clients_take_no_more_than_their_row_numbers():
    dataset = made([1000] * 100)
    for options in (Iid(10_000), Dirichlet(10_000, redraws=5), Shards(10_000)):
        p = deal(options, dataset).train
        infeasible_clients(dataset, p, SPEC)
        assert p.indices.nbytes + p.offsets.nbytes < 1_000_000
