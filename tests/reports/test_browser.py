"""The page as a browser has it: drawn, switched, sorted, narrow, dark, on paper; never a word."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedshot.reports.curves import Series
from fedshot.reports.page import write_page
from fedshot.reports.run_views import DataViews, Map, PartitionTable
from fedshot.reports.significance import ComparisonRow
from reports.example_runs import run, score

pytestmark = pytest.mark.slow

EVIL = (
    "<img src=x onerror=\"window.hit='img'\"><script>window.hit='script'</script>"
    '<a href="javascript:window.hit=1">a</a><b>b</b> %{x} &lt;i&gt; </script>'
)
LONG = "a_name_that_does_not_break_" * 8
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = os.environ.get("CHROME") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no Chromium on this machine; set CHROME to its program")
    with playwright.sync_playwright() as session:
        started = session.chromium.launch(executable_path=found, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("out") / "page.html"
    rows = [
        ComparisonRow("low", score((0.2, 0.3)), note="n " * 60, bytes_down=9_000_000),
        ComparisonRow(EVIL, score((0.4, 0.5)), bytes_down=30_000_000),
        ComparisonRow(LONG, score((0.3, 0.4)), bytes_down=200),
        ComparisonRow("raw pixels", score((0.6, 0.5)), baseline=True),
    ]
    cost = {"megabytes": [0.0, 6.0], "seconds": [0.5, 2.0]}
    curves = [
        Series(label, [0, 5], [0.2, 0.3 + 0.1 * i], [0.1, 0.1], **cost)
        for i, label in enumerate([EVIL, LONG])
    ]
    groups = {"low": [run("low")], EVIL: [run(EVIL)], LONG: [run(LONG, result=False)]}
    classes = (EVIL, LONG, "c", EVIL)
    look = DataViews(
        PartitionTable((0, 1), classes, ((3, 0, 1, 2), (1, 2, 3, 4)), 2),
        Map({EVIL: ((0.0, 1.0),), LONG: ((1.0, 0.0),)}, 2, (0.5, 0.2)),
    )
    write_page(path, EVIL, rows, groups, curves, {"low": look, EVIL: DataViews(EVIL, EVIL)}, [EVIL])
    return path


class Visit:
    """A page opened in a window of its own, and everything that it complained of or asked for."""

    def __init__(self, browser: Any, path: Path, width: int, **options: Any) -> None:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.page = context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.wait("document.documentElement.dataset.drawn === 'yes'")

    def wait(self, words: str) -> None:
        """Wait until an expression holds; the page forbids a script that goes on asking."""
        while not self.page.evaluate(words):
            self.page.wait_for_timeout(20)

    def is_well(self) -> None:
        """Check that nothing ran that was not ours, and that nothing was asked of anybody."""
        assert self.said == []
        assert [u for u in self.asked if not u.startswith(("file:", "data:", "blob:"))] == []
        assert self.page.evaluate("window.hit === undefined")
        # Of links, none but what is ours; of images, none but what plotly painted itself.
        assert self.page.locator("main a[href], main img, main iframe").count() == 0
        links = "[...document.querySelectorAll('svg a')].map((a) => a.outerHTML)"
        assert self.page.evaluate(links) == []


SOFT = {"light": "rgb(91, 97, 107)", "dark": "rgb(162, 168, 178)"}  # text of the axes
INK = "getComputedStyle(document.querySelector('#curves-test .xtick text')).fill"
SIZES = {"desk": (1200, {}), "phone": (390, {"has_touch": True, "is_mobile": True})}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_the_page_draws_every_figure_and_is_silent(
    browser: Any, path: Path, size: str, scheme: str
) -> None:
    width, options = SIZES[size]
    visit = Visit(browser, path, width, color_scheme=scheme, **options)
    places = visit.page.locator(".plot")
    assert places.count() == 6
    for i in range(places.count()):
        assert places.nth(i).locator("svg.main-svg").count() >= 1
        box = places.nth(i).bounding_box()
        assert box["height"] > 120
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    over = "(({scrollWidth, clientWidth}) => scrollWidth - clientWidth)(%s)"
    scrolled = visit.page.evaluate(over % "document.querySelector('.sortable').parentElement")
    assert size == "desk" or scrolled == 0
    paper = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(18, 20, 23)") == (scheme == "dark")
    assert visit.page.evaluate(INK) == SOFT[scheme]
    visit.is_well()


def test_the_axis_of_the_curves_switches_in_place(browser: Any, path: Path) -> None:
    visit = Visit(browser, path, 1200)
    place = visit.page.locator("#curves-test")
    title = place.locator(".xtitle")
    assert title.text_content() == "communication round"
    xs = "[...document.getElementById('curves-test').data].slice(1, 2).map((t) => [...t.x])"
    ys = xs.replace("t.x", "t.y")
    before = visit.page.evaluate(ys)
    for name, words, x in (
        ("megabytes", "MB sent and received, all clients together", [0, 6]),
        ("seconds", "seconds of training", [0.5, 2]),
        ("rounds", "communication round", [0, 5]),
    ):
        button = visit.page.get_by_role("button", name=name, exact=True)
        button.focus()
        visit.page.keyboard.press("Enter")
        visit.wait(f"document.querySelector('#curves-test .xtitle').textContent === '{words}'")
        assert button.get_attribute("aria-pressed") == "true"
        assert visit.page.evaluate(xs) == [x]
        assert visit.page.evaluate(ys) == before
    visit.is_well()


def test_names_are_shown_as_they_are(browser: Any, path: Path) -> None:
    visit = Visit(browser, path, 1200)
    legend = visit.page.locator("#curves-test .legendtext").all_text_contents()
    assert legend[0].startswith('<img src=x onerror="window.hit=')
    hover = "Plotly.Fx.hover('map-plot', [{curveNumber: 0, pointNumber: 0}])"
    visit.page.evaluate(hover)
    assert "<img src=x" in visit.page.locator("#map-plot .hovertext").first.text_content()
    visit.page.evaluate("Plotly.Fx.hover('curves-test', [{curveNumber: 1, pointNumber: 1}])")
    assert "<img src=x" in visit.page.locator("#curves-test .hoverlayer").text_content()
    visit.is_well()


def test_the_table_sorts_by_click_and_by_key_and_floors_stay_below(
    browser: Any, path: Path
) -> None:
    visit = Visit(browser, path, 1200)
    heads = "[...document.querySelectorAll('table.sortable tbody th')]"
    names = f"{heads}.map((th) => th.textContent.slice(0, 6))"
    assert visit.page.evaluate(names) == ["low", "<img s", "a_name", "raw pi"]
    accuracy = visit.page.get_by_role("button", name="accuracy")
    accuracy.click()
    assert visit.page.evaluate(names) == ["<img s", "a_name", "low", "raw pi"]
    head = visit.page.locator("th", has=accuracy)
    assert head.get_attribute("aria-sort") == "descending"
    accuracy.press("Enter")
    assert visit.page.evaluate(names) == ["low", "a_name", "<img s", "raw pi"]
    visit.page.get_by_role("button", name="MB down").press("Space")
    assert visit.page.evaluate(names) == ["<img s", "low", "a_name", "raw pi"]
    assert head.get_attribute("aria-sort") == "none"
    visit.page.get_by_role("button", name="method").click()
    assert visit.page.evaluate(names) == ["<img s", "a_name", "low", "raw pi"]
    visit.is_well()


def test_on_paper_the_page_is_light_and_fits(browser: Any, path: Path) -> None:
    visit = Visit(browser, path, 1200, color_scheme="dark")
    visit.page.emulate_media(media="print", color_scheme="dark")
    visit.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    visit.wait(f"{INK} === '{SOFT['light']}'")
    assert visit.page.locator("#curves-test svg.main-svg").first.bounding_box()["width"] == 600
    visit.page.emulate_media(media="screen", color_scheme="dark")
    visit.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    visit.wait(f"{INK} === '{SOFT['dark']}'")
    assert visit.page.locator("#curves-test svg.main-svg").first.bounding_box()["width"] > 600
    visit.is_well()


def test_a_figure_can_be_kept_as_a_picture(browser: Any, path: Path) -> None:
    visit = Visit(browser, path, 1200)
    place = visit.page.locator("#curves-test")
    place.hover()
    with visit.page.expect_download() as kept:
        place.locator(".modebar-btn").first.click()
    assert kept.value.suggested_filename.endswith(".png")
    assert place.locator(".modebar-btn").count() == 2  # the other brings the whole range back
    visit.is_well()
