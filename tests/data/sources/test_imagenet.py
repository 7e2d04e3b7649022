"""miniImageNet and tieredImageNet in the layouts people have them in."""

from __future__ import annotations

import contextlib
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from covering import CHARACTERS
from fedshot.core.errors import DataError
from fedshot.data.sources.mini_imagenet import MiniImageNet, _rows
from fedshot.data.sources.splits.published import PARTS, PUBLISHED, packaged
from fedshot.data.sources.tiered_imagenet import TieredImageNet

pytestmark = pytest.mark.usefixtures("empty_cache")

MINI = packaged("mini_imagenet")
TIERED = packaged("tiered_imagenet")
SIDE = 8


def picture(level: int, size: tuple[int, int] = (SIDE, SIDE), kind: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (level % 256, level // 256 * 40, 99)).save(out, kind)
    return out.getvalue()


def name(wnid: str, i: int) -> str:
    return f"{wnid}{i:08}.jpg"


CLASSES = sorted(w for part in MINI.values() for w in part)
FILES = {(w, i): picture(c + 100 * i) for c, w in enumerate(CLASSES) for i in range(2)}


def csvs(files=FILES) -> dict[str, bytes]:
    return {
        f"{word}.csv": (
            "filename,label\n" + "".join(f"{name(w, i)},{w}\n" for w, i in files if w in MINI[part])
        ).encode()
        for part, word in zip(PARTS, PUBLISHED, strict=True)
    }


def write_zip(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)


def write(folder: Path, files: dict[str, bytes]) -> None:
    for member, data in files.items():
        path = folder / member
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


FLAT = {f"images/{name(w, i)}": data for (w, i), data in FILES.items()}
BY_CLASS = {f"images/{w}/{name(w, i)}": data for (w, i), data in FILES.items()}


def test_every_layout_gives_the_same_dataset_and_the_published_split(tmp_path):
    write_zip(tmp_path / "1" / "miniimagenet" / "a.zip", {**FLAT, **csvs()})
    write_zip(tmp_path / "2" / "miniimagenet" / "a.zip", {f"x/{n}": d for n, d in BY_CLASS.items()})
    write(tmp_path / "3" / "miniimagenet", {**FLAT, **csvs()})
    write(tmp_path / "4" / "miniimagenet", BY_CLASS)
    parts = {
        f"{word}/{w}/{name(w, i)}": data
        for (w, i), data in FILES.items()
        for part, word in zip(PARTS, PUBLISHED, strict=True)
        if w in MINI[part]
    }
    write(tmp_path / "5" / "miniimagenet", parts)
    sets = [MiniImageNet(size=SIDE).load(tmp_path / which) for which in "12345"]
    assert len({dataset.digest for dataset in sets}) == 1
    for dataset in sets:
        assert dataset.class_names == tuple(CLASSES)
        assert dataset.y.tolist() == [c for c in range(100) for _ in range(2)]
        split = dataset.standard
        assert split is not None
        assert [len(p) for p in (split.base, split.validation, split.novel)] == [64, 16, 20]
        assert [dataset.class_names[c] for c in split.novel] == sorted(MINI["novel"])


def test_the_csv_files_choose_the_images_and_the_classes_parts(tmp_path):
    only = {key: data for key, data in FILES.items() if key[1] == 0}
    write(tmp_path / "miniimagenet", {**BY_CLASS, **csvs(only)})
    assert len(MiniImageNet(size=SIDE).load(tmp_path)) == 100


def test_a_csv_row_without_a_file_is_named(tmp_path):
    lost = {n: d for n, d in FLAT.items() if not n.endswith(name(CLASSES[5], 1))}
    write_zip(tmp_path / "miniimagenet" / "a.zip", {**lost, **csvs()})
    with pytest.raises(DataError, match=rf"csv lists {name(CLASSES[5], 1)} .*a\.zip does not hold"):
        MiniImageNet(size=SIDE).load(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text.replace(b"filename,label", b"label"), "does not begin with"),
        (lambda text: text + b"a,b,c\n", r"row \d+: 'a,b,c'; expected a file name"),
        (lambda text: text + b"../x.jpg,n1\n", "a file name without folders"),
        (lambda text: text + b"x.jpg,n00000000\n", "lists 65 base classes; expected 64"),
        (lambda text: text + text.splitlines()[1] + b"\n", "list an image twice"),
        (lambda _: b"\xff\xfe", "cannot be read as text"),
    ],
)
def test_a_wrong_csv_is_refused(tmp_path, spoil, said):
    lists = csvs()
    write(tmp_path / "miniimagenet", {**FLAT, **lists, "train.csv": spoil(lists["train.csv"])})
    with pytest.raises(DataError, match=said):
        MiniImageNet(size=SIDE).load(tmp_path)


