from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import threading
import zipfile
import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedshot.core.errors import DataError
from fedshot.data.class_split import ClassSplit
from fedshot.data.example_inputs import Pictures
from fedshot.data.files import bounded, images
from fedshot.data.files.images import decode, photo
from fedshot.data.files.places import find_data_dir
from fedshot.data.sources import npz, omniglot
from fedshot.data.sources.digits import Digits
from fedshot.data.sources.folder import ImageFolder
from fedshot.data.sources.glyphs import Glyphs
from fedshot.data.sources.npz import Npz
from fedshot.data.sources.omniglot import Omniglot
from fedshot.data.sources.registry import SOURCES


def test_every_source_has_a_name_and_a_one_line_docstring():
    assert list(SOURCES) == sorted(SOURCES)
    assert {"digits", "folder", "news20", "npz", "omniglot", "texts"} <= SOURCES.keys()
    assert all((source.__doc__ or "").strip() for source in SOURCES.values())


def test_digits_come_with_scikit_learn_and_use_the_whole_range():
    dataset = Digits().load(None)
    assert dataset.x.shape == (1797, 8, 8, 1)
    assert (dataset.x.min(), dataset.x.max()) == (0, 255)
    assert dataset.class_names == tuple("0123456789")
    assert dataset.standard == ClassSplit((0, 1, 2, 3, 4), (), (5, 6, 7, 8, 9))


def test_glyphs_are_the_same_bits_on_every_machine_and_split_by_class():
    dataset = Glyphs().load(None)
    assert dataset.x.shape == (4000, 20, 20, 1)
    assert (dataset.x.min(), dataset.x.max()) == (0, 255)
    assert np.bincount(dataset.y).tolist() == [20] * 200
    assert len(np.unique(dataset.x, axis=0)) == 4000
    split = dataset.standard
    assert split.base + split.validation + split.novel == tuple(range(200))
    assert (len(split.base), len(split.validation), len(split.novel)) == (120, 30, 50)
    assert dataset.digest == "8095d2feb8be8558a03199c79d86cf7e06957c4fa1d73bc292ce2a107c3208d5"


# --- a folder of pictures ---


