from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedshot.core.errors import DataError, FedshotError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import ClientData, Tasks
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition, infeasible_clients


def numbered(counts: list[int]) -> Dataset:
    """Images that show their own row number, so that drawn images can be told apart."""
    y = np.repeat(np.arange(len(counts)), counts)
    y = np.random.default_rng(0).permutation(y).astype(np.int64)
    rows = np.arange(len(y))
    x = np.stack([rows // 256, rows % 256], axis=1).astype(np.uint8).reshape(-1, 1, 2, 1)
    return Dataset("numbered", x, y, tuple(f"c{c}" for c in range(len(counts))))


def rows_of(x: torch.Tensor) -> list[int]:
    return (x[:, 0, 0, 0].long() * 256 + x[:, 0, 1, 0].long()).tolist()


def everything(dataset: Dataset) -> ClientData:
    return ClientData(dataset, np.arange(len(dataset)))


def test_an_episode_has_distinct_images_right_labels_and_exact_shapes():
    dataset = numbered([30] * 8)
    rng = Key(0).numpy()
    for _ in range(50):
        e = everything(dataset).episode(EpisodeSpec(5, 3, 4), rng)
        assert e.support_x.shape == (15, 1, 2, 1)
        assert e.query_x.shape == (20, 1, 2, 1)
        assert e.support_x.dtype == e.query_x.dtype == torch.uint8
        assert e.support_y.tolist() == [c for c in range(5) for _ in range(3)]
        assert e.query_y.bincount().tolist() == [4] * 5
        rows = rows_of(e.support_x) + rows_of(e.query_x)
        assert len(set(rows)) == 35
        labels = torch.cat([e.support_y, e.query_y])
        assert e.classes[labels].tolist() == dataset.y[rows].tolist()
        assert len(set(e.classes.tolist())) == 5


@pytest.mark.parametrize("shape", [(1, 15), (5, 15), (3, 1)])
@pytest.mark.parametrize("queries", ["exact", "up_to"])
def test_what_is_nearly_alike_is_on_one_side_of_support_and_query(shape, queries):
    """Tracks of different lengths, some of them single frames; classes of two tracks, too."""
    plain = numbered([40, 60, 33, 48, 36])
    lengths = {0: [10] * 4, 1: [1] * 60, 2: [16, 17], 3: [24, 8, 8, 8], 4: [1, 2, 3, 4, 5, 6, 7, 8]}
    groups = np.zeros(len(plain), np.int64)
    for c, each in lengths.items():  # numbered anew in each class: a group is one of a class
        groups[plain.y == c] = np.repeat(np.arange(len(each)), each)
    dataset = replace(plain, groups=groups)
    spec = EpisodeSpec(3, *shape, queries=queries)
    rng = Key(0).numpy()
    seen = set()
    for e in everything(dataset).episodes(spec, rng, 60):
        support, query = np.array(rows_of(e.support_x)), np.array(rows_of(e.query_x))
        assert len({*support, *query}) == len(support) + len(query)
        assert e.support_y.bincount().tolist() == [spec.shot] * 3
        least = spec.query if queries == "exact" else 1
        assert least <= int(e.query_y.bincount().min()) <= int(e.query_y.bincount().max())
        assert int(e.query_y.bincount().max()) <= spec.query
        for c in e.classes.tolist():
            ours, others = (part[plain.y[part] == c] for part in (support, query))
            assert not set(groups[ours].tolist()) & set(groups[others].tolist())
        seen |= set(e.classes.tolist())
    # What a class can rely on is all but its largest track, and one frame of that.
    reliable = {c: sum(each) - max(each) + 1 for c, each in lengths.items()}
    assert seen == {c for c, n in reliable.items() if n >= spec.min_images}
    assert infeasible_clients(dataset, Partition.of([np.arange(len(dataset))]), spec) == {}
    wide = EpisodeSpec(5, 1, 31)
    assert (
        "1 class with at least 32"
        in infeasible_clients(dataset, Partition.of([np.arange(217)]), wide)[0]
    )
    with pytest.raises(DataError, match="class 'c0' has 31 images usable with its groups"):
        Tasks.draw(dataset, range(5), wide, 1, Key(0))


def test_groups_of_one_example_each_change_no_chances_and_no_shape():
    plain = numbered([30] * 5)
    apart = replace(plain, groups=np.arange(150))
    assert plain.digest != apart.digest
    spec = EpisodeSpec(5, 5, 20)
    one, two = (everything(d).episode(spec, Key(0).numpy()) for d in (plain, apart))
    assert one.support_x.shape == two.support_x.shape
    assert one.query_y.bincount().tolist() == two.query_y.bincount().tolist()


def test_the_order_of_the_queries_does_not_tell_their_labels():
    client = everything(numbered([30] * 5))
    rng = Key(0).numpy()
    first = [int(client.episode(EpisodeSpec(5, 1, 4), rng).query_y[0]) for _ in range(300)]
    assert np.bincount(first, minlength=5).min() > 30  # 60 expected, 30 is 4 deviations off


def test_fixed_labels_follow_the_order_of_the_classes():
    client = everything(numbered([30] * 6))
    rng, other = Key(0).numpy(), Key(0).numpy()
    for _ in range(20):
        fixed = client.episode(EpisodeSpec(3, 1, 4, labels="fixed"), rng)
        shuffled = client.episode(EpisodeSpec(3, 1, 4), other)
        assert fixed.classes.tolist() == sorted(shuffled.classes.tolist())
        both = torch.cat([fixed.support_y, fixed.query_y])
        rows = rows_of(fixed.support_x) + rows_of(fixed.query_x)
        assert fixed.classes[both].tolist() == client.dataset.y[rows].tolist()


def test_a_client_only_shows_its_own_images():
    dataset = numbered([20] * 4)
    mine = np.flatnonzero(np.arange(80) % 2 == 0)
    client = ClientData(dataset, mine)
    assert client.n == 40
    e = client.episode(EpisodeSpec(2, 1, 2), Key(0).numpy())
    x, y = client.batch(40, Key(1).numpy())
    assert set(rows_of(e.support_x) + rows_of(e.query_x)) <= set(mine.tolist())
    assert sorted(rows_of(x)) == mine.tolist()
    assert y.tolist() == dataset.y[rows_of(x)].tolist()


def test_a_batch_repeats_images_only_when_it_must():
    client = everything(numbered([5, 5]))
    assert len(set(rows_of(client.batch(10, Key(0).numpy())[0]))) == 10
    assert len(client.batch(25, Key(0).numpy())[0]) == 25


def test_the_batch_of_an_empty_client_is_refused():
    client = ClientData(numbered([5]), np.zeros(0, np.int64))
    assert client.classes.tolist() == []
    with pytest.raises(DataError, match="batch of 3 from 0 images"):
        client.batch(3, Key(0).numpy())


def test_changing_an_episode_leaves_the_dataset_alone():
    dataset = numbered([10] * 5)
    before = dataset.x.copy()
    e = everything(dataset).episode(EpisodeSpec(5, 1, 1), Key(0).numpy())
    e.support_x.zero_()
    assert (dataset.x == before).all()


def test_random_way_takes_every_value_of_its_range_and_no_other():
    client = everything(numbered([4] * 8))
    rng = Key(0).numpy()
    ways = [len(client.episode(EpisodeSpec((3, 7), 1, 1), rng).classes) for _ in range(500)]
    counts = np.bincount(ways, minlength=8)
    assert set(ways) == {3, 4, 5, 6, 7}
    assert counts[3:].min() > 60  # 100 expected; 60 is 4.5 standard deviations off


def test_classes_are_chosen_uniformly_whatever_their_size():
    client = everything(numbered([2, 4, 8, 16, 32, 64, 1]))  # the last is too small
    rng = Key(3).numpy()
    seen = np.zeros(7)
    for _ in range(600):
        seen[client.episode(EpisodeSpec(2, 1, 1), rng).classes.numpy()] += 1
    assert seen[6] == 0
    chi_square = ((seen[:6] - 200) ** 2 / 200).sum()
    assert chi_square < 20.5  # 5 degrees of freedom, 1 in 1000


def test_up_to_gives_each_class_what_it_has_left():
    dataset = numbered([3, 4, 20])
    e = everything(dataset).episode(EpisodeSpec(3, 2, 5, "up_to"), Key(0).numpy())
    queries = dict(zip(e.classes.tolist(), e.query_y.bincount().tolist(), strict=True))
    assert queries == {0: 1, 1: 2, 2: 5}
    rows = rows_of(e.support_x) + rows_of(e.query_x)
    assert len(set(rows)) == len(rows) == 14
    assert e.classes[e.query_y].tolist() == dataset.y[rows_of(e.query_x)].tolist()


@pytest.mark.parametrize("labels", ["shuffled", "fixed"])
def test_a_client_with_few_classes_gives_all_it_has(labels):
    spec = EpisodeSpec(5, 1, 2, labels=labels, classes="up_to")
    for held, large in (([0, 9, 0, 9, 1], 2), ([9, 9, 9, 9, 0], 4), ([9] * 8, 5)):
        client, rng = everything(numbered(held)), Key(0).numpy()
        seen = [client.episode(spec, rng) for _ in range(9)]
        assert {len(e.classes) for e in seen} == {large}
        assert {e.query_y.max().item() for e in seen} == {large - 1}
        if labels == "fixed":
            assert all(e.classes.tolist() == sorted(e.classes.tolist()) for e in seen)
        assert all(held[c] >= spec.min_images for e in seen for c in e.classes)


def test_of_one_class_there_is_no_episode_however_few_it_may_have():
    client = everything(numbered([9, 2, 2]))
    with pytest.raises(
        DataError, match=r"1 class with .* an episode of up to 5 classes needs 2\. Lower"
    ):
        client.episode(EpisodeSpec(5, 1, 2, classes="up_to"), Key(0).numpy())


def test_a_client_too_small_for_an_episode_says_by_how_much():
    client = everything(numbered([6, 6, 6, 5, 5, 5]))
    with pytest.raises(
        DataError, match=r"3 classes with at least 6 examples, but a 5-way episode needs 5\. Lower"
    ):
        client.episode(EpisodeSpec(5, 1, 5), Key(0).numpy())


@pytest.mark.parametrize(
    ("spec", "text", "needed"),
    [
        (EpisodeSpec(), "5-way 1-shot, 15 queries", 16),
        (EpisodeSpec((3, 7), 5, 1), "3-to-7-way 5-shot, 1 query", 6),
        (EpisodeSpec(2, 3, 15, "up_to"), "2-way 3-shot, up to 15 queries", 4),
        (EpisodeSpec(9, 1, 5, classes="up_to"), "up to 9-way 1-shot, 5 queries", 6),
    ],
)
def test_a_spec_reads_aloud_and_knows_what_a_class_needs(spec, text, needed):
    assert str(spec) == text
    assert spec.min_images == needed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"way": 0}, "way is 0; expected at least 1"),
        ({"way": (7, 3)}, r"way is \(7, 3\).*smaller end"),
        ({"way": (1, 2, 3)}, "a pair such as"),
    ],
)
def test_an_impossible_spec_is_refused(options, said):
    with pytest.raises(FedshotError, match=said):
        EpisodeSpec(**options)


