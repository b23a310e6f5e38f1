"""The HTML report: what it holds, and how it stands in a browser."""

import html.parser
import random
import re
from pathlib import Path

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.profile.record import Moment, append
from pipegraph.profile.report import render_report

HOSTILE = (
    "<script>window.broken=1</script>&\"'</title></svg><img src=https://example.invalid/x onerror=alert(1)>"
)


class Tags(html.parser.HTMLParser):
    """Every element, and whether those that must be closed are."""

    VOID = {"meta", "link", "img", "br"}

    def __init__(self):
        super().__init__()
        self.all, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.all.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def hostile_profile():
    def fails(x):
        if x % 10 == 3:
            raise ValueError(HOSTILE)
        return x

    graph = pg.Graph("graph " + HOSTILE)
    source = graph.add(ops.FromSequence([{"key": f"{HOSTILE}{i}", "x": i} for i in range(60)]), name="source")
    left = source.then(lambda s: s["x"], name=HOSTILE, workers=2)
    right = source.then(lambda s: s["x"], name="r" * 90)
    both = graph.add(ops.Zip(), left, right, name="zip").then(lambda pair: pair[0], name="first")
    both.then(fails, name="fails", on_error=pg.Skip(20)).then(ops.Batch(4), name="batch")
    with graph.loader() as loader:
        for _ in loader:
            pass
        return loader.profile()


def hour(profile):
    """An hour of looks, one per second, no two alike."""
    found, rng = [], random.Random(3)
    for second in range(3600):
        depths = tuple(rng.randint(0, 64) for _ in profile.channels)
        append(found, Moment(second, 50 * second + rng.randint(0, 50), second * rng.random(), depths))
    return found


@pytest.fixture(scope="module")
def page_of_an_hour(tmp_path_factory):
    profile = hostile_profile()
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_report(profile, hour(profile)), encoding="utf-8")
    return path


def test_a_page_is_well_formed_and_escapes_everything(page_of_an_hour):
    text = page_of_an_hour.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "script" not in tags.all and "img" not in tags.all
    assert re.findall(r'(?:src|href)="(?!#|data:,)', text) == []
    assert "&lt;script&gt;window.broken=1" in text
    assert "Left out or replaced: 6 samples" in text


def test_a_run_of_an_hour_makes_a_small_page(page_of_an_hour):
    assert page_of_an_hour.stat().st_size < 3_000_000


def test_a_report_can_be_made_before_anything_ran():
    graph = pg.Graph("idle")
    graph.add(ops.FromIterable(range(3)), name="source")
    with graph.loader() as loader:
        text = render_report(loader.profile())
    assert "Nothing has been delivered yet." in text
    assert "Over time" not in text


def test_a_recording_writes_the_report_when_its_block_ends(tmp_path: Path):
    graph = pg.Graph("recorded")
    graph.add(ops.FromIterable(range(50)), name="source").then(ops.Batch(5), name="batch")
    path = tmp_path / "report.html"
    with graph.loader() as loader, pg.record(loader, report=path, every=0.05):
        assert len(list(loader)) == 10
    assert "Profile of recorded" in path.read_text(encoding="utf-8")


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_it_opens_from_disk_in_any_width_and_colour_scheme(browser, page_of_an_hour, width, dark):
    browser.requests.clear()
    browser.open(page_of_an_hour, width, 900, dark)
    timing = "performance.getEntriesByType('navigation')[0].loadEventEnd"
    assert browser.evaluate(timing) < 2000
    assert browser.requests == [page_of_an_hour.resolve().as_uri()]
    assert browser.console == []
    assert browser.evaluate("window.broken") is None
    assert (
        browser.evaluate("document.documentElement.scrollWidth") <= width
    )  # only the tables scroll sideways
    dark_page = browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 22, 27)"
    assert dark_page == dark


@pytest.mark.browser
def test_it_is_usable_from_the_keyboard(browser, page_of_an_hour):
    browser.open(page_of_an_hour, 1280, 900)
    where = "document.activeElement.getAttribute('href') || document.activeElement.getAttribute('aria-label') || ''"
    reached = []
    for _ in range(30):
        browser.press("Tab", 9)
        reached.append(browser.evaluate(where + " || document.activeElement.tagName"))
    assert reached[0] == "#stages"
    assert {"The pipeline, drawn", "#stage-0", "#stage-training", "Table of stages"} <= set(reached)
    browser.open(page_of_an_hour, 1280, 900)
    for _ in range(2):
        browser.press("Tab", 9)
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