def test_an_image_of_another_size_is_refused_or_resized(tmp_path):
    wrong = f"images/{CLASSES[0]}/{name(CLASSES[0], 0)}"
    write(tmp_path / "miniimagenet", {**BY_CLASS, wrong: picture(5, (9, 12))})
    with pytest.raises(DataError, match=r"00000000\.jpg is 9x12 pixels; expected 8x8.*resize=true"):
        MiniImageNet(size=SIDE).load(tmp_path)
    assert MiniImageNet(size=SIDE, resize=True).load(tmp_path).shape == (SIDE, SIDE, 3)


def test_missing_classes_and_images_are_told(tmp_path):
    fetch = f"`fedshot data get mini_imagenet --data-dir {tmp_path}` says where"
    with pytest.raises(DataError, match=fetch):
        MiniImageNet().load(tmp_path)
    few = {n: d for n, d in BY_CLASS.items() if CLASSES[0] not in n}
    write(tmp_path / "miniimagenet", few)
    with pytest.raises(DataError, match="holds 99 classes, expected 100"):
        MiniImageNet(size=SIDE).load(tmp_path)
    write(tmp_path / "miniimagenet", {"images/cat/1.jpg": b""})
    with pytest.raises(DataError, match=r"cat/1\.jpg belongs to none of the 100"):
        MiniImageNet(size=SIDE).load(tmp_path)


@given(st.text(CHARACTERS, max_size=80))
def test_a_random_csv_is_read_or_a_data_error(text):
    with contextlib.suppress(DataError):
        _rows("x.csv", f"filename,label\n{text}")


# --- tieredImageNet ---

ALL = sorted(w for part in TIERED.values() for w in part)


@pytest.mark.slow
def test_tiered_classes_are_found_at_any_depth_and_split_as_published(tmp_path):
    files = {f"{w}/{w}_1.JPEG": picture(i) for i, w in enumerate(ALL)}
    write_zip(tmp_path / "1" / "tieredimagenet" / "a.zip", files)
    write(tmp_path / "2" / "tieredimagenet", {f"train/{n}": d for n, d in files.items()})
    sets = [TieredImageNet(size=SIDE).load(tmp_path / which) for which in "12"]
    assert sets[0].digest == sets[1].digest
    split = sets[0].standard
    assert split is not None
    assert [len(p) for p in (split.base, split.validation, split.novel)] == [351, 97, 160]


def test_a_missing_tiered_class_is_named(tmp_path):
    write(tmp_path / "tieredimagenet", {f"{w}/1.jpg": picture(1) for w in ALL[1:]})
    with pytest.raises(DataError, match=rf"607 of its 608 classes, and none of '{ALL[0]}'"):
        TieredImageNet(size=SIDE).load(tmp_path)


def test_a_class_that_tiered_lists_name_twice_is_refused(tmp_path):
    folder = tmp_path / "tieredimagenet"
    write(folder, {f"{w}/1.jpg": picture(1) for w in ALL[:2]})
    for part, word in zip(PARTS, PUBLISHED, strict=True):
        rows = [f"{w},animal\n" for w in TIERED[part]]
        write(folder, {f"{word}.csv": "".join(rows + rows[:1]).encode()})
    said = rf"train\.csv lists class '{TIERED['base'][0]}' twice"
    with pytest.raises(DataError, match=said):
        TieredImageNet(size=SIDE).load(tmp_path)


def test_the_lists_that_come_with_fedshot_are_disjoint():
    for lists in (MINI, TIERED, packaged("cifar100")["fc100"], packaged("cifar100")["cifar_fs"]):
        names = [name for part in PARTS for name in lists[part]]
        assert len(names) == len(set(names))
    assert np.all([len(w) == 9 for w in ALL])