def test_tasks_repeat_under_a_key_and_fewer_are_the_first_of_more():
    dataset = numbered([20] * 10)
    spec, classes = EpisodeSpec(5, 1, 5), range(4, 10)
    tasks = Tasks.draw(dataset, classes, spec, 20, Key(0))
    again = Tasks.draw(dataset, classes, spec, 20, Key(0))
    fewer = Tasks.draw(dataset, classes, spec, 7, Key(0))
    assert len(tasks) == 20
    assert tasks.support.shape == (20, 5)
    assert tasks.query.shape == (20, 25)
    assert tasks.classes.shape == (20, 5)
    assert (tasks.support[:7] == fewer.support).all()
    assert tasks.digest(dataset) == again.digest(dataset)
    others = [fewer, Tasks.draw(dataset, classes, spec, 20, Key(1))]
    assert tasks.digest(dataset) not in {other.digest(dataset) for other in others}
    assert tasks.digest(dataset) != tasks.digest(numbered([21] * 10))


def test_a_task_holds_only_the_classes_asked_for():
    dataset = numbered([20] * 10)
    tasks = Tasks.draw(dataset, [1, 3, 5], EpisodeSpec(2, 1, 5), 10, Key(0))
    for i in range(10):
        e = tasks.episode(dataset, i)
        assert set(e.classes.tolist()) < {1, 3, 5}
        assert rows_of(e.support_x) == tasks.support[i].tolist()
        assert e.classes[e.support_y].tolist() == dataset.y[tasks.support[i]].tolist()
        assert e.classes[e.query_y].tolist() == dataset.y[tasks.query[i]].tolist()


