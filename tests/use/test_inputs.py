"""What people hand to a classifier: every kind of picture and text, and every way to be wrong."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedshot.core.errors import DataError, InputError
from fedshot.data.dataset import Dataset
from fedshot.data.example_inputs import Pictures
from fedshot.data.files.images import decode
from fedshot.data.sources.folder import ImageFolder
from fedshot.data.sources.omniglot import Omniglot
from fedshot.data.sources.tokenizer import tokenize
from fedshot.data.tokens import Tokens
from fedshot.runs.dataset_info import DatasetInfo
from fedshot.runs.experiment import Experiment
from fedshot.use.classifier import FewShotClassifier
from fedshot.use.inputs import Inputs
from system.runs import finished

PROTO: dict[str, Any] = {"method": {"name": "fl_proto", "local_steps": 1}, "run": {"rounds": 1}}
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """Return a run on a folder of coloured pictures, 12 x 10 squeezed to 12 x 12."""
    root = tmp_path_factory.mktemp("pictures")
    for c in ("ant", "bee", "cat", "dog"):
        (root / c).mkdir()
        for i in range(8):
            picture(RNG.integers(0, 256, (10, 12, 3), dtype=np.uint8)).save(root / c / f"{i}.png")
    changes: dict[str, Any] = {
        "data": {"name": "folder", "path": str(root), "size": 12},
        "split": {"base": ["ant", "bee"], "novel": ["cat", "dog"]},
        "partition": {"name": "iid", "clients": 2},
        "episode": {"way": 2, "shot": 1, "query": 1},
        "run": {"cohort": 2},
        "test": {"way": 2, "shot": 1, "query": 2, "episodes": 2},
    }
    return finished(root.with_name("run"), changes, PROTO)


def picture(pixels: np.ndarray[Any, Any]) -> Image.Image:
    return Image.fromarray(pixels)


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    picture(pixels).save(out, "png")
    return out.getvalue()


def inputs(run: Experiment) -> Inputs:
    facts = DatasetInfo.read(run.folder)
    assert facts is not None
    return Inputs(facts, run.config, lambda _: pytest.fail("there is none"))


def test_tensors_may_have_channels_first_as_in_training(run: Experiment) -> None:
    inputs = FewShotClassifier.from_run(run.folder).inputs
    pixels = RNG.integers(0, 256, (4, 12, 12, 3), dtype=np.uint8)
    first = torch.from_numpy(pixels).movedim(-1, 1)
    for given in (first, first / 255.0, list(first), torch.from_numpy(pixels)):
        assert torch.equal(inputs(given), torch.from_numpy(pixels))
    with pytest.raises(InputError, match=r"\[4, 3, 12, 12\], channels first"):
        inputs(first.numpy())


def test_files_bytes_images_and_arrays_become_what_training_had(run: Experiment) -> None:
    """The oracle is the loader of the training data itself."""
    source = run.config.data
    assert isinstance(source, ImageFolder)
    paths = sorted(Path(source.path).glob("*/*.png"))
    trained = torch.from_numpy(run.prepared.dataset.pixels)
    read = inputs(run)
    assert torch.equal(read(paths), trained)
    assert torch.equal(read([str(path) for path in paths]), trained)
    assert torch.equal(read([path.read_bytes() for path in paths]), trained)
    images = [Image.open(path) for path in paths]
    assert torch.equal(read(images), trained)
    arrays = np.stack([np.asarray(image) for image in images])
    assert torch.equal(read(arrays), trained)
    assert torch.equal(read(arrays / 255), trained)
    assert torch.equal(read(arrays.astype(np.float32) / np.float32(255)), trained)
    assert torch.equal(read(list(arrays)), trained)
    assert torch.equal(read(arrays.astype(np.int64)), trained)
    assert torch.equal(read(trained), trained)


def test_modes_and_sizes_of_pictures_are_converted(run: Experiment, tmp_path: Path) -> None:
    read, red = inputs(run), np.full((30, 20, 3), (200, 10, 10), np.uint8)
    plain = torch.from_numpy(np.full((1, 12, 12, 3), (200, 10, 10), np.uint8))
    assert torch.equal(read([picture(red)]), plain)
    palette = picture(red).quantize(4)
    assert palette.mode == "P"
    assert torch.equal(read([palette]), plain)
    alpha = np.dstack([red, np.full((30, 20), 255, np.uint8)])
    assert torch.equal(read([picture(alpha)]), plain)
    assert torch.equal(read(alpha[None]), plain)
    grey = read([picture(np.full((5, 7), 99, np.uint8))])
    assert torch.equal(grey, torch.full((1, 12, 12, 3), 99, dtype=torch.uint8))
    assert torch.equal(read(np.full((1, 5, 7), 99, np.uint8)), grey)
    assert torch.equal(read(np.full((1, 5, 7), True)), torch.full_like(grey, 255))


def test_a_picture_that_the_camera_turned_stands_upright(run: Experiment) -> None:
    pixels = np.zeros((12, 12, 3), np.uint8)
    pixels[:6] = 255
    note = Image.Exif()
    note[0x0112] = 3  # upside down
    out = io.BytesIO()
    picture(pixels[::-1]).save(out, "PNG", exif=note)
    assert torch.equal(inputs(run)([out.getvalue()])[0], torch.from_numpy(pixels))


def test_omniglots_drawings_are_turned_to_ink_on_nothing() -> None:
    """The oracle is written out: the mean of blocks of 105 / 35 pixels, then 255 minus it."""
    drawing = Image.fromarray((RNG.random((105, 105)) > 0.2).astype(np.uint8) * 255).convert("1")
    pictures = Pictures.like(Omniglot(35), (35, 35, 1))
    assert pictures.ink
    found = pictures.read(drawing, "drawing")[..., 0].astype(float)
    blocks = np.asarray(drawing.convert("L")).reshape(35, 3, 35, 3).mean(axis=(1, 3))
    assert np.abs(found - (255 - blocks)).max() <= 0.5 + 1e-9
    array = np.arange(35 * 35, dtype=np.int64).reshape(35, 35).astype(np.uint8)
    assert np.array_equal(pictures.read(array, "array")[..., 0], array)  # as the dataset has them


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (np.zeros((12, 12), np.uint8), r"array of shape \[12, 12\]; expected \[n, H, W, C\]"),
        (np.zeros((2, 12, 12, 5), np.uint8), r"image 0 has shape \[12, 12, 5\].*1 \(grey\), 3"),
        (np.zeros((2, 0, 12), np.uint8), "without pixels"),
        (np.full((1, 12, 12, 3), 1.5), r"float64 from 1.5 to 1.5.*pixels in \[0, 1\]. Scale"),
        (np.full((1, 12, 12, 3), np.nan), "NaN or infinity"),
        (np.full((1, 12, 12, 3), 300), r"int64 from 300 to 300; expected uint8"),
        (np.full((1, 12, 12, 3), 9, np.uint16), "uint16, with more than 8 bits. Convert"),
        (np.full((1, 12, 12, 3), 1j), "complex128"),
        (["no-such-file.png"], "image no-such-file.png cannot be read.*No such file"),
        ([b"GIF89a, or not"], "image 0 cannot be read.*none of PNG"),
        ([3], "example 0 is of type int; this run's examples are images"),
        ("one.png", "the examples are a string; expected arrays"),
        ({"a": 1}, "the examples are of type dict"),
        ({"one.png"}, "the examples are of type set"),
        (np.array(None, dtype=object), "the examples are of type ndarray"),
        ([("one.png", 1)], r"example 0 is of type tuple.*pass \[x for x, _ in data\]"),
        (torch.zeros(1, 12, 12, 3).to_sparse(), "a tensor that numpy cannot represent"),
    ],
)
def test_examples_that_are_no_images_are_refused(run: Experiment, x: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        inputs(run)(x)


class Column:
    """A column of a data frame as far as this needs one: values in order, rows by any number."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __getitem__(self, row: int) -> Any:
        return self.values[row - 100]


