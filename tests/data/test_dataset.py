from __future__ import annotations

import numpy as np
import pytest

from fedshot.core.errors import DataError
from fedshot.core.seeds import Key
from fedshot.data.class_split import ClassSplit
from fedshot.data.copies import Copies
from fedshot.data.dataset import Dataset
from fedshot.data.tokens import Tokens


def made(n: int = 12, classes: int = 4, **changes) -> Dataset:
    parts = {
        "name": "made",
        "x": np.arange(n * 8, dtype=np.uint8).reshape(n, 2, 4, 1),
        "y": np.arange(n, dtype=np.int64) % classes,
        "class_names": tuple(f"class{c}" for c in range(classes)),
    }
    return Dataset(**{**parts, **changes})


def test_a_dataset_tells_its_shape_classes_and_rows():
    dataset = made()
    assert dataset.shape == (2, 4, 1)
    assert dataset.n_classes == 4
    assert len(dataset) == 12
    assert dataset.images_of([2, 0]).tolist() == [0, 2, 4, 6, 8, 10]
    assert dataset.images_of([]).tolist() == []
    assert repr(dataset) == "<Dataset made: 12 examples (images, [2, 4, 1]) of 4 classes>"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x": np.zeros((12, 2, 4, 1), np.float32)}, r"float32\[12, 2, 4, 1\].*expected uint8"),
        ({"x": np.zeros((12, 2, 4), np.uint8)}, r"expected uint8\[n, H, W, C\]"),
        ({"x": np.zeros((12, 2, 4, 3), np.uint8)[:, :, ::2]}, "ascontiguousarray"),
        ({"x": np.zeros((0, 2, 4, 1), np.uint8)}, "at least one image"),
        ({"x": [[1.0]] * 12}, "a list was given; expected numpy arrays.*fedshot.as_dataset"),
        ({"y": [0] * 12}, "a list was given; expected numpy arrays"),
        ({"y": np.zeros(11, np.int64)}, r"int64\[11\]; expected int64\[12\]"),
        ({"y": np.zeros(12, np.int32)}, "labels are int32"),
        ({"y": np.full(12, 4)}, r"from 4 to 4; with 4 class names .* 0\.\.3"),
        ({"y": np.full(12, -1)}, "from -1 to -1"),
        ({"class_names": ("a", "b", "a", "c")}, "'a' occurs twice"),
        ({"user_names": ("u",)}, "there are 1 user names; expected one for each user number"),
        ({"users": np.zeros(3, np.int64)}, r"users are int64\[3\]"),
        ({"users": np.full(12, -2)}, "user number -2 is negative"),
        ({"standard": ClassSplit((0,), (), (9,))}, "novel names class number 9; made has 4"),
    ],
)
def test_a_wrong_dataset_is_refused_with_what_was_expected(changes, said):
    with pytest.raises(DataError, match=said):
        made(**changes)


def test_the_digest_depends_on_every_part_and_on_nothing_else(monkeypatch):
    whole = made().digest
    assert made(name="other").digest == whole
    monkeypatch.setattr("fedshot.data.dataset._CHUNK", 24)  # three images at a time
    assert made().digest == whole
    x = made().x.copy()
    x[-1, -1, -1] += 1
    others = [
        made(x=x),
        made(x=made().x.reshape(12, 4, 2, 1)),
        made(y=np.zeros(12, np.int64)),
        made(users=np.zeros(12, np.int64)),
        made(class_names=("a", "b", "c", "d")),
    ]
    assert len({whole, *(other.digest for other in others)}) == 6


