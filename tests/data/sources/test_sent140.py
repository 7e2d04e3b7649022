from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshot.core.errors import DataError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.sources.sent140 import Sent140, split_users, tweets

ROWS = [
    ("4", "zoe_handle", "@adam_handle a good cat &amp; a dog"),
    ("0", "adam_handle", "bad cat!"),
    ("2", "neutral_handle", "a cat"),
    ("0", "wordless_handle", "hmpf"),
    ("4", "zoe_handle", "good good"),
    ("0", "eve_handle", "a a a " * 20),
]
HANDLES = {row[1] for row in ROWS}
NAME = "training.1600000.processed.noemoticon.csv"


def sheet(rows=ROWS) -> str:
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerows(
        (p, str(i), "Mon", "NO_QUERY", who, text) for i, (p, who, text) in enumerate(rows)
    )
    return out.getvalue()


def leaf() -> dict:
    data: dict = {"users": [], "num_samples": [], "user_data": {}}
    for polarity, who, text in ROWS:
        if polarity == "2":
            continue
        if who not in data["user_data"]:
            data["users"].append(who)
            data["user_data"][who] = {"x": [], "y": []}
        data["user_data"][who]["x"].append(["1", "Mon", "NO_QUERY", who, text, "training"])
        data["user_data"][who]["y"].append(int(polarity) // 4)
    return data


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "glove").mkdir()
    (tmp_path / "glove" / "glove.6B.100d.txt").write_text("a 1 2\ngood 3 4\ncat 5 6\ndog 7 8\n")
    (tmp_path / "sent140").mkdir()
    (tmp_path / "sent140" / NAME).write_text(sheet(), encoding="latin-1")
    (tmp_path / "sent140" / "leaf.json").write_text(json.dumps(leaf()))
    return tmp_path


def test_known_words_are_kept_and_users_are_numbers_by_first_appearance(home):
    dataset = Sent140().load(home)
    assert dataset.class_names == ("negative", "positive")
    assert dataset.y.tolist() == [1, 0, 1, 0]
    assert dataset.users is not None
    assert dataset.users.tolist() == [0, 1, 0, 2]
    words = dataset.x.rows(np.arange(3))
    assert words.tolist() == [[2, 3, 4, 2, 5], [4, 0, 0, 0, 0], [3, 3, 0, 0, 0]]
    assert dataset.x.lengths(np.arange(4)).max() == 20
    assert dataset.standard is None


def test_all_words_are_kept_on_request(home):
    dataset = Sent140(keep="all").load(home)
    assert len(dataset) == 5
    # <user> a good cat & a dog
    assert dataset.x.rows(np.array([0])).tolist() == [[1, 2, 3, 4, 1, 2, 5]]


def test_leafs_json_holds_the_same_tweets(home):
    dataset, other = Sent140().load(home), Sent140(file="leaf.json").load(home)
    order = [0, 2, 1, 3]  # LEAF's go by user
    assert other.y.tolist() == dataset.y[order].tolist()
    assert other.users is not None
    assert other.users.tolist() == [0, 0, 1, 2]
    assert other.x.rows(np.arange(4)).tolist() == dataset.x.rows(np.array(order)).tolist()


def test_users_with_few_tweets_are_left_out_and_the_others_counted_anew(home):
    cross = ("0", "zoe_handle", "a cat")
    (home / "sent140" / NAME).write_text(sheet([*ROWS[1:], cross]))
    dataset = Sent140(min_tweets=2).load(home)
    assert dataset.users is not None
    assert dataset.users.tolist() == [0, 0]
    assert dataset.y.tolist() == [1, 0]
    with pytest.raises(DataError, match="no user has 9 tweets; the most is 2"):
        Sent140(min_tweets=9).load(home)


def test_some_of_the_users_take_part_and_always_the_same(home):
    rows = [(str(4 * (n % 2)), f"{name}_handle", "a cat") for name in "abcdefgh" for n in range(2)]
    (home / "sent140" / NAME).write_text(sheet(rows))
    one, two = (Sent140(min_tweets=2, users=n).load(home) for n in (3, 3))
    assert one.users is not None
    assert np.bincount(one.users).tolist() == [2, 2, 2]
    assert one.digest == two.digest
    with pytest.raises(DataError, match="users is 9; 8 users have 2 tweets"):
        Sent140(min_tweets=2, users=9).load(home)


def test_a_label_without_a_tweet_is_named(home):
    said = "holds tweets of 1 of its 2 classes, and none of 'negative'. Lower `min_tweets`"
    with pytest.raises(DataError, match=rf"noemoticon\.csv {said}"):
        Sent140(min_tweets=2).load(home)
    positive = [row for row in ROWS if row[0] == "4"]
    (home / "sent140" / NAME).write_text(sheet(positive))
    with pytest.raises(DataError, match=said):
        Sent140().load(home)


def test_a_file_that_begins_like_the_publishers_is_found(home):
    path = home / "sent140" / NAME
    path.rename(path.with_name("training.1600000.processed.noemoticon.part.csv"))
    assert len(Sent140().load(home)) == 4
    with pytest.raises(DataError, match=r"gone\.csv cannot be read"):
        Sent140(file="gone.csv").load(home)
    with pytest.raises(DataError, match="sent140 needs a data folder"):
        Sent140().load(None)


