"""The page: valid, self-contained, and unmoved by what names hold. Figures: repeatable, sized."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedshot.data import ClassSplit, Dataset, Partition
from fedshot.errors import DataError
from fedshot.reports import (
    Row,
    Run,
    Series,
    accuracy_curve,
    class_histogram,
    contact_sheet,
    partition_picture,
    write_page,
)
from fedshot.reports.embed import embed

EVIL = "<script>alert('x')</script> & \"$a$\" \x1b[1m"
VOID = {"meta", "link", "br", "hr", "img", "input"}
LOADS = ("src", "srcset", "data", "action", "poster", "background")


class Walk(html.parser.HTMLParser):
    """Collects tags, ids and references; fails on a tag that does not close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            assert name not in LOADS, (tag, name)
            if name == "id":
                self.ids.append(value or "")
            if name == "href":
                self.references.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def score(marks: tuple[float, ...]) -> dict[str, Any]:
    return {
        "accuracy": float(np.mean(marks)),
        "interval": 0.01,
        "episodes": len(marks),
        "tasks": "abc123",
        "per_episode": list(marks),
    }


def run(label: str, result: bool = True) -> Run:
    records: list[dict[str, Any]] = [
        {
            "round": r,
            "metrics": {"accuracy": 0.1 * r},
            "validation": {"accuracy": 0.2 + 0.1 * r, "interval": 0.05} if result else None,
            "faults": [],
            "skipped": None,
            "seconds": 1.0,
        }
        for r in range(4)
    ]
    if not result:
        records[2]["faults"] = [{"client": 7, "kind": "refused", "reason": f"not finite {EVIL}"}]
        records[3]["skipped"] = "too few replies"
    settings = {"name": "x", "seed": 3, "run": {"rounds": 9}, "data": {"name": EVIL}}
    test = {"test": score((0.5, 0.6)), "round": 3, "chosen_by": "validation"}
    return Run(label, Path("r"), settings, records, test if result else None, {"python": EVIL})


def small_partition(classes: int, clients: int) -> tuple[Partition, np.ndarray, list[str]]:
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(classes), 20)
    owners = rng.integers(0, clients, len(y))
    names = [EVIL, *(f"class {c}" for c in range(1, classes))]
    return Partition.by_owner(np.arange(len(y)), owners, clients), y, names


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("out") / "new" / "page.html"
    rows = [
        Row(EVIL, score((0.3, 0.4)), note=EVIL, bytes_down=10, bytes_up=10),
        Row("raw pixels", score((0.6, 0.5)), floor=True),
    ]
    curves = [
        Series(EVIL, [0, 5], [0.2, 0.3], [0.1, 0.1]),
        Series("other", [0, 5], [0.3, 0.4], None, "validation"),
    ]
    svg = partition_picture(*small_partition(30, 8))
    write_page(path, EVIL, rows, curves, svg, [run("fine"), run(EVIL, result=False)], [EVIL])
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def walk(page: str) -> Walk:
    walk = Walk()
    walk.feed(page)
    walk.close()
    return walk


def test_every_tag_closes(walk):
    assert walk.open == []
    assert {"main", "table", "thead", "figure", "figcaption", "svg", "details"} <= walk.tags


def test_ids_are_unique_and_references_resolve(walk, page):
    assert len(walk.ids) == len(set(walk.ids))
    own = [reference[1:] for reference in walk.references if reference.startswith("#")]
    own += re.findall(r"url\(#([^)]+)\)", page)
    own += re.findall(r'aria-labelledby="([^"]+)"', page)
    assert own
    assert set(own) <= set(walk.ids)


def test_nothing_is_fetched_and_nothing_runs(walk, page):
    assert not re.search(r"https?://", page)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert walk.tags.isdisjoint({"script", "link", "iframe", "object", "embed", "form", "base"})
    others = [r for r in walk.references if not r.startswith("#")]
    assert all(r.startswith("data:image/png;base64,") for r in others)


def test_names_from_data_are_escaped_everywhere(walk, page):
    assert "<script" not in page
    assert "\x1b" not in page
    # title, heading, note below it, row, its note, curve, setting, environment, fault
    assert page.count("&lt;script&gt;") >= 9
    assert "$a$" in page  # a dollar, not mathematics


def test_the_page_says_what_happened(walk):
    text = " ".join(" ".join(walk.text).split())
    assert "does not beat raw pixels here" in text
    assert "is unfinished: it stands at round 3 of 9" in text
    assert "Every reply counted in all 3 rounds of fine." in text
    assert "1 reply in 1 round did not count; 1 round skipped" in text
    assert "abc123" in text
    assert "tested at round 3, chosen by validation" in text


def test_floors_are_drawn_beside_curves_on_test_episodes_only(page):
    figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    test, validation = (f for f in figures if "by round: " in f)
    assert "raw pixels" in test
    assert "raw pixels" not in validation


def test_every_figure_has_a_title(page):
    svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(svgs) == 5  # two curves, each wide and narrow, and the partition
    assert all(re.match(r'<svg[^>]* role="img"[^>]*>\s*<title id="', svg) for svg in svgs)


