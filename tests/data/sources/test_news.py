from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshot.core.errors import DataError
from fedshot.data.sources.news import GROUPS, News20, messages, readable_part

MESSAGE = b"From: me@a.org (Some One)\nSubject: Re: a cat\n\tgoes on\nLines: 3\n\nThe dog.\n"


def member(name: str, data: bytes = MESSAGE, kind: bytes = tarfile.REGTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, "elsewhere", len(data)
    return info, data


def packed(path: Path, members: Sequence[tuple[tarfile.TarInfo, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """One message of each group in each half, in no order."""
    found = [
        member(f"20news-bydate-{part}/{group}/{n}")
        for n, part in ((20, "train"), (9, "test"))
        for group in GROUPS[::-1]
    ]
    folder = member("20news-bydate-train/sci.med", b"", tarfile.DIRTYPE)
    notes = member("README", b"notes")
    packed(tmp_path / "20newsgroups" / "20news-bydate.tar.gz", [folder, notes, *found])
    (tmp_path / "glove").mkdir()
    (tmp_path / "glove" / "glove.6B.100d.txt").write_text("the 1 2\ncat 3 4\ndog 5 6\nfrom 7 8\n")
    return tmp_path


def archive(home: Path) -> Path:
    return home / "20newsgroups" / "20news-bydate.tar.gz"


def test_both_halves_are_read_sorted_by_half_group_and_number(home):
    dataset = News20().load(home)
    assert len(dataset) == 40
    assert dataset.class_names == GROUPS == tuple(sorted(GROUPS))
    assert dataset.y.tolist() == [*range(20), *range(20)]
    assert dataset.shape == (500, 2)
    split = dataset.standard
    assert split is not None
    parts = [[GROUPS[c] for c in part] for part in (split.base, split.validation, split.novel)]
    assert [len(part) for part in parts] == [8, 5, 7]
    assert all(name.startswith(("sci.", "rec.")) for name in parts[0])
    assert all(name.startswith("comp.") for name in parts[1])


@pytest.mark.parametrize(
    ("headers", "known"),
    [
        ("subject", [0, 0, 0, 1, 0, 0, 1, 1, 0]),  # re : a CAT goes on THE DOG .
        ("none", [1, 1, 0]),  # THE DOG .
    ],
)
def test_subject_and_body_are_kept_or_the_body_alone(home, headers, known):
    x = News20(headers=headers).load(home).x
    assert (x.rows(np.array([7])) > 1).tolist() == [known]


def test_all_headers_are_kept_on_request_and_a_message_may_have_none(home):
    x = News20(headers="all", cut=2).load(home).x
    assert x.rows(np.array([0])).tolist() == [[5, 1]]
    assert readable_part("no head", "subject") == "no head"
    assert readable_part("no head", "none") == "no head"
    assert readable_part("From: x\n\nbody\n\nSubject: y", "subject") == "body\n\nSubject: y"
    assert readable_part("SUBJECT: x\nFrom: y\n\nbody", "subject") == " x\nbody"


def test_bytes_are_latin_1_and_line_ends_are_made_alike(tmp_path):
    name = "20news-bydate-train/sci.med/1"
    path = packed(tmp_path / "a.tar.gz", [member(name, b"caf\xe9\r\n\r\nbody")])
    assert messages(path) == [("sci.med", "café\n\nbody")]


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([member("../20news-bydate-train/sci.med/1")], "points outside the archive"),
        ([member("/etc/passwd")], "points outside the archive"),
        ([member("20news-bydate-train/sci.med/../../../x")], "points outside the archive"),
        ([member("a", b"", tarfile.SYMTYPE)], "'a' is a link or device"),
        ([member("a", b"", tarfile.LNKTYPE)], "'a' is a link or device"),
        ([member("a", b"", tarfile.CHRTYPE)], "'a' is a link or device"),
        ([member("20news-bydate-train/sci.medicine/1")], "none of the 20 groups. Did you mean"),
        ([member("20news-bydate-train/sci.med/1")] * 2, "sci.med/1' twice"),
        ([member("readme")], "holds no messages"),
        ([], "holds no messages"),
    ],
)
def test_members_that_do_not_belong_are_refused(home, members, said):
    packed(archive(home), members)
    with pytest.raises(DataError, match=said) as error:
        News20().load(home)
    assert "20news-bydate.tar.gz" in str(error.value)


def test_a_bomb_ends_in_an_error_and_not_in_all_of_memory(home, monkeypatch):
    monkeypatch.setattr("fedshot.data.sources.news._LIMIT", 100_000)
    zeros = member("20news-bydate-train/sci.med/1", b"\0" * 200_000)
    packed(archive(home), [zeros])
    with pytest.raises(DataError, match="unpacks to more than 100000 bytes"):
        News20().load(home)


def test_a_group_without_a_message_is_named(home):
    found = [member(f"20news-bydate-train/{group}/1") for group in GROUPS if group != "sci.med"]
    packed(archive(home), found)
    said = r"20news-bydate\.tar\.gz holds messages of 19 of its 20 classes, and none of 'sci\.med'"
    with pytest.raises(DataError, match=rf"{said}\. Fetch the file again"):
        News20().load(home)


def test_what_is_missing_or_cut_off_is_named(home):
    whole = archive(home).read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no archive", gzip.compress(b"x" * 2000)):
        archive(home).write_bytes(content)
        with pytest.raises(DataError, match=r"20news-bydate\.tar\.gz"):
            News20().load(home)
    archive(home).unlink()
    with pytest.raises(DataError, match=r"20news-bydate\.tar\.gz does not exist\. Put it there"):
        News20().load(home)
    with pytest.raises(DataError, match=r"news20 needs a data folder.*\$FEDSHOT_DATA"):
        News20().load(None)


@given(
    st.one_of(st.none(), st.binary(max_size=300)),
    st.booleans(),
    st.integers(0, 4095),
    st.integers(0, 255),
)
def test_damaged_bytes_are_read_or_refused(tmp_path_factory, data, outside, at, bit):
    folder = tmp_path_factory.getbasetemp()
    path = packed(folder / "fuzz.tar.gz", [member("20news-bydate-train/sci.med/1")])
    damaged = bytearray(path.read_bytes() if outside else gzip.decompress(path.read_bytes()))
    if data is not None:
        damaged[: len(data)] = data
    damaged[at % len(damaged)] ^= bit
    path.write_bytes(bytes(damaged) if outside else gzip.compress(bytes(damaged)))
    try:
        found = messages(path)
    except DataError:
        return
    assert [group for group, _ in found] in (["sci.med"], [])