def test_no_handle_is_left_anywhere_in_the_dataset(home):
    dataset = Sent140(keep="all").load(home)
    told = repr(dataset) + repr(vars(dataset)) + repr(vars(dataset.x))
    assert not any(handle in told for handle in HANDLES)


@pytest.mark.parametrize(
    "content",
    [
        "polarity,id,date,query,zoe_handle,text\n",
        '"4","1","Mon","NO","zoe_handle"\n',
        '"3","1","Mon","NO","zoe_handle","hi"\n',
        '"zoe_handle","1","Mon","NO","4","hi"\n',
        '"4","1","Mon","NO","","zoe_handle"\n',
        '"4","1","Mon","NO","zoe_handle","' + "a" * 200_000,
    ],
)
def test_a_bad_row_is_refused_without_quoting_it(home, content):
    (home / "sent140" / NAME).write_text(content)
    with pytest.raises(DataError, match=r"noemoticon\.csv, (after )?line \d") as error:
        Sent140().load(home)
    assert not any(handle in str(error.value) for handle in HANDLES)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[" * 100_000,
        "[1]",
        "7",
        '{"users": ["zoe_handle"]}',
        '{"users": ["zoe_handle"], "user_data": {}}',
        '{"users": ["zoe_handle"], "user_data": {"zoe_handle": {"x": [["zoe_handle"]], "y": [1]}}}',
        '{"users": ["zoe_handle"], "user_data": {"zoe_handle": {"x": [], "y": [1]}}}',
        '{"users": ["zoe_handle"], "user_data": {"zoe_handle": {"x": [[1,2,3,4,"hi"]], "y": [2]}}}',
        '{"users": ["zoe_handle"], "user_data": {"zoe_handle": {"x": [[1,2,3,4,5]], "y": [1]}}}',
        '{"users": [["zoe_handle"]], "user_data": {}}',
        '{"users": [], "user_data": {"zoe_handle": {}, "zoe_handle": {}}}',
    ],
)
def test_json_that_leaf_did_not_write_is_refused_without_quoting_it(home, content):
    (home / "sent140" / "leaf.json").write_text(content)
    with pytest.raises(DataError, match=r"leaf\.json is not") as error:
        Sent140(file="leaf.json").load(home)
    shown: BaseException | None = error.value
    while shown is not None:  # a traceback shows what an error came from, too
        assert not any(handle in str(shown) for handle in HANDLES)
        shown = None if shown.__suppress_context__ and not shown.__cause__ else shown.__cause__


@given(st.binary(max_size=120), st.integers(0, 400), st.integers(0, 255), st.booleans())
def test_damaged_bytes_are_read_or_refused(tmp_path_factory, data, at, bit, as_json):
    path = tmp_path_factory.getbasetemp() / ("fuzz.json" if as_json else "fuzz.csv")
    good = bytearray((json.dumps(leaf()) if as_json else sheet()).encode())
    good[at % len(good)] ^= bit
    for content in (bytes(good), data):
        path.write_bytes(content)
        try:
            found = list(tweets(path))
        except DataError:
            continue
        assert all(label in (0, 1) for _, label, _ in found)


# Users, not classes, are new at test


def written(users: list[int]) -> Dataset:
    x = np.zeros((len(users), 1, 1, 1), np.uint8)
    y = np.arange(len(users), dtype=np.int64) % 2
    return Dataset("made", x, y, ("n", "p"), np.array(users, dtype=np.int64))


def test_users_are_split_whole_and_nobody_is_in_two_parts():
    dataset = written([i % 10 for i in range(57)])
    assert dataset.users is not None
    parts = split_users(dataset, (0.6, 0.2, 0.2), Key(0))
    users = [set(dataset.users[part].tolist()) for part in parts]
    assert [len(part) for part in users] == [6, 2, 2]
    assert sorted(c for part in users for c in part) == list(range(10))
    assert sorted(np.concatenate(parts).tolist()) == list(range(57))
    assert all((np.diff(part) > 0).all() for part in parts)
    again = split_users(dataset, (0.6, 0.2, 0.2), Key(0))
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))
    other = split_users(dataset, (0.6, 0.2, 0.2), Key(1))
    assert any(a.tolist() != b.tolist() for a, b in zip(parts, other, strict=True))


def test_shares_may_leave_users_out_and_parts_empty():
    train, validation, test = split_users(written([0, 1, 2, 3]), (0.5, 0, 0.25), Key(0))
    assert (len(train), len(validation), len(test)) == (2, 0, 1)


@pytest.mark.parametrize("shares", [(0.5, 0.6, 0.1), (-0.1, 0.5, 0.5), (float("nan"), 0.1, 0.1)])
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(DataError, match=r"shares are .*sum to 1 or less"):
        split_users(written([0, 1, 2, 3]), shares, Key(0))


def test_a_part_of_nobody_and_a_dataset_without_users_are_refused():
    with pytest.raises(DataError, match=r"a share of 0\.2 of 2 users is less than one user"):
        split_users(written([0, 1]), (0.2, 0.0, 0.8), Key(0))
    images = Dataset("i", np.zeros((2, 1, 1, 1), np.uint8), np.arange(2), ("a", "b"))
    with pytest.raises(DataError, match="i has no users"):
        split_users(images, (0.8, 0.1, 0.1), Key(0))
