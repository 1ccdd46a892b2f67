"""A step as a picture: one HTML file with lanes of bars and the memory curve, which any browser opens offline."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.forecast.timeline import LANES, Lane, Memory, Timeline

__all__ = ["page_text", "write_page"]


def write_page(
    path: str | os.PathLike[str],
    timelines: Sequence[Timeline],
    *,
    title: str = "One training step",
    capacity_bytes: int | None = None,
) -> Path:
    """Writes timelines of the same step as one HTML file and returns its path.

    Args:
        path: the file; one that exists is replaced.
        timelines: one, or several to compare, such as a predicted and a measured one.
        title: the page's heading.
        capacity_bytes: memory of the device, drawn as a line over the memory curve.
    """
    target, text = Path(path), page_text(timelines, title=title, capacity_bytes=capacity_bytes)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the page cannot be written: {error}",
            where=f"file {target}",
            fix="pass a path that can be written",
        ) from None
    return target


def page_text(
    timelines: Sequence[Timeline], *, title: str = "One training step", capacity_bytes: int | None = None
) -> str:
    """Returns the page that ``write_page`` writes."""
    if not timelines:
        raise ConfigError(
            "there is no timeline to draw", where="write_page", fix="pass at least one timeline"
        )
    content = {"capacity": capacity_bytes, "timelines": [_timeline(each) for each in timelines]}
    try:
        # Names of units are users': neither "</script>" nor "<!--" may end or change the element that holds them.
        data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    except ValueError as error:
        raise ConfigError(
            f"a timeline has a time or size that is not finite: {error}",
            where="write_page",
            fix="give bars and memory finite times",
        ) from None
    page = resources.files("shardwise.forecast").joinpath("page.html").read_text(encoding="utf-8")
    return page.replace("__TITLE__", html.escape(title)).replace("__DATA__", data)


def _timeline(timeline: Timeline) -> dict[str, Any]:
    strings: dict[str, int] = {"": 0}
    lanes = sorted(
        timeline.lanes, key=lambda lane: LANES.index(lane.name) if lane.name in LANES else len(LANES)
    )
    return {
        "name": timeline.name,
        "microseconds": timeline.seconds * 1e6,
        "facts": dict(timeline.facts),
        "lanes": [_lane(lane, strings) for lane in lanes],
        "memory": None if timeline.memory is None else _memory(timeline.memory),
        "strings": list(strings),
    }


def _lane(lane: Lane, strings: dict[str, int]) -> dict[str, Any]:
    """Columns instead of records, and each string once: a hundred thousand bars stay a few megabytes."""

    def numbers(texts: Iterable[str]) -> list[int]:
        return [strings.setdefault(text, len(strings)) for text in texts]

    return {
        "name": lane.name,
        "start": [_microseconds(bar.start) for bar in lane.bars],
        "length": [_microseconds(bar.end - bar.start) for bar in lane.bars],
        "kind": numbers(bar.kind for bar in lane.bars),
        "unit": numbers(bar.unit for bar in lane.bars),
        "detail": numbers(bar.detail for bar in lane.bars),
    }


def _memory(memory: Memory) -> dict[str, Any]:
    return {
        "kinds": list(memory.kinds),
        "times": [_microseconds(time) for time in memory.times],
        "levels": [[level[kind] for level in memory.levels] for kind in range(len(memory.kinds))],
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3) if math.isfinite(seconds) else seconds