def test_identical_examples_are_counted_within_and_across_classes_and_parts():
    """Images that differ in one byte are none, wherever it is; texts without words are none."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (8, 20, 20, 3), dtype=np.uint8)
    y = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    x[1] = x[0]  # in one class
    x[4] = x[2]  # in two classes of one part
    x[6] = x[3]  # in two classes and two parts
    x[7] = x[5]
    x[7, 0, 0, 0] += 1
    data = made(x=x, y=y, class_names=("a", "b", "c"))
    base, none, novel = np.arange(5), np.arange(0), np.arange(5, 8)
    assert Copies.of(data, (base, none, novel)) == Copies(8, 6, within=2, across=4, parts=2)
    assert Copies.of(data, (base[:1], none, base[:1])) == Copies(1)  # a row is no copy of itself
    ids, offsets = np.array([2, 3, 2, 3, 2], np.int32), np.array([0, 2, 4, 5, 5, 5])
    table = np.zeros((4, 2), np.float32)
    texts = made(x=Tokens(ids, offsets, table, 2), y=np.zeros(5, np.int64), class_names=("a",))
    assert Copies.of(texts, (np.arange(5),)) == Copies(3, 2, within=2)
    said = str(Copies(200, 2, within=2))
    assert said.startswith("2 of 200 examples are identical to another one: 2 to one of the same")
    assert said.endswith("remove the copies from the data.")
    assert "remove" not in str(Copies(201, 2, within=2))


def test_a_memory_map_serves_as_images(tmp_path):
    np.save(tmp_path / "x.npy", made().x)
    mapped = made(x=np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert mapped.digest == made().digest


def test_a_split_reads_names_numbers_and_ranges():
    split = ClassSplit.from_names(made(classes=6), ["class5", "0-2"], ["3"], ["4"])
    assert split == ClassSplit((0, 1, 2, 5), (3,), (4,))


def test_a_class_name_wins_over_a_number():
    dataset = made(classes=3, class_names=("2", "0-1", "0"))
    assert ClassSplit.from_names(dataset, ["2"], ["0-1"], ["0"]) == ClassSplit((0,), (1,), (2,))


@pytest.mark.parametrize(
    ("names", "entry", "meant"),
    [
        (sorted(map(str, range(12))), "0-4", ["0", "1", "2", "3", "4"]),  # 0, 1, 10, 11, 2, ...
        ([str(c) for c in range(1, 7)], "1-3", ["1", "2", "3"]),
        (["000", "007", "010"], "0-7", ["000", "007"]),
        (["000", "007", "010"], "7", ["007"]),
        (["1.0", "2.0", "3.0"], "1-2", ["1.0", "2.0"]),  # as a table with gaps writes numbers
        (["10", "20", "30"], "10-20", ["10", "20"]),
        (["0", "1", "2", "other"], "0-2", ["0", "1", "2"]),  # by name as by position
        (["7", "cat", "dog"], "0-1", ["7", "cat"]),  # no name lies in it
    ],
)
def test_where_classes_are_named_by_whole_numbers_a_range_means_names(names, entry, meant):
    dataset = made(classes=len(names), class_names=tuple(names))
    last = next(name for name in reversed(names) if name not in meant)
    split = ClassSplit.from_names(dataset, [entry], [], [last])
    assert [names[c] for c in split.base] == sorted(meant)


@pytest.mark.parametrize(
    ("names", "entry", "said"),
    [
        (["1", "2", "3"], "0-2", r"'0-2' is not a class .*names are the integers 1 to 3"),
        (["1", "2", "3"], "0", r"'0' is not a class .*names are the integers"),
        (["1", "2", "3"], "3-1", "the smaller one first"),
        (["2", "3", "cat"], "0-2", r"by name '2', by position '2', '3', 'cat'\. List the names"),
        (["1", "cat", "dog"], "1-5", r"by name '1', by position 'cat', 'dog'"),
        (["1.0", "cat", "dog"], "1", r"'1' is ambiguous .*by name '1\.0', by pos.* 'cat'"),
        (["1", "2", "cat"], "0-999999999", r"by name '1', '2', by position '1', '2', 'cat'\."),
        (["1", "cat", "dog"], "9-999999999", r"'9-999999999' is not a class .* 0 to 2"),
    ],
)
def test_a_range_that_means_other_classes_by_name_than_by_position_is_refused(names, entry, said):
    with pytest.raises(DataError, match=said):
        ClassSplit.from_names(made(classes=3, class_names=tuple(names)), [entry], [], [names[-1]])


def test_an_unknown_class_is_answered_with_the_nearest_name():
    with pytest.raises(DataError, match=r"base: made has no class 'clas3'\. Did you mean 'class3'"):
        ClassSplit.from_names(made(), ["clas3"], [], ["class0"])


def test_many_classes_are_not_all_listed_in_an_error():
    dataset = made(classes=100)
    with pytest.raises(DataError, match=r"Closest: .*It has 100 classes") as caught:
        ClassSplit.from_names(dataset, ["klass17"], [], ["class0"])
    assert "class17" in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((["0-9"], [], ["1"]), r"'0-9' is not a class or range .* 0 to 3"),
        ((["2-1"], [], ["0"]), "the smaller one first"),
        ((["0-2"], ["2"], ["3"]), r"class 'class2' occurs twice .*base and validation\).*disjoint"),
        ((["0", "0"], [], ["3"]), "class 'class0' occurs twice"),
        (([], [], ["3"]), "no base classes"),
    ],
)
def test_an_impossible_split_is_refused(parts, said):
    with pytest.raises(DataError, match=said):
        ClassSplit.from_names(made(), *parts)


def test_a_random_split_is_disjoint_repeats_under_its_key_and_differs_under_another():
    dataset = made(n=40, classes=40)
    split = ClassSplit.at_random(dataset, 20, 5, 15, Key(1))
    assert [len(part) for part in (split.base, split.validation, split.novel)] == [20, 5, 15]
    assert sorted(split.base + split.validation + split.novel) == list(range(40))
    assert split == ClassSplit.at_random(dataset, 20, 5, 15, Key(1))
    assert split != ClassSplit.at_random(dataset, 20, 5, 15, Key(2))


def test_a_random_split_of_too_many_classes_is_refused():
    with pytest.raises(DataError, match="3 base, 1 validation and 1 novel classes; it has 4"):
        ClassSplit.at_random(made(), 3, 1, 1, Key(0))
    with pytest.raises(DataError, match=r"split\.random is \[-1, 1, 1\]; expected"):
        ClassSplit.at_random(made(), -1, 1, 1, Key(0))


def test_a_random_split_draws_classes_that_have_an_example():
    """Labels with gaps are those of a part of a larger dataset."""
    y = np.repeat([0, 3, 4, 9, 17], 2)
    gaps = Dataset("gaps", np.zeros((10, 2, 2, 1), np.uint8), y, tuple(map(str, range(18))))
    split = ClassSplit.at_random(gaps, 2, 1, 2, Key(0))
    assert sorted((*split.base, *split.validation, *split.novel)) == [0, 3, 4, 9, 17]
    with pytest.raises(DataError, match="it has 5 classes with examples, and 13 without"):
        ClassSplit.at_random(gaps, 3, 1, 2, Key(0))
