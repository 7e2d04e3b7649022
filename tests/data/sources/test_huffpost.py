from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshot.core.errors import DataError
from fedshot.data.sources.huffpost import HuffPost, headlines


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "glove").mkdir()
    (tmp_path / "glove" / "glove.6B.100d.txt").write_text("a 1 2\ncat 3 4\n's 5 6\n")
    (tmp_path / "huffpost").mkdir()
    return tmp_path


def write(home: Path, *rows: object) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (home / "huffpost" / "huffpost.json").write_text("\n".join(lines))


def test_both_forms_of_a_row_are_the_same_and_words_stay_as_they_are(home):
    first = ({"raw": "a cat 's don't", "label": 40}, {"text": ["a", "cat", "'s"], "label": 0})
    write(home, *first, *({"raw": "a", "label": c} for c in range(1, 40)))
    dataset = HuffPost().load(home)
    assert dataset.x.rows(np.arange(2)).tolist() == [[2, 3, 4, 1], [2, 3, 4, 0]]
    assert dataset.y.tolist() == [40, *range(40)]
    assert dataset.class_names == tuple(map(str, range(41)))
    assert dataset.shape == (44, 2)
    split = dataset.standard
    assert split is not None
    ends = [(part[0], part[-1], len(part)) for part in (split.base, split.validation, split.novel)]
    assert ends == [(0, 19, 20), (20, 24, 5), (25, 40, 16)]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"raw": "a", "label": 41}, r"label is not an integer in 0\.\.40"),
        ({"raw": "a", "label": True}, "label is not an integer"),
        ({"raw": "a"}, "label is not an integer"),
        ({"label": 1}, 'expected "raw"'),
        ({"text": "a cat", "label": 1}, 'expected "raw"'),
        ({"text": ["a", 1], "label": 1}, 'expected "raw"'),
    ],
)
def test_a_bad_row_is_refused_with_its_line(home, row, said):
    write(home, {"raw": "a", "label": 0}, row)
    with pytest.raises(DataError, match=rf"huffpost\.json, line 2: {said}"):
        HuffPost().load(home)


def test_classes_without_a_headline_are_named(home):
    write(home, *({"raw": "a cat", "label": c} for c in range(41) if c not in (3, 40)))
    said = r"huffpost\.json holds headlines of 39 of its 41 classes, and none of '3', '40'"
    with pytest.raises(DataError, match=rf"{said}\. Fetch the file again"):
        HuffPost().load(home)


@given(st.binary(max_size=80), st.integers(0, 60), st.integers(0, 255))
def test_damaged_bytes_are_read_or_refused(tmp_path_factory, data, at, bit):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    good = bytearray(b'{"raw": "a cat \xc3\xa9", "label": 3}\n{"text": ["a"], "label": 4}\n')
    good[at % len(good)] ^= bit
    for content in (bytes(good), data):
        path.write_bytes(content)
        try:
            found = list(headlines(path))
        except DataError:
            continue
        assert all(0 <= label < 41 for label, _ in found)