def test_random_way_tasks_are_ragged_and_not_padded():
    dataset = numbered([20] * 10)
    tasks = Tasks.draw(dataset, range(10), EpisodeSpec((2, 6), 2, 3), 30, Key(0))
    assert isinstance(tasks.support, tuple)
    for i in range(30):
        e = tasks.episode(dataset, i)
        way = len(e.classes)
        assert (len(e.support_x), len(e.query_x)) == (2 * way, 3 * way)
    assert tasks.digest(dataset)


@pytest.mark.parametrize(
    ("classes", "spec", "n", "said"),
    [
        (range(3), EpisodeSpec(5, 1, 1), 5, "5-way episode needs 5 classes; there are 3"),
        (range(6), EpisodeSpec(5, 5, 15), 5, "class 'c0' has 10 images; .* needs 20 of each"),
        (range(6), EpisodeSpec(5, 1, 1), 0, "cannot sample 0 tasks"),
        ([0, 1, 2, 3, 17], EpisodeSpec(5, 1, 1), 5, "class number 17 does not exist"),
        ([0, 0, 0, 0, 0], EpisodeSpec(5, 1, 1), 5, "has 1 class with"),
    ],
)
def test_impossible_tasks_are_refused(classes, spec, n, said):
    with pytest.raises(DataError, match=said):
        Tasks.draw(numbered([10] * 6), classes, spec, n, Key(0))


def test_episodes_come_from_a_memory_map(tmp_path):
    dataset = numbered([10] * 5)
    np.save(tmp_path / "x.npy", dataset.x)
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    mapped = Dataset("numbered", x, dataset.y, dataset.class_names)
    tasks = Tasks.draw(dataset, range(5), EpisodeSpec(5, 1, 1), 1, Key(0))
    a, b = tasks.episode(dataset, 0), tasks.episode(mapped, 0)
    assert all(torch.equal(one, other) for one, other in zip(a, b, strict=True))