def picture(path: Path, colour=(255, 0, 0), size=(6, 4), mode="RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    root = tmp_path / "pets"
    picture(root / "dog" / "1.png", (0, 255, 0))
    picture(root / "cat" / "b.bmp", (0, 0, 255))
    picture(root / "cat" / "a.PNG")
    (root / "cat" / "notes.txt").write_text("not a picture")
    (root / "cat" / ".hidden.png").write_text("hidden")
    (root / ".git").mkdir()
    return root


def test_a_folder_is_read_by_class_in_the_order_of_names(pets):
    dataset = ImageFolder(str(pets)).load(None)
    assert dataset.name == "pets"
    assert dataset.class_names == ("cat", "dog")
    assert dataset.y.tolist() == [0, 0, 1]
    assert dataset.shape == (4, 6, 3)
    assert dataset.x[:, 0, 0].tolist() == [[255, 0, 0], [0, 0, 255], [0, 255, 0]]
    assert dataset.skipped == "1 file of other kinds skipped (.txt 1)"
    assert dataset.standard is None


def test_pictures_are_scaled_and_made_grey_on_request(pets):
    picture(pets / "dog" / "2.png", 200, (50, 70), "L")
    dataset = ImageFolder(str(pets), size=5, channels=1).load(None)
    assert dataset.x.shape == (4, 5, 5, 1)
    assert dataset.x[3].tolist() == [[[200]] * 5] * 5


@pytest.mark.parametrize("aspect", ["squeeze", "crop", "pad"])
def test_a_picture_becomes_a_square_with_or_without_its_aspect(tmp_path, aspect):
    """Two to one: a red margin, white, black, a red margin. Padded it is half as high."""
    image = np.zeros((8, 16, 3), np.uint8)
    image[:, :8] = 255
    image[:, :2] = image[:, -2:] = (255, 0, 0)  # the margins
    (tmp_path / "wide").mkdir()
    Image.fromarray(image).save(tmp_path / "wide" / "1.png")
    source = ImageFolder(str(tmp_path), size=4, aspect=aspect)
    square = source.load(None).x[0]
    assert square.shape == (4, 4, 3)
    red = (square[..., 0] > square[..., 1]).any()
    assert red == (aspect != "crop")  # which leaves the margins out
    black = (square == 0).all(axis=(1, 2))
    assert black.tolist() == [aspect == "pad", False, False, aspect == "pad"]
    if aspect == "crop":
        assert square[2, [0, 3], 1].tolist() == [255, 0]
    asked = Pictures.like(source, (4, 4, 3)).read(tmp_path / "wide" / "1.png", "1")
    assert (asked == square).all(), "in use it becomes what it was in training"


def test_the_group_of_a_picture_stands_in_its_name(tmp_path):
    for name in ("cat/t1_00", "cat/t1_01", "cat/t2_00", "dog/t9_00", "dog/t1_05"):
        picture(tmp_path / f"{name}.png")
    dataset = ImageFolder(str(tmp_path), groups="^[^_]+").load(None)
    assert dataset.groups.tolist() == [0, 0, 1, 0, 2]
    marked = ImageFolder(str(tmp_path), groups=r"^(t\d)_").load(None)
    assert marked.groups.tolist() == dataset.groups.tolist()
    with pytest.raises(DataError, match=r"groups is '\^p', which finds nothing in .*t1_00\.png"):
        ImageFolder(str(tmp_path), groups="^p").load(None)
    with pytest.raises(DataError, match=r"groups is '\(', not a regular expression"):
        ImageFolder(str(tmp_path), groups="(")


def test_folders_called_base_and_novel_tell_the_split(tmp_path):
    for place in ("base/zebra", "base/ant", "novel/cat", "validation/bee"):
        picture(tmp_path / place / "1.png")
    source = ImageFolder(str(tmp_path))
    dataset = source.load(None)
    assert dataset.class_names == ("ant", "bee", "cat", "zebra")
    assert dataset.standard == ClassSplit((0, 3), (1,), (2,))


def test_a_class_in_two_parts_of_the_split_is_refused(tmp_path):
    for place in ("base/ant", "novel/ant"):
        picture(tmp_path / place / "1.png")
    with pytest.raises(DataError, match="'ant' lies in both base and novel"):
        ImageFolder(str(tmp_path)).load(None)


@pytest.mark.parametrize("data", [b"", b"not a picture", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
def test_an_unreadable_picture_is_named(pets, data):
    (pets / "dog" / "broken.png").write_bytes(data)
    with pytest.raises(DataError, match=r"dog/broken\.png cannot be read .*Replace it"):
        ImageFolder(str(pets), size=4).load(None)
    (pets / "cat" / "first.png").write_bytes(data)
    said = r"2 images of .* cannot be used:\n- .*cat/first\.png.*\n- .*dog/broken\.png"
    with pytest.raises(DataError, match=said):
        ImageFolder(str(pets), size=4).load(None)


def test_a_picture_that_was_cut_off_is_named(pets):
    path = pets / "dog" / "cut.jpg"
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:-800])
    with pytest.raises(DataError, match=r"dog/cut\.jpg cannot be read"):
        ImageFolder(str(pets), size=4).load(None)


def test_pictures_of_different_sizes_are_refused_with_the_fix(pets):
    picture(pets / "dog" / "2.png", size=(9, 9))
    with pytest.raises(DataError) as caught:
        ImageFolder(str(pets)).load(None)
    assert "cat/a.PNG is 6x4" in str(caught.value)
    assert "dog/2.png is 9x9" in str(caught.value)
    assert "Set `size`" in str(caught.value)


FORKED = """
import os, signal
from io import BytesIO
from PIL import Image
from fedshot.data.files import images

images._LARGE = 100
file = BytesIO()
Image.new("RGB", (11, 11)).save(file, "PNG")
images.decode(file.getvalue(), "x", 3, 4)
child = os.fork()
if not child:
    signal.alarm(20)
    images.decode(file.getvalue(), "x", 3, 4)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_forked_process_decodes_large_images() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED]
    subprocess.run(command, check=True, timeout=60)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("limit", [5000, 1000])  # Pillow warns at once, and raises at twice
def test_a_decompression_bomb_is_refused(pets, monkeypatch, limit):
    picture(pets / "dog" / "huge.png", size=(80, 80))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(DataError, match=r"huge\.png .*safety limit.*scale it down"):
        ImageFolder(str(pets), size=4).load(None)


def test_large_images_are_decoded_in_one_thread(monkeypatch):
    """Memory is that of one of them, for any number of threads."""
    monkeypatch.setattr(images, "_LARGE", 100)
    stored = {}
    for side in (10, 11):
        file = BytesIO()
        Image.new("RGB", (side, side)).save(file, "WEBP", lossless=True)
        stored[side] = file.getvalue()
    threads = defaultdict(set)
    real = images.ImageOps.exif_transpose

    def seen(image):
        threads[image.width].add(threading.current_thread().name)
        return real(image)

    monkeypatch.setattr(images.ImageOps, "exif_transpose", seen)
    with ThreadPoolExecutor(8, "pool") as pool:
        list(pool.map(lambda i: decode(stored[10 + i % 2], "x", 3, 4), range(16)))
    assert threads[11] == {"large-images_0"}
    assert all(name.startswith("pool") for name in threads[10])


def test_deep_pixels_are_refused(pets):
    Image.fromarray(np.full((4, 6), 40_000, np.uint16)).save(pets / "dog" / "deep.png")
    with pytest.raises(DataError, match=r"deep\.png has pixels of mode I.*8 bits"):
        ImageFolder(str(pets)).load(None)


def deep_png(colour: int, channels: int) -> bytes:
    """Return a PNG of 16 bits a channel, of the values 0 to 255."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    values = np.arange(256, dtype=">u2").repeat(channels).tobytes()
    head = struct.pack(">IIBBBBB", 256, 1, 16, colour, 0, 0, 0)
    rows = zlib.compress(b"\0" + values)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def deep_tiff(order: str) -> bytes:
    """Return a TIFF of 16 bits a channel, one pixel."""
    tags = [
        (256, 1),
        (257, 1),
        (258, 0),
        (259, 1),
        (262, 2),
        (273, 0),
        (277, 3),
        (278, 1),
        (279, 6),
    ]
    place = 8 + 2 + 12 * len(tags) + 4
    out = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HIH", 42, 8, len(tags))
    for tag, value in tags:
        n, where = (3, place) if tag == 258 else (1, place + 6 if tag == 273 else value)
        out += struct.pack(f"{order}HHII", tag, 3 if n == 3 else 4, n, where)
    return out + struct.pack(f"{order}I3H3H", 0, 16, 16, 16, 1, 2, 3)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("colour.png", deep_png(2, 3)),
        ("grey_alpha.png", deep_png(4, 2)),
        ("colour_alpha.png", deep_png(6, 4)),
        ("colour.ppm", b"P6 2 1 65535\n" + np.arange(6, dtype=">u2").tobytes()),
        ("text.ppm", b"P3 2 1 1023\n0 1 2 3 4 5\n"),
        ("little.tif", deep_tiff("<")),
        ("big.tif", deep_tiff(">")),
    ],
)
def test_sixteen_bits_of_colour_are_refused_as_of_grey(pets, name, data):
    (pets / "dog" / name).write_bytes(data)
    with pytest.raises(DataError, match=rf"{name} has pixels of mode .* deeper than 8 bits"):
        ImageFolder(str(pets), size=4).load(None)
    read = (lambda: photo(data, name, 84, True, "")) if name.endswith("png") else None
    with pytest.raises(DataError, match="deeper than 8 bits"):
        (read or (lambda: decode(data, name, 3, None)))()