class Frame(Column):
    columns = ("image",)


class Images(torch.utils.data.Dataset[Any]):
    """A data set in torch's way, of which nothing says where it ends but its length."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> Any:
        return self.values[row % len(self.values)]


def test_what_holds_images_in_order_is_taken_as_a_list_of_them(run: Experiment) -> None:
    x = run.prepared.dataset.pixels[:3]
    read, images = inputs(run), [Image.fromarray(one) for one in x]
    objects = np.empty(3, dtype=object)
    objects[:] = list(x)
    for given in (Column(list(x)), Images(list(x)), images, Column(images), objects):
        assert torch.equal(read(given), torch.from_numpy(x))
    shares = torch.zeros(2, 12, 12, 3)
    shares[1] = 1.0
    wanted = (shares * 255).to(torch.uint8)
    for given in (shares.bfloat16(), shares.clone().requires_grad_()):
        assert torch.equal(read(given), wanted)
        assert torch.equal(read(list(given)), wanted)
    with pytest.raises(InputError, match="Choose the one column that holds them"):
        read(Frame(list(x)))


def test_labels_in_tensors_are_classes_by_their_value(run: Experiment) -> None:
    x = run.prepared.dataset.pixels[:4]
    for y in (torch.tensor([1, 2, 1, 2]), [torch.tensor(v) for v in (1, 2, 1, 2)]):
        assert FewShotClassifier.from_run(run.folder).fit(x, y).classes_.tolist() == [1, 2]
    y = torch.tensor([1.0, 2.0, 1.0, 2.0]).requires_grad_().bfloat16()
    assert FewShotClassifier.from_run(run.folder).fit(x, y).classes_.tolist() == [1, 2]


def test_deep_and_hidden_pictures_are_refused(run: Experiment) -> None:
    deep = Image.fromarray(np.arange(144, dtype=np.uint16).reshape(12, 12) * 400)
    with pytest.raises(InputError, match=r"image 0 has pixels of mode I;16, deeper than 8 bits"):
        inputs(run)([deep])
    ink = np.zeros((12, 12, 4), np.uint8)
    ink[3:6, :, 3] = 255
    hidden = r"varies only in its transparency.*Flatten it"
    with pytest.raises(InputError, match=f"image 0 {hidden}"):
        inputs(run)([picture(ink)])
    with pytest.raises(DataError, match=hidden):  # nor does a run train on it
        decode(png(ink), "one", 3, 12)


@pytest.mark.parametrize(
    ("y", "told"),
    [
        (["cat"] * 4, "all of one class, 'cat'; expected at least two classes"),
        (["cat", "dog"], "4 examples, and a label is given for 2; expected one for each"),
        (None, "requires y to be passed, but the target y is None"),
        ([0.5, 1.5, 2.5, 3.5], "Unknown label type.*Labels name classes"),
        ([1.0, np.nan, 2.0, 2.0], "NaN"),
        (np.zeros((4, 2), int), "Expected one label for each example"),
    ],
)
def test_labels_that_do_not_fit_are_refused(run: Experiment, y: Any, told: str) -> None:
    x = run.prepared.dataset.pixels[:4]
    with pytest.raises(InputError, match=told):
        FewShotClassifier.from_run(run.folder).fit(x, y)


def test_no_examples_are_refused(run: Experiment) -> None:
    with pytest.raises(InputError, match=r"no examples \(0 sample\(s\)\)"):
        FewShotClassifier.from_run(run.folder).fit([], [])


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, list[str]]:
    """Return a run on texts of four topics, and the texts."""
    folder = tmp_path_factory.mktemp("texts")
    topics = {
        "fruit": "apple pear plum", "tools": "saw nail drill",
        "birds": "crow wren owl", "ships": "mast sail keel",
    }  # fmt: skip
    words = sorted({w for line in topics.values() for w in line.split()} | {"the", "a", "."})
    vectors = "".join(f"{w} {' '.join(f'{v:.4f}' for v in RNG.normal(size=5))}\n" for w in words)
    (folder / "vectors.txt").write_text(vectors, encoding="utf-8")
    lines, said = ["text,label"], []
    for topic, known in topics.items():
        for i in range(8):
            chosen = RNG.choice(known.split(), 2 + i % 2)
            said.append(f"The {' '.join(chosen)}, a zzz.")
            lines.append(f'"{said[-1]}",{topic}')
    (folder / "texts.csv").write_text("\n".join(lines), encoding="utf-8")
    changes: dict[str, Any] = {
        "data": {
            "name": "texts", "path": str(folder / "texts.csv"),
            "vectors": str(folder / "vectors.txt"), "cut": 6,
        },
        "split": {"base": ["birds", "fruit"], "novel": ["ships", "tools"]},
        "partition": {"name": "iid", "clients": 2},
        "episode": {"way": 2, "shot": 1, "query": 1},
        "model": {"backbone": {"name": "gru", "hidden": 8}},
        "run": {"cohort": 2},
        "test": {"way": 2, "shot": 2, "query": 2, "episodes": 6},
    }  # fmt: skip
    return finished(folder / "run", changes, PROTO), said


def test_texts_become_the_rows_that_training_had(texts: tuple[Experiment, list[str]]) -> None:
    run, said = texts
    data = run.prepared.dataset
    assert isinstance(data.x, Tokens)
    trained = torch.from_numpy(data.x.rows(np.arange(len(data))))
    read = inputs(run)
    assert torch.equal(read(said), trained)
    assert torch.equal(read(np.array(said)), trained)
    assert torch.equal(read(Column(said)), trained)
    with pytest.raises(InputError, match=r"text 0 is of type tuple.*\[x for x, _ in data\]"):
        read([(said[0], 3)])
    assert torch.equal(read([tokenize(text) for text in said]), trained)
    assert torch.equal(read(trained), trained)


def test_the_score_of_texts_is_the_runs_own(texts: tuple[Experiment, list[str]]) -> None:
    run, said = texts
    classifier, episodic_test, marks = FewShotClassifier.from_run(run.folder), run.prepared.test, []
    for u in range(len(episodic_test)):
        support, query = episodic_test._tasks.support[u], episodic_test._tasks.query[u]
        _, y, *_ = episodic_test.eval_episodes[u]
        classifier.fit([said[i] for i in support], y.numpy())
        marks.append(classifier.score([said[i] for i in query], episodic_test.labels(u).numpy()))
    assert np.mean(marks) == pytest.approx(run.result().accuracy, abs=1e-15)


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (["the owl", " \n\t "], "text 1 has no words"),
        (["the owl", ""], "text 1 has no words"),
        (["the owl", "quux zzz"], "text 1: none of its 2 words is known to this run"),
        (["the owl", 3], "text 1 is of type int; this run's examples are texts"),
        ("the owl", "the texts are a string; expected a list of strings"),
        (np.array([[1, 99]]), "word numbers range from 1 to 99"),
        (np.array([[2, 0], [0, 0]]), "text 1 has no words: its row holds 0 alone"),
        (np.ones((1, 7), int), "rows have 7 words; expected 1 to 6"),
        ([Path("no-such.txt")], r"text no-such.txt cannot be read \(No such file"),
    ],
)
def test_texts_that_say_nothing_are_refused(
    texts: tuple[Experiment, list[str]], x: Any, told: str
) -> None:
    with pytest.raises(InputError, match=told):
        inputs(texts[0])(x)


def test_files_of_text_are_read_as_utf8(
    texts: tuple[Experiment, list[str]], tmp_path: Path
) -> None:
    read = inputs(texts[0])
    (tmp_path / "a.txt").write_text("The owl", encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00 owl")
    assert torch.equal(read([tmp_path / "a.txt"]), read(["The owl"]))
    with pytest.raises(InputError, match=r"b.txt is not UTF-8"):
        read([tmp_path / "b.txt"])


def test_headlines_keep_words_that_came_cut() -> None:
    from fedshot.data.example_inputs import Sentences
    from fedshot.data.sources.huffpost import HuffPost

    sentences = Sentences({"it": 2, "'s": 3, "late": 4}, 10, "all", HuffPost())
    assert sentences.read("it 's late", 0).tolist() == [2, 3, 4]
    assert sentences.read("It's late", 0).tolist() == [2, 3, 4]


def test_a_dataset_of_channels_that_no_picture_has_takes_arrays_alone(tmp_path: Path) -> None:
    x = RNG.integers(0, 256, (8, 6, 6, 2), dtype=np.uint8)
    pictures = Pictures((6, 6, 2))
    assert Dataset("two", x, np.zeros(8, np.int64), ("a",)).shape == pictures.shape
    assert np.array_equal(pictures.read(x[0], 0), x[0])
    with pytest.raises(DataError, match="cannot be converted to the 2 channels"):
        pictures.read(Image.new("L", (6, 6)), 0)
