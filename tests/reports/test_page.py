"""The page: valid, self-contained, and unmoved by what names hold."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from fedshot.reports import charts
from fedshot.reports.curves import Series, metric_lines
from fedshot.reports.page import write_page
from fedshot.reports.run_files import Run, grouped
from fedshot.reports.run_views import DataViews, Map, PartitionTable
from fedshot.reports.significance import ComparisonRow
from reports.example_runs import EVIL, run, score

VOID = {"meta", "link", "br", "hr", "img", "input"}
LOADS = ("src", "srcset", "data", "action", "poster", "background", "href")


class Walk(html.parser.HTMLParser):
    """Collects tags, ids and scripts; fails on a tag that does not close or a thing that loads."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.text: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            assert name not in LOADS, (tag, name)
            if name == "id":
                self.ids.append(value or "")
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            attrs, text = self.scripts.pop()
            self.scripts.append((attrs, text + data))
        else:
            self.text.append(data)


LOOK = DataViews(
    PartitionTable((0, 1), (EVIL, "b"), ((3, 0), (1, 2)), 5),
    Map({EVIL: ((0.0, 1.0), (1.0, 0.0)), "b": ((2.0, 2.0),)}, 9, (0.5, 0.25)),
)


def written(path: Path) -> str:
    rows = [
        ComparisonRow(EVIL, score((0.3, 0.4)), note=EVIL, bytes_down=10, bytes_up=10),
        ComparisonRow("raw pixels", score((0.6, 0.5)), baseline=True),
    ]
    curves = [
        Series(EVIL, [0, 5], [0.2, 0.3], [0.1, 0.1]),
        Series("other", [0, 5], [0.3, 0.4], None, "validation"),
    ]
    groups = {"fine": [run("fine")], EVIL: [run(EVIL, result=False, way=7)]}
    looks = {"fine": LOOK, EVIL: DataViews("no data", "no data")}
    write_page(path, EVIL, rows, groups, curves, looks, [EVIL])
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("out") / "new" / "page.html")


@pytest.fixture(scope="module")
def walk(page: str) -> Walk:
    walk = Walk()
    walk.feed(page)
    walk.close()
    return walk


def figures(walk: Walk) -> dict[str, list[dict[str, Any]]]:
    """Return plotly's trees by the id of their place."""
    return {str(a["data-for"]): json.loads(t) for a, t in walk.scripts if "data-for" in a}


def words(walk: Walk) -> str:
    return " ".join(" ".join(walk.text).split())


def test_every_tag_closes_and_every_figure_has_a_place(walk):
    assert walk.open == []
    assert {"main", "table", "thead", "figure", "figcaption", "details", "mark"} <= walk.tags
    assert len(walk.ids) == len(set(walk.ids))
    assert set(figures(walk)) == {
        "curves-test", "curves-validation", "metrics", "spread", "holdings-plot", "confusion-plot",
        "map-plot",
    }  # fmt: skip
    assert set(figures(walk)) <= set(walk.ids)


def test_nothing_is_fetched(walk, page):
    assert walk.tags.isdisjoint({"link", "iframe", "object", "embed", "form", "base", "img", "a"})
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert "@import" not in style
    assert "url(" not in style
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    told = dict(part.strip().split(" ", 1) for part in policy[1].split(";"))
    assert told["default-src"] == "'none'"
    assert not {"connect-src", "font-src", "script-src-elem"} & set(told)
    assert "unsafe" not in told["script-src"]


def test_the_policy_lets_the_two_scripts_run_and_no_other(walk, page):
    kinds = [attrs.get("type") for attrs, _ in walk.scripts]
    assert set(kinds) == {"application/json", "application/octet-stream", None}
    [own] = [text for attrs, text in walk.scripts if not attrs]
    [packed] = [text for attrs, text in walk.scripts if attrs.get("id") == "plotly"]
    plotly = gzip.decompress(base64.b64decode(packed)).decode()
    assert plotly == get_plotlyjs()
    allowed = re.search(r"script-src ([^;]+);", page)
    assert allowed is not None
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in (own, plotly)]
    assert allowed[1] == " ".join(f"'sha256-{h.decode()}'" for h in hashes)


def test_names_from_data_are_escaped_everywhere(walk, page):
    assert "<script>alert" not in page
    assert "\x1b" not in page
    # title, heading, lead, note below it, row, its note, setting, environment, fault, ledger
    assert page.count("&lt;script&gt;") >= 10
    texts = json.dumps(figures(walk))
    assert "<script" not in texts  # plotly reads tags in text
    assert texts.count("&lt;script&gt;") >= 4  # curve, class, class of a confusion, class of a map


def test_the_page_says_what_happened(walk):
    text = words(walk)
    assert "does not beat raw pixels here" in text
    assert "is unfinished: 3 of 9 rounds are trained" in text
    assert "No reply was lost or rejected in the 3 rounds of fine." in text
    assert "1 lost or rejected reply in 1 round: client 7 in 1; 1 round skipped" in text
    assert "abc123" in text
    assert "3 of 9 0 1 2" not in text
    assert "3.00 12 train" in text  # the ledger: MB, messages, phase
    assert "no data" in text
    assert "2 of the 9 novel classes are shown" in text


def test_floors_are_drawn_beside_curves_on_test_episodes_only(walk):
    drawn = {name: json.dumps(trees) for name, trees in figures(walk).items()}
    assert "raw pixels" in drawn["curves-test"]
    assert "raw pixels" not in drawn["curves-validation"]


def test_rows_can_be_sorted_and_carry_their_values(page):
    assert page.count('aria-sort="none"') == 7  # all columns but the note
    assert 'data-value="0.35"' in page
    assert page.count('class="range"') == 2