@pytest.mark.parametrize("kept", [b"P6 1 1 15\n\x0f\0\x07", b"P3 1 1 255\n255 0 119\n"])
def test_eight_bits_and_fewer_are_read(kept):
    assert decode(kept, "kept.ppm", 3, None).tolist() == [[[255, 0, 119]]]


def test_a_large_picture_is_refused_before_it_is_decoded(pets):
    """A picture of 9,400 x 9,400 with alpha is below Pillow's own limit."""
    head = struct.pack(">IIBBBBB", 9400, 9400, 8, 6, 0, 0, 0)
    data = deep_png(6, 4)
    (pets / "dog" / "huge.png").write_bytes(
        data[:16] + head + struct.pack(">I", zlib.crc32(b"IHDR" + head)) + data[33:]
    )
    with pytest.raises(DataError, match=r"huge\.png has 9400x9400 pixels, .*scale it down"):
        ImageFolder(str(pets), size=4).load(None)


def test_more_pictures_than_memory_holds_are_refused_first(pets, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda _: 10)  # pages, and bytes of each
    with pytest.raises(DataError, match=r"needs .* GB of memory, and this machine has .*`size`"):
        ImageFolder(str(pets)).load(None)


def test_all_that_is_not_read_is_counted(pets):
    picture(pets / "beside.png")
    picture(pets / "cat" / "more" / "1.png")
    (pets / "readme.md").write_text("not a picture")
    assert ImageFolder(str(pets)).load(None).skipped == (
        "2 files of other kinds skipped (.md 1, .txt 1); "
        "1 image beside the class folders skipped; "
        "1 folder within class folders skipped"
    )


