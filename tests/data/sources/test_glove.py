from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedshot.core.errors import DataError, FedshotError
from fedshot.data.files import bounded
from fedshot.data.sources.embedding import TextOptions
from fedshot.data.sources.glove import find_vectors, load_vectors

LINES = b"the 0.5 1.5\n, -1 2e-1\ncat 3 4\nunk 7 8\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "vectors.txt"
    path.write_bytes(LINES)
    return path


def test_only_asked_for_words_are_kept_below_padding_and_unknown(file):
    found, table = load_vectors(file, {"cat", "the", "dog"})
    assert found == {"the": 2, "cat": 3}
    assert table.dtype == np.float32
    assert table.tolist() == [[0, 0], [0, 0], [0.5, 1.5], [3, 4]]


def test_unknown_words_may_have_the_vector_of_unk(file):
    found, table = load_vectors(file, {"cat"}, unknown="unk")
    assert table[1].tolist() == [7, 8]
    assert table[found["cat"]].tolist() == [3, 4]
    file.write_bytes(b"the 0.5 1.5\n")
    with pytest.raises(DataError, match=r"no word 'unk'\. Set `unknown` to 'zeros'"):
        load_vectors(file, {"the"}, unknown="unk")


def test_plain_gz_and_zip_give_the_same_whatever_they_are_called(file, tmp_path):
    want = load_vectors(file, {"the", "cat"})
    (tmp_path / "a.bin").write_bytes(gzip.compress(LINES, mtime=0))
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("glove.6B.2d.txt", LINES)
        archive.writestr("glove.6B.3d.txt", "the 1 2 3\n")
    for name in ("a.bin", "b.zip"):
        found, table = load_vectors(tmp_path / name, {"the", "cat"}, dim=2)
        assert found == want[0]
        assert (table == want[1]).all()
    with pytest.raises(DataError, match=r"expected one \.txt file, or one with '\.50d\.'"):
        load_vectors(tmp_path / "b.zip", {"the"}, dim=50)


def test_words_with_spaces_end_where_their_numbers_begin(file):
    file.write_bytes(b", -1 2\nat name@domain.com 1 2\n. . . 3 4\n12 5 6\ncat 7 8\n")
    found, table = load_vectors(file, {"at name@domain.com", ". . .", "12", "cat"})
    assert list(found) == ["at name@domain.com", ". . .", "12", "cat"]
    assert table[2:].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]


@pytest.mark.parametrize("first", [b"at name@domain.com 1 2\n", b"12 1 2\n"])
def test_the_first_word_may_hold_spaces_or_be_a_number(file, first):
    file.write_bytes(first + b"cat 7 8\n")
    assert load_vectors(file, {"cat"})[1][2].tolist() == [7, 8]


def test_a_packed_file_is_unpacked_to_a_bounded_multiple_of_its_size(file, monkeypatch):
    monkeypatch.setattr(bounded, "_FREE", 1 << 20)
    file.write_bytes(gzip.compress(b"the 1 2\n" + b"\n" * 10_000_000))
    with pytest.raises(DataError, match=r"vectors\.txt unpacks to more than [0-9]+ bytes"):
        load_vectors(file, {"the"})
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("glove.txt", b"\n" * 10_000_000)
    with pytest.raises(DataError, match=r"glove\.txt has 10000000 bytes, expected at most"):
        load_vectors(file, {"the"})