def test_settings_that_differ_are_marked(page):
    assert re.search('<th scope="row">way</th><td><mark><code>\N{EN DASH}</code></mark></td>'
                     r"<td><mark><code>7</code></mark></td>", page)  # fmt: skip
    assert re.search(r'<th scope="row">run.rounds</th><td><code>9</code></td>', page)


def test_the_same_runs_make_the_same_page(tmp_path):
    assert written(tmp_path / "a") == written(tmp_path / "b")


def test_without_curves_the_page_draws_what_runs_recorded(tmp_path):
    groups = {"x": [run("x")], "y": [run("y", result=False)]}
    write_page(tmp_path / "p", "t", [], groups)
    walk = Walk()
    walk.feed((tmp_path / "p").read_text(encoding="utf-8"))
    assert {"curves-validation", "curves-training"} <= set(figures(walk))
    assert "No method has a result yet." in words(walk)


def test_curves_have_four_axes_with_the_same_accuracies():
    runs = [run("a", seed=1), run("b", seed=2)]
    assert Series.of_runs("m", runs).hours is None
    for made, seconds in zip(runs, (1800, 5400), strict=True):
        made.records[:] = [r | {"simulated": seconds * r["round"]} for r in made.records]
    series = Series.of_runs("m", runs)
    assert series is not None
    assert list(series.rounds) == [0, 1, 2, 3]
    assert series.accuracies == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert series.intervals == pytest.approx([0.05] * 4)
    drawn = {axis: charts.curves([series], {}, axis, {"m": 0})["data"][1] for axis in charts.AXES}
    assert drawn["rounds"]["x"] == [0, 1, 2, 3]
    assert drawn["megabytes"]["x"] == [0, 3, 6, 9]
    assert drawn["seconds"]["x"] == [1.5, 3.0, 4.5, 6.0]
    assert drawn["hours"]["x"] == [0, 1, 2, 3]
    assert all(one["y"] == drawn["rounds"]["y"] for one in drawn.values())


def told(label: str, rounds: int, **metrics: float) -> Run:
    """Return a run that reports each metric as a multiple of the round."""
    made = run(label)
    made.records[:] = [
        made.records[0] | {"round": r, "metrics": {k: v * r for k, v in metrics.items()}}
        for r in range(rounds)
    ]
    return made


def test_what_methods_report_is_averaged_over_seeds_and_long_runs_are_thinned():
    groups = {
        "m": [told("a", 4, loss=1.0, mi=2.0), told("b", 3, loss=3.0)],  # one does not report mi
        "long": [told("c", 1000, loss=1.0)],
    }
    found = metric_lines(groups)
    assert found["loss"]["m"] == ([0, 1, 2], [0, 2, 4])
    assert found["mi"] == {"m": ([0, 1, 2, 3], [0, 2, 4, 6])}
    rounds, values = found["loss"]["long"]
    assert len(rounds) == 334
    assert rounds[:2] == [1, 4]
    assert rounds == values
    tree = charts.training_metric(found["loss"], "loss", {"m": 0, "long": 1})
    assert [one["name"] for one in tree["data"]] == ["m", "long"]


def test_classes_whose_names_look_alike_stay_apart():
    names = [f"a very long name of a class, number {i}" for i in range(3)]
    drawn = charts.confusion({name: dict.fromkeys(names, 1) for name in names})
    heat = drawn["data"][0]
    assert len(set(heat["x"])) == 3
    assert np.shape(heat["z"]) == (3, 3)
    assert np.asarray(heat["z"]) == pytest.approx(100 / 3)


def test_a_series_of_uneven_lengths_is_refused():
    with pytest.raises(ValueError, match="one accuracy"):
        Series("a", [0, 1], [0.5])
    with pytest.raises(ValueError, match="one accuracy"):
        Series("a", [0], [0.5], seconds=[1.0, 2.0])


def test_figures_of_what_is_not_finite_are_still_json():
    series = Series("a", [0, 1], [float("nan"), 0.5], [0.1, 0.1])
    drawn = charts.curves([series], {}, "rounds", {"a": 0})
    assert drawn["data"][1]["y"] == [None, 50.0]
    json.dumps(drawn, allow_nan=False)


def test_runs_that_differ_in_the_seed_alone_are_one_row():
    first, second = run("net-0", seed=0), run("net-1", seed=1)
    other, again = run("wide", seed=0, way=7), run("net-0", seed=0)
    found = grouped([first, second, other, again])
    assert list(found) == ["net", "wide", "net-0"]
    assert found["net"] == [first, second]
    assert list(grouped([first, again])) == ["net-0", "net-0 (2)"]


def test_a_method_has_one_colour_in_every_figure():
    places = {"first": 0, "second": 1}
    curve = charts.curves([Series("second", [0, 1], [0.1, 0.2])], {}, "rounds", places)
    clients = charts.spread({"second": [("0", 0.1), ("1", 0.2)]}, {"second": 0.1}, places)
    colour = curve["data"][0]["line"]["color"]
    assert clients["data"][0]["marker"]["color"] == colour
    other = charts.spread({"first": [("0", 0.1)]}, {"first": 0.1}, places)
    assert other["data"][0]["marker"]["color"] != colour


def test_equal_rows_without_an_interval_can_be_drawn(tmp_path):
    for accuracy in (0.0, 0.5, 1.0):
        rows = [ComparisonRow("a", score((accuracy, accuracy), interval=0.0))]
        write_page(tmp_path / "p", "t", rows)
        assert "nan" not in (tmp_path / "p").read_text(encoding="utf-8").partition("</main>")[0]