def test_pictures_beside_the_classes_of_a_part_are_counted(tmp_path):
    for place in ("base/ant", "base", "novel/cat", "."):
        picture(tmp_path / place / "1.png")
    assert ImageFolder(str(tmp_path)).load(None).skipped == (
        "2 images beside the class folders skipped"
    )


def test_two_spellings_of_a_class_are_refused_with_both(pets):
    for name in ("caf\u00e9", "cafe\u0301"):
        picture(pets / name / "1.png")
    with pytest.raises(DataError, match=r"'cafe\\u0301' and 'caf\\xe9' differ only in whitespace"):
        ImageFolder(str(pets), size=4).load(None)


def test_a_class_without_pictures_is_named(pets):
    (pets / "fish").mkdir()
    with pytest.raises(DataError, match=r"class folder .*fish holds no image"):
        ImageFolder(str(pets)).load(None)


def test_links_that_leave_the_folder_are_refused(pets, tmp_path):
    outside = picture(tmp_path / "secret" / "x.png")
    link = pets / "dog" / "x.png"
    link.symlink_to(outside)
    with pytest.raises(DataError, match=r"dog/x\.png is a link to .*secret/x\.png, outside"):
        ImageFolder(str(pets)).load(None)
    link.unlink()
    (pets / "owl").symlink_to(outside.parent, target_is_directory=True)
    with pytest.raises(DataError, match=r"owl is a link to .*secret, outside"):
        ImageFolder(str(pets)).load(None)


def test_a_link_that_leads_back_to_itself_is_named(pets):
    (pets / "dog" / "x.png").symlink_to("x.png")
    with pytest.raises(DataError, match=r"dog/x\.png cannot be read .*symbolic links"):
        ImageFolder(str(pets)).load(None)


def test_links_within_the_folder_are_followed(pets):
    (pets / "dog" / "2.png").symlink_to(pets / "dog" / "1.png")
    assert len(ImageFolder(str(pets)).load(None)) == 4


def test_a_folder_that_is_missing_or_empty_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere is not a folder; expected"):
        ImageFolder(str(tmp_path / "nowhere")).load(None)
    with pytest.raises(DataError, match="holds no folders"):
        ImageFolder(str(tmp_path)).load(None)
    with pytest.raises(DataError, match=r"is not a folder \(relative to the working"):
        ImageFolder("nowhere").load(None)
    (tmp_path / "base" / "cat").mkdir(parents=True)
    (tmp_path / "val" / "dog").mkdir(parents=True)
    with pytest.raises(DataError, match=r"holds folders and no image.* base, validation"):
        ImageFolder(str(tmp_path)).load(None)