def test_the_same_runs_make_the_same_page(tmp_path):
    for name in ("a", "b"):
        write_page(tmp_path / name, "t", [Row("m", score((0.1, 0.2)))], None, None, [run("x")])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_without_curves_the_page_draws_what_runs_recorded(tmp_path):
    write_page(tmp_path / "p", "t", [], None, None, [run("x"), run("y", result=False)])
    text = (tmp_path / "p").read_text(encoding="utf-8")
    assert "accuracy on validation episodes" in text
    assert "accuracy on training episodes" in text
    assert "No method has a result yet." in text


def test_a_figure_brings_nothing_along():
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" onload="x()"><script>x()</script>'
        '<a href="http://a"><text>in</text></a><image href="http://a/b.png"/>'
        '<g id="g" style="fill: url(http://a)"><text clip-path="url(#g)">1 &lt; 2</text></g></svg>'
    )
    found = embed(svg, "p", "a <b>")
    assert found == (
        '<svg role="img" aria-labelledby="p-title"><title id="p-title">a &lt;b&gt;</title>'
        '<image /><g id="p-g"><text clip-path="url(#p-g)">1 &lt; 2</text></g></svg>'
    )
    with pytest.raises(DataError, match="not SVG"):
        embed("<svg>", "p", "t")


def test_figures_repeat_and_carry_no_date():
    curve = [Series("a", [0, 1, 2], [0.1, 0.2, 0.3], [0.1, 0.1, 0.1])]
    one, two = (accuracy_curve(curve, {"floor": 0.2}) for _ in range(2))
    assert one == two
    assert "dc:date" not in one
    assert ">floor</text>" in one
    assert "communication round" in one
    parts = small_partition(5, 10)
    assert partition_picture(*parts) == partition_picture(*parts)


def test_png_is_a_png():
    assert accuracy_curve([Series("a", [0], [0.5])], format="png").startswith(b"\x89PNG")


def test_drawing_leaves_matplotlib_as_it_was():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    accuracy_curve([Series("a", [0], [0.5])])
    assert dict(mpl.rcParams) == before


def test_few_classes_are_bubbles_and_many_a_heat_map():
    assert "<image" not in partition_picture(*small_partition(12, 10))
    assert "<image" in partition_picture(*small_partition(13, 10))


def test_a_partition_of_many_clients_says_how_many_are_shown():
    svg = partition_picture(*small_partition(5, 80), max_clients=20)
    assert "client, first 20 of 80 shown" in svg
    some = partition_picture(*small_partition(5, 80), clients=[70, 71])
    assert ">71</text>" in some
    assert "shown" not in some


def test_clients_and_classes_without_images_can_be_drawn():
    partition = Partition.of([np.zeros(0, np.int64), np.array([0, 1])])
    svg = partition_picture(partition, np.array([2, 2, 1]), ["a", "b", "c"])
    assert ">c</text>" in svg
    assert ">a</text>" not in svg
    empty = Partition.of([np.zeros(0, np.int64)])
    assert partition_picture(empty, np.array([0]), ["a"]).startswith("<?xml")


def test_the_histogram_tells_what_classes_are_for():
    svg = class_histogram(
        np.array([0, 1, 1, 2, 3]), [EVIL, "b", "c", "d"], ClassSplit((0,), (1,), (2,))
    )
    assert "<script" not in svg
    for part in ("base", "validation", "novel", "unused"):
        assert f">{part}</text>" in svg


def test_a_series_of_uneven_lengths_is_refused():
    with pytest.raises(ValueError, match="one accuracy"):
        Series("a", [0, 1], [0.5])


def dataset(channels: int) -> Dataset:
    x = np.arange(6 * 8 * 5 * channels, dtype=np.uint8).reshape(6, 8, 5, channels)
    return Dataset("d", x, np.array([0, 0, 0, 0, 1, 1]), ("a", EVIL))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_contact_sheet_has_a_row_for_each_class(channels):
    sheet = contact_sheet(dataset(channels), [0, 1], 3, 2)
    gap = 4
    assert isinstance(sheet, Image.Image)
    assert sheet.height == 2 * (8 * 2 + gap) + gap
    left = sheet.width - 3 * (5 * 2 + gap) - gap
    assert left > 100  # the longer name
    blank = sheet.crop((left + 2 * 14, gap + 20, left + 2 * 14 + 10, gap + 20 + 16))
    assert np.asarray(blank).min() == 255  # class 1 has two images


def test_images_are_enlarged_without_smoothing():
    data = dataset(1)
    sheet = contact_sheet(data, [0], 1, 3)
    left = sheet.width - (5 * 3 + 4) - 4
    pixels = np.asarray(sheet)[4 : 4 + 24, left : left + 15, 0]
    np.testing.assert_array_equal(pixels, data.x[0, :, :, 0].repeat(3, 0).repeat(3, 1))


def test_a_sheet_that_cannot_be_drawn_is_refused():
    with pytest.raises(DataError, match="2 channels"):
        contact_sheet(dataset(2), [0])
    with pytest.raises(DataError, match="is empty"):
        contact_sheet(dataset(1), [])
