"""The page of a step in a real browser; skipped where there is no Chromium."""

from __future__ import annotations

import pytest

from shardwise.forecast.page import write_page
from shardwise.forecast.timeline import Bar, Lane, Memory, Timeline
from tests.browser import CHROMIUM, NO_CHROMIUM, Browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]

HOSTILE = "</script><img src=x onerror='document.body.dataset.hacked=1'>"
MIB = 1 << 20
COLORS = {
    "forward": (0x2F, 0x6F, 0xB7),
    "gather": (0x1D, 0x7F, 0x74),
    "nothing": (0xF3, 0xF4, 0xF6),
    "nothing, dark": (0x1F, 0x24, 0x2C),
}


def step(name: str, seconds: float = 0.1, unit: str = "layers.1", bars: int = 2) -> Timeline:
    """``bars`` forwards one after another in the compute lane, a gather before them, and memory that peaks midway."""
    each = seconds / bars
    forwards = (Bar(k * each, (k + 1) * each, "forward", unit, f"bar {k}") for k in range(bars))
    lanes = (Lane("compute", tuple(forwards)), Lane("gather", (Bar(0.0, seconds / 4, "gather", "layers.0"),)))
    memory = Memory(
        ("shards", "activations"),
        (0.0, seconds / 2, seconds * 0.6),
        ((64 * MIB, 0), (64 * MIB, 36 * MIB), (64 * MIB, 0)),
    )
    return Timeline(name, seconds, lanes, memory, {"device": "H200", "model": unit})


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def opened(browser, tmp_path):
    """Writes and opens a page of timelines; after the test, the page must not have complained."""
    browser.problems.clear()
    browser.prefer("light")
    browser.resize(1280, 900)

    def show(*timelines, **options):
        browser.open(write_page(tmp_path / "step.html", timelines, **options))
        browser.next_frame()
        return browser

    yield show
    assert browser.problems == []


def view(browser):
    browser.next_frame()
    start, end, mode = browser.value("document.getElementById('canvas').dataset.view").split()
    return float(start), float(end), mode


def inside(browser, share, lane):
    """Where to point, on the page, for this share of the view in the lane of this number."""
    left, right, top = browser.value(
        f"(box => [box.left + layout.left, box.left + layout.right, box.top + layout.panels[{lane}].y + 8])"
        "(document.getElementById('canvas').getBoundingClientRect())"
    )
    return left + share * (right - left), top


def tip(browser):
    browser.next_frame()
    return browser.value(
        "document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText"
    )


def painted(browser, share, lane):
    """What the canvas shows at this point: the kind of a bar, "nothing" for a lane's background, or else the color."""
    browser.next_frame()
    color = browser.value(
        f"[...context.getImageData((layout.left + {share} * (layout.right - layout.left)) * devicePixelRatio,"
        f" (layout.panels[{lane}].y + 8) * devicePixelRatio, 1, 1).data]"
    )[:3]
    near = (
        name
        for name, known in COLORS.items()
        if max(abs(a - b) for a, b in zip(color, known, strict=True)) < 4
    )
    return next(near, color)


def test_lanes_memory_and_tables_are_shown(opened):
    browser = opened(step("predicted"))
    assert painted(browser, 0.1, 0) == "forward"
    assert painted(browser, 0.1, 1) == "gather"
    assert painted(browser, 0.9, 1) == "nothing"
    page = browser.value("document.body.innerText")
    for text in (
        "100.0 ms",
        "100.0 MiB",
        "H200",
        "compute: forward",
        "activations",
        "predicted, at 50.0 ms",
    ):
        assert text in page, text
    assert "compute 100 % busy" in browser.value("canvas.getAttribute('aria-label')")


def test_what_the_mouse_is_over_is_described(opened):
    browser = opened(step("predicted"))
    browser.mouse("mouseMoved", *inside(browser, 0.75, 0))
    assert tip(browser).splitlines()[:3] == [
        "forward layers.1",
        "50.0 ms, from 50.0 ms to 100.0 ms",
        "bar 1",
    ]
    browser.mouse("mouseMoved", *inside(browser, 0.55, 2))
    assert tip(browser).split() == ["100.0", "MiB", "activations", "36.0", "MiB", "shards", "64.0", "MiB"]
    browser.mouse("mouseMoved", 5, 5)
    assert tip(browser) == ""