# --- arrays ---


def saved(path: Path, **arrays) -> Npz:
    arrays = {"x": np.zeros((3, 2, 2), np.uint8), "y": np.array([0, 1, 1]), **arrays}
    np.savez(path / "toy.npz", **{k: v for k, v in arrays.items() if v is not None})
    return Npz(str(path / "toy.npz"))


def test_an_npz_file_gains_a_channel_class_names_and_renumbered_users(tmp_path):
    plain = saved(tmp_path).load(None)
    assert plain.name == "toy"
    assert plain.x.shape == (3, 2, 2, 1)
    assert plain.class_names == ("0", "1")
    assert plain.users is None
    full = saved(
        tmp_path,
        x=np.ones((3, 2, 2, 3), np.uint8),
        y=np.array([0, 1, 1], np.uint8),
        class_names=np.array(["cat", "dog"]),
        users=np.array([900, 7, 900]),
        groups=np.array([5, -1, 5]),
    )
    dataset = full.load(None)
    assert dataset.class_names == ("cat", "dog")
    assert dataset.users is not None
    assert dataset.users.tolist() == [1, 0, 1]
    assert dataset.groups is not None
    assert dataset.groups.tolist() == [5, -1, 5]
    assert dataset.standard is None


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"y": np.array([0, "a", None], dtype=object)}, "Python objects, which could run code"),
        ({"x": np.zeros((3, 2, 2), np.float32)}, r"float32.*expected images, uint8.*0\.\.255"),
        ({"x": None}, r"no array 'x'; it has \['y'\]"),
        ({"x": None, "y": None, "z": np.zeros(1)}, "no array 'x' and no array 'y'"),
        ({"y": np.array([0.0, 1.0, 1.0])}, r"y is float64\[3\]; expected one integer"),
        ({"y": np.array([0, 1])}, r"labels are int64\[2\]; expected int64\[3\]"),
        ({"users": np.zeros((3, 1), np.int64)}, r"users is int64\[3, 1\]"),
        ({"users": np.array([3, -1, 0])}, r"users hold -1; expected numbers from 0 on"),
        ({"class_names": np.array([1, 2])}, "class_names is int64"),
        ({"class_names": np.array(["only"])}, "from 0 to 1; with 1 class names"),
    ],
)
def test_a_wrong_npz_file_is_refused_in_plain_words(tmp_path, arrays, said):
    with pytest.raises(DataError, match=said):
        saved(tmp_path, **arrays).load(None)


@pytest.mark.parametrize("label", [20_240_103, 10**8, 10**12, 2**62])
def test_labels_with_large_gaps_are_refused_before_memory_is_asked_for(tmp_path, label):
    source = saved(tmp_path, y=np.array([0, 1, label]))
    with pytest.raises(DataError, match=rf"3 different labels, and the largest is {label}; exp"):
        source.load(None)
    classes, y = np.unique(np.array([0, 1, label]), return_inverse=True)  # the fix that it names
    named = saved(tmp_path, y=y, class_names=classes.astype(str)).load(None)
    assert named.class_names == ("0", "1", str(label))


def test_labels_beyond_int64_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"y has 9223372036854775808; expected int64 numbers"):
        saved(tmp_path, y=np.array([0, 1, 2**63], np.uint64)).load(None)


def test_small_gaps_leave_classes_without_images(tmp_path):
    assert saved(tmp_path, y=np.array([0, 5, 999])).load(None).n_classes == 1000


def header(shape: str, descr: str = "'|u1'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (header("(1000000000000, 2, 2)"), "x.npy holds 0 bytes, and declares 4000000000000"),
        (header("(3, 2, 2)") + bytes(11), "x.npy holds 11 bytes, and declares 12"),
        (header("(3, (2, 2)"), "is not a complete npz file"),
        (header("(3, 'a')"), "is not a complete npz file"),
        (header("[3, 2]") + bytes(6), "is not a complete npz file"),
        (b"\x93NUMPY\x09\x00" + bytes(9), "has an unsupported version of .npy"),
    ],
)
def test_an_array_that_is_not_what_its_header_says_is_refused(tmp_path, x, said):
    source = saved(tmp_path, x=None)
    with zipfile.ZipFile(source.path, "a") as archive:
        archive.writestr("x.npy", x)
    with pytest.raises(DataError, match=said):
        source.load(None)