def test_the_first_of_a_repeated_word_counts_and_line_ends_do_not_matter(file):
    file.write_bytes(b"the 1 2 \r\n\r\nthe 3 4\r\ncat 5 6")
    found, table = load_vectors(file, {"the", "cat"})
    assert table[found["the"]].tolist() == [1, 2]
    assert table[found["cat"]].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"the 1 2\ncat 1 2 3\n", "line 2: 3 numbers after the word; expected 2"),
        (b"the 1 2\ncat\n", "line 2: 0 numbers"),
        (b"the 1 2\ncat 1 x\n", "line 2: the vector is not all numbers"),
        (b"dog 1 2\nthe 1 2\ncat 1 nan\n", "line 3: the vector holds NaN"),
        (b"the 1 2\ncat 1 1e99\n", "line 2: the vector holds NaN or infinity"),
        (b"400000 50\nthe 1 2\n", "line 1: 1 numbers.*word2vec's format; remove it"),
        (b"", "holds no word vectors"),
        (b"the" * 40_000, "line 1: longer than in any known file of word vectors"),
        (gzip.compress(LINES, mtime=0)[:-9], "is not a complete word vector file"),
        (b"\x1f\x8bnot gzip", "is not a complete word vector file"),
        (b"PK\x03\x04 not zip", "is not a complete zip file"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_line(file, content, said):
    file.write_bytes(content)
    with pytest.raises(DataError, match=said) as error:
        load_vectors(file, {"the", "cat"})
    assert "vectors.txt" in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.txt"):
        load_vectors(tmp_path / "gone.txt", {"the"})


def test_vectors_are_found_by_path_by_name_and_by_dimension(tmp_path, monkeypatch):
    folder = tmp_path / "glove"
    folder.mkdir()
    with pytest.raises(DataError, match=r"glove\.6B\.zip\. Put glove\.6B\.50d\.txt"):
        find_vectors(None, 50, tmp_path)
    archive = folder / "glove.6B.zip"
    archive.write_bytes(b"")
    assert find_vectors(None, 50, tmp_path) == archive
    for name in ("glove.6B.50d.subset.txt.gz", "glove.6B.50d.txt", "glove.6B.100d.txt.zip"):
        (folder / name).write_bytes(b"")
    assert find_vectors(None, 50, tmp_path).name == "glove.6B.50d.txt"
    assert find_vectors(None, 100, tmp_path).name == "glove.6B.100d.txt.zip"
    assert find_vectors("glove.6B.50d.txt", 1, tmp_path) == folder / "glove.6B.50d.txt"
    assert find_vectors(str(folder / "glove.6B.50d.txt"), 1, None) == folder / "glove.6B.50d.txt"
    with pytest.raises(DataError, match="no file of word vectors at missing"):
        find_vectors("missing", 50, tmp_path)
    with pytest.raises(
        DataError, match=r"no data folder.*\$FEDSHOT_DATA, or --data-dir \(in Python `data_dir`\)"
    ):
        find_vectors(None, 50, None)


def embed(texts, file, **options):
    return TextOptions(vectors=str(file), **options).embed(enumerate(texts), None, "mine")[0]


TEXTS = [["the", "dog", "the", "cat"], [], ["dog"]]


def test_texts_become_numbers_and_are_cut(file):
    x = embed(TEXTS, file, cut=3)
    assert x.rows(np.arange(3)).tolist() == [[2, 1, 2], [0, 0, 0], [1, 0, 0]]
    assert x.cut == 3
    assert x.table[2].tolist() == [0.5, 1.5]


def test_unknown_words_are_dropped_before_the_cut_on_request(file):
    x = embed(iter(TEXTS), file, cut=3, keep="known")
    assert x.rows(np.arange(3)).tolist() == [[2, 2, 3], [0, 0, 0], [0, 0, 0]]


def test_the_vector_of_unk_does_not_make_unk_a_word_of_the_texts(file):
    x = embed(TEXTS, file, cut=9, unknown="unk")
    assert x.rows(np.arange(3)).tolist() == [[2, 1, 2, 3], [0] * 4, [1, 0, 0, 0]]
    assert x.table[1].tolist() == [7, 8]


@pytest.mark.parametrize(
    ("texts", "options", "said"),
    [
        (TEXTS, {"cut": 0}, "cut is 0; expected 1 or more"),
        ([], {"cut": 1}, "mine holds no texts"),
        ([["chat"], ["chien"]], {"cut": 1}, "none of the 2 different words of mine"),
        ([[]], {"cut": 1}, "none of the 0 different words of mine"),
    ],
)
def test_options_and_texts_that_make_no_sense_are_refused(file, texts, options, said):
    with pytest.raises(FedshotError, match=said):
        embed(texts, file, **options)


@example(data=gzip.compress(LINES, mtime=0), at=12, bit=3)
@given(
    st.one_of(st.binary(max_size=200), st.just(LINES), st.just(gzip.compress(LINES, mtime=0))),
    st.integers(0, 199),
    st.integers(0, 255),
)
def test_damaged_bytes_are_read_or_refused(tmp_path_factory, data, at, bit):
    path = tmp_path_factory.getbasetemp() / "fuzz.txt"
    damaged = bytearray(data)
    if damaged:
        damaged[at % len(damaged)] ^= bit
    path.write_bytes(damaged)
    try:
        found, table = load_vectors(path, {"the", "cat", ","})
    except DataError:
        return
    assert len(table) == 2 + len(found)
    assert np.isfinite(table).all()