def test_wheel_drag_and_keys_move_the_view(opened):
    browser = opened(step("predicted"))
    at = inside(browser, 0.25, 0)
    browser.mouse("mouseWheel", *at, deltaX=0, deltaY=-300)
    start, end, _ = view(browser)
    # What is under the mouse stays there.
    assert 0 < start < 25000 < end < 100000
    assert (25000 - start) / (end - start) == pytest.approx(0.25, abs=0.01)
    span = end - start
    browser.mouse("mousePressed", *at, button="left", clickCount=1)
    browser.mouse("mouseMoved", at[0] - 200, at[1], button="left")
    browser.mouse("mouseReleased", at[0] - 200, at[1], button="left", clickCount=1)
    dragged = view(browser)
    assert dragged[0] > start
    assert dragged[1] - dragged[0] == pytest.approx(span)
    browser.key("ArrowLeft")
    assert view(browser)[0] < dragged[0]
    browser.key("+")
    assert view(browser)[1] - view(browser)[0] < span
    browser.key("0")
    assert view(browser)[:2] == (0, 100000)
    for _ in range(3):
        browser.key("-")
    assert view(browser)[:2] == (0, 100000)


def test_a_click_follows_a_unit_and_a_range_is_zoomed_to(opened):
    browser = opened(step("predicted"))
    at = inside(browser, 0.1, 1)
    for kind in ("mousePressed", "mouseReleased"):
        browser.mouse(kind, *at, button="left", clickCount=1)
    assert browser.value("canvas.dataset.unit") == "layers.0"
    assert painted(browser, 0.1, 0) != "forward"
    browser.key("Escape")
    assert painted(browser, 0.1, 0) == "forward"
    (left, y), (right, _) = inside(browser, 0.2, 0), inside(browser, 0.4, 0)
    browser.mouse("mousePressed", left, y, button="left", clickCount=1, modifiers=8)
    browser.mouse("mouseMoved", right, y, button="left", modifiers=8)
    browser.mouse("mouseReleased", right, y, button="left", clickCount=1, modifiers=8)
    assert view(browser)[:2] == pytest.approx((20000, 40000), abs=200)
    browser.key("n")
    assert "bar 0" in tip(browser)


def test_two_timelines_are_overlaid_stacked_or_alone(opened):
    browser = opened(step("predicted"), step("measured", 0.125), capacity_bytes=120 * MIB)
    page = browser.value("document.body.innerText")
    assert "measured step (+25.0 %)" in page
    assert "120.0 MiB" in page
    assert view(browser) == (0, 125000, "over")
    lanes = "layout.panels.filter(p => p.type === 'lane').map(p => p.lane.name + ' ' + p.timeline.name)"
    assert browser.value(lanes) == [
        "compute predicted",
        "compute measured",
        "gather predicted",
        "gather measured",
    ]
    # The shorter step has ended here.
    assert painted(browser, 0.9, 0) == "nothing"
    assert painted(browser, 0.9, 1) == "forward"
    browser.key("m")
    assert view(browser)[2] == "under"
    assert browser.value(lanes)[1:3] == ["gather predicted", "compute measured"]
    browser.value("document.querySelector('#modes [data-mode=\"1\"]').click()")
    assert view(browser)[2] == "1"
    assert browser.value(lanes) == ["compute measured", "gather measured"]


def test_names_are_text(opened):
    browser = opened(step(HOSTILE, unit=HOSTILE), title=HOSTILE)
    browser.mouse("mouseMoved", *inside(browser, 0.75, 0))
    assert HOSTILE in tip(browser)
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert browser.value("document.body.dataset.hacked") is None
    assert browser.value("document.title") == HOSTILE


def test_a_legend_entry_hides_its_kind(opened):
    browser = opened(step("predicted"))
    browser.value(
        "[...document.querySelectorAll('#bar-legend button')].find(b => b.innerText === 'gather').click()"
    )
    assert painted(browser, 0.1, 1) == "nothing"
    browser.mouse("mouseMoved", *inside(browser, 0.1, 1))
    assert tip(browser) == ""


@pytest.mark.parametrize(("width", "scale"), [(360, 3.0), (800, 2.0), (2200, 1.0)])
def test_it_fits_any_window_in_light_and_dark(opened, width, scale):
    browser = opened(step("predicted"), step("measured"))
    browser.resize(width, 900, scale)
    browser.prefer("dark")
    browser.wait_for(f"canvas.width === Math.round(document.getElementById('picture').clientWidth * {scale})")
    assert browser.value("document.documentElement.scrollWidth") <= width
    browser.wait_for("document.documentElement.dataset.theme === 'dark'")
    assert painted(browser, 0.9, 2) == "nothing, dark"
    assert painted(browser, 0.1, 0) == "forward"


def test_a_hundred_thousand_bars_are_drawn_pixel_by_pixel(opened):
    browser = opened(step("predicted", bars=100_000))
    browser.value(
        "window.painted = 0; const fill = context.fillRect.bind(context);"
        "context.fillRect = (...box) => { painted++; fill(...box); }; draw()"
    )
    # As many marks as there are pixels, not bars.
    assert browser.value("painted") < 2 * 1280
    assert painted(browser, 0.5, 0) == "forward"
    browser.value("show(50000, 50010)")
    browser.mouse("mouseMoved", *inside(browser, 0.55, 0))
    assert "bar 50005" in tip(browser)