def test_an_npz_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, monkeypatch):
    """Sparse drawings are packed hundreds to one, so what any machine holds is always taken."""
    path = tmp_path / "toy.npz"
    np.savez_compressed(path, x=np.zeros((20, 1000, 1000), np.uint8), y=np.arange(20))
    assert len(Npz(str(path)).load(None)) == 20
    monkeypatch.setattr(bounded, "_FREE", 1 << 20)
    monkeypatch.setattr(npz, "_UNPACKED", 1 << 20)
    with pytest.raises(
        DataError, match=r"x\.npy has 20000128 bytes, expected .* np\.savez, uncompressed"
    ):
        Npz(str(path)).load(None)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["y", "y.npy"])
def test_an_array_that_is_there_twice_is_refused(tmp_path, name):
    source = saved(tmp_path)
    with zipfile.ZipFile(source.path, "a") as archive:
        archive.writestr(name, header("(3,)", "'<i8'") + bytes(24))
    with pytest.raises(DataError, match="holds 'y' twice"):
        source.load(None)


def test_arrays_that_are_packed_with_lzma_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "toy.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", header("(3, 2, 2)") + bytes(12))
        archive.writestr("y.npy", header("(3,)", "'<i8'") + bytes(24))
    with pytest.raises(DataError, match=r"x\.npy has an unsupported compression"):
        Npz(str(tmp_path / "toy.npz")).load(None)


def test_a_member_that_is_no_array_is_refused(tmp_path):
    source = saved(tmp_path, y=None)
    with zipfile.ZipFile(source.path, "a") as archive:
        archive.writestr("y", "hello")
    with pytest.raises(DataError, match="y is not a numpy array"):
        source.load(None)


def test_channels_first_are_told_from_pixels(tmp_path):
    source = saved(tmp_path, x=np.zeros((6, 3, 8, 8), np.uint8), y=np.arange(6) % 2)
    with pytest.raises(DataError, match=r"channels first; .* Write np.moveaxis\(x, -3, -1\)"):
        source.load(None)


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    cut = Path(saved(tmp_path).path)
    cut.write_bytes(cut.read_bytes()[:-30])
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "single.npy", np.zeros(3))
    for name, said in [
        ("toy.npz", "not a complete zip file"),
        ("text.npz", "not a complete zip file"),
        ("single.npy", "not a complete zip file"),
        ("none.npz", "is not a file"),
    ]:
        with pytest.raises(DataError, match=said):
            Npz(str(tmp_path / name)).load(None)


# --- Omniglot ---


def drawing(side: int = 105) -> bytes:
    paper = np.full((side, side), 255, np.uint8)
    paper[:, : side // 2] = 0  # ink on the left
    out = BytesIO()
    Image.fromarray(paper).convert("1").save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = tmp_path / "omniglot"
    (folder / "splits_vinyals").mkdir(parents=True)
    for name, letters in [
        ("background", {"Greek/character01": "train", "Greek/character02": "val"}),
        ("evaluation", {"Angelic/character01": "test"}),
    ]:
        with zipfile.ZipFile(folder / f"images_{name}.zip", "w") as archive:
            for letter, part in letters.items():
                for i in (1, 2):
                    archive.writestr(f"images_{name}/{letter}/0001_0{i}.png", drawing())
                (folder / "splits_vinyals" / f"{part}.txt").write_text(letter + "\n")
    return tmp_path


def test_a_small_omniglot_is_read_with_its_split_and_ink_bright(small):
    source = Omniglot(size=14)
    dataset = source.load(small)
    assert dataset.class_names == ("Angelic/character01", "Greek/character01", "Greek/character02")
    assert dataset.y.tolist() == [0, 0, 1, 1, 2, 2]
    assert dataset.shape == (14, 14, 1)
    assert (dataset.x[:, :, :6] == 255).all()
    assert (dataset.x[:, :, 8:] == 0).all()
    assert dataset.standard == ClassSplit((1,), (2,), (0,))


def test_a_missing_omniglot_file_is_named_with_its_place(small):
    with pytest.raises(DataError, match=r"Set \$FEDSHOT_DATA"):
        Omniglot().load(None)
    (small / "omniglot" / "splits_vinyals" / "val.txt").unlink()
    with pytest.raises(DataError, match=r"Put the file splits_vinyals/val\.txt into .*omniglot"):
        Omniglot().load(small)
    (small / "omniglot" / "images_background.zip").unlink()
    with pytest.raises(DataError, match=r"Put the file images_background\.zip into"):
        Omniglot().load(small)


def test_a_zip_with_spoilt_bytes_is_named(small):
    path = small / "omniglot" / "images_evaluation.zip"
    data = bytearray(path.read_bytes())
    data[100:140] = bytes(value ^ 255 for value in data[100:140])
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"images_evaluation\.zip is not a complete zip file"):
        Omniglot().load(small)


