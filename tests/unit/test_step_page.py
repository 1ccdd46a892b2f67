"""The page of a step: what is embedded, and what is refused. tests/ranks/test_step_page.py opens it in a browser."""

import html.parser
import json

import pytest

from shardwise.errors import ConfigError
from shardwise.forecast.page import page_text, write_page
from shardwise.forecast.timeline import Bar, Lane, Memory, Timeline

HOSTILE = "</script><script>alert(1)</script><!--<b>&"


class Reader(html.parser.HTMLParser):
    """Collects what the elements of a page hold, as a browser would read them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.held, self.within = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.within = dict(attributes).get("id", tag)
        self.tags.append(tag)

    def handle_data(self, data):
        self.held[self.within] = self.held.get(self.within, "") + data


def timeline(unit="layers.0", **changes):
    lanes = (
        Lane("host", (Bar(0.0, 0.001, "host", unit),)),
        Lane("mine", ()),
        Lane(
            "compute", (Bar(0.001, 0.0035, "forward", unit, "2 TFLOP"), Bar(0.0035, 0.01, "backward", unit))
        ),
    )
    memory = Memory(("shards", "gathered"), (0.0, 0.002), ((10, 0), (10, 30)))
    return Timeline(**{"name": "predicted", "seconds": 0.01, "lanes": lanes, "memory": memory, **changes})


def embedded(text):
    return json.loads(Reader(text).held["data"])


def test_bars_and_memory_are_embedded_as_columns():
    (shown,) = embedded(page_text([timeline(facts={"ranks": "8"})], capacity_bytes=99))["timelines"]
    compute, host, mine = shown["lanes"]
    assert [lane["name"] for lane in shown["lanes"]] == ["compute", "host", "mine"]
    assert (compute["start"], compute["length"]) == ([1000.0, 3500.0], [2500.0, 6500.0])
    assert [shown["strings"][kind] for kind in compute["kind"]] == ["forward", "backward"]
    assert [shown["strings"][unit] for unit in compute["unit"] + host["unit"]] == ["layers.0"] * 3
    assert [shown["strings"][detail] for detail in compute["detail"]] == ["2 TFLOP", ""]
    assert mine["start"] == []
    assert shown["memory"] == {
        "kinds": ["shards", "gathered"],
        "times": [0.0, 2000.0],
        "levels": [[10, 10], [0, 30]],
    }
    assert shown["facts"] == {"ranks": "8"}


def test_names_cannot_leave_their_element():
    text = page_text([timeline(HOSTILE, name=HOSTILE, facts={HOSTILE: HOSTILE})], title=HOSTILE)
    plain = Reader(page_text([timeline()]))
    found = Reader(text)
    assert found.tags == plain.tags
    assert found.held["title"].strip() == HOSTILE
    assert HOSTILE in embedded(text)["timelines"][0]["strings"]


def test_the_page_asks_for_nothing_from_anywhere():
    text = page_text([timeline()])
    assert "default-src 'none'" in text
    assert "http:" not in text
    assert "https:" not in text


def test_a_file_is_written_and_replaced(tmp_path):
    target = tmp_path / "step.html"
    target.write_text("before")
    assert write_page(target, [timeline()]) == target
    assert target.read_text(encoding="utf-8") == page_text([timeline()])


@pytest.mark.parametrize(
    "timelines",
    [
        [],
        [timeline(seconds=float("nan"))],
        [timeline(lanes=(Lane("compute", (Bar(0.0, float("inf"), "forward"),)),))],
    ],
)
def test_what_cannot_be_drawn_is_refused(timelines, tmp_path):
    with pytest.raises(ConfigError) as raised:
        write_page(tmp_path / "step.html", timelines)
    assert raised.value.fix
    assert not (tmp_path / "step.html").exists()