def test_a_zip_of_something_else_and_a_broken_drawing_are_refused(small):
    path = small / "omniglot" / "images_evaluation.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images_evaluation/Angelic/character01/0001_01.png", b"no drawing")
    with pytest.raises(DataError, match=r"Angelic/character01/0001_01\.png cannot be read"):
        Omniglot().load(small)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(DataError, match=r"images_evaluation\.zip holds no drawings"):
        Omniglot().load(small)


def test_a_split_that_names_an_unknown_character_is_refused(small):
    (small / "omniglot" / "splits_vinyals" / "val.txt").write_text("Klingon/character01")
    with pytest.raises(DataError, match=r"val\.txt names class 'Klingon/character01'"):
        Omniglot().load(small)


def test_a_missing_character_of_the_published_split_is_named(small, monkeypatch):
    shutil.rmtree(small / "omniglot" / "splits_vinyals")
    monkeypatch.setattr(omniglot, "_CHARACTERS", 3)
    with pytest.raises(DataError, match=r"^the split of Vinyals et al\. names class '"):
        Omniglot().load(small)


@pytest.mark.data
def test_omniglot_has_1623_characters_of_20_drawings_and_the_split_of_vinyals():
    folder = os.environ.get("FEDSHOT_DATA")
    if not folder or not (Path(folder) / "omniglot").is_dir():
        pytest.skip("needs omniglot below $FEDSHOT_DATA")
    dataset = Omniglot().load(Path(folder))
    assert dataset.x.shape == (32_460, 28, 28, 1)
    assert np.bincount(dataset.y).tolist() == [20] * 1623
    split = dataset.standard
    assert split is not None
    assert [len(part) for part in (split.base, split.validation, split.novel)] == [1028, 172, 423]
    assert 0.05 < dataset.x.mean() / 255 < 0.15  # ink is bright, and there is little of it
    assert "Angelic/character01" in dataset.class_names


# --- the folder of datasets ---


def test_the_data_folder_is_the_option_then_the_environment_then_the_usual_one(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("FEDSHOT_DATA", str(tmp_path))
    (tmp_path / "other").mkdir()
    assert find_data_dir(None) == tmp_path
    assert find_data_dir(str(tmp_path / "other")) == tmp_path / "other"
    with pytest.raises(
        DataError, match=r"--data-dir \(in Python `data_dir`\) is 'missing', which is not a folder"
    ):
        find_data_dir("missing")
    monkeypatch.setenv("FEDSHOT_DATA", "gone")
    with pytest.raises(DataError, match=r"\$FEDSHOT_DATA is 'gone'"):
        find_data_dir(None)
    monkeypatch.delenv("FEDSHOT_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    assert find_data_dir(None) is None
    with pytest.raises(DataError, match=r"home/fedshot, does not exist"):
        Omniglot().load(None)
    (tmp_path / "home" / "fedshot").mkdir(parents=True)
    assert find_data_dir(None) == tmp_path / "home" / "fedshot"
