"""What a step did, as a ``Timeline``: from a recorder's events, and from files that traces were saved to.

    with trace.record(model) as recorder:
        step()
    write_page("step.html", [timeline_of_events(recorder.events)])
    write_page("step.html", [read_timeline("step.json")])       # any of the three kinds of file below

A recorder's events have the host's times. A gather's bar lasts from the moment it was issued until its unit was used; a
reduce's, as long as it took to issue it: when a device or another rank finished, no event says. What a device did is in
a trace of ``torch.profiler``.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise import trace
from shardwise.errors import ConfigError
from shardwise.forecast.profiled import is_profile, timeline_of_profile
from shardwise.forecast.timeline import LANES, Bar, Lane, Memory, Timeline
from shardwise.trace import Event

__all__ = ["read_timeline", "timeline_of_events"]

_BEGINS = {trace.PRE_FORWARD: "forward", trace.PRE_BACKWARD: "backward"}
_ENDS = {trace.POST_FORWARD: "forward", trace.POST_BACKWARD: "backward"}


def timeline_of_events(events: Sequence[Event], name: str = "measured") -> Timeline:
    """Returns the timeline of what one rank's recorder collected.

    Where units are nested, the innermost has the bar. A wait for a gather is a bar of the host's, not of compute.
    """
    rank = min((event.rank for event in events), default=0)
    mine = sorted((event for event in events if event.rank == rank), key=lambda event: event.time_ns)
    if not mine:
        raise ConfigError(
            "the recorder has no events",
            where="timeline_of_events",
            fix="run a step of the model inside of `with trace.record(model) as recorder:`",
        )
    origin = mine[0].time_ns
    drawing = _Drawing()
    for before, event in zip([mine[0], *mine], mine, strict=False):
        drawing.add(before, event, (before.time_ns - origin) / 1e9, (event.time_ns - origin) / 1e9)
    lanes = tuple(Lane(lane, tuple(drawing.bars[lane])) for lane in LANES if drawing.bars[lane])
    seconds = (mine[-1].time_ns - origin) / 1e9
    facts = {"source": "events of a recorder: the host's times", "rank": str(rank)}
    return Timeline(name, seconds, lanes, None, facts)


class _Drawing:
    """Bars of the events seen so far, and what is open."""

    def __init__(self) -> None:
        self.bars: dict[str, list[Bar]] = {lane: [] for lane in LANES}
        # Units inside of their forward or backward, the innermost last; gathers issued and not used yet.
        self._open: list[tuple[str, str]] = []
        self._issued: dict[str, float] = {}

    def add(self, before: Event, event: Event, start: float, now: float) -> None:
        """Draws what happened between two events that follow each other, and what the second one ends."""
        unit = event.unit
        is_wait = event.kind in _BEGINS and (before.kind, before.unit) == (trace.UNSHARD, unit)
        if is_wait:
            self._draw("host", Bar(start, now, "wait", unit, "for a gather that was not prefetched"))
        elif event.kind == trace.REDUCE:
            self._draw("reduce", Bar(start, now, "reduce", unit, "packed and issued"))
        elif event.kind == trace.SEND:
            self._draw("reduce", Bar(start, now, "send", unit))
        elif self._open:
            self._draw("compute", Bar(start, now, *self._open[-1]))
        if event.kind == trace.UNSHARD:
            self._issued[unit] = now
        elif event.kind in _BEGINS:
            self._open.append((_BEGINS[event.kind], unit))
            if unit in self._issued:
                self._draw("gather", Bar(self._issued.pop(unit), now, "gather", unit, "from issued to used"))
        elif event.kind == trace.RESHARD and event.phase == trace.IN_POST_BACKWARD:
            self._close("backward", unit)
        elif event.kind in _ENDS:
            self._close(_ENDS[event.kind], unit)

    def _close(self, kind: str, unit: str) -> None:
        if (kind, unit) in self._open:
            self._open.reverse()
            self._open.remove((kind, unit))
            self._open.reverse()

    def _draw(self, lane: str, bar: Bar) -> None:
        bars = self.bars[lane]
        last = bars[-1] if bars else None
        is_same = last is not None and (last.kind, last.unit, last.end) == (bar.kind, bar.unit, bar.start)
        if last is not None and is_same and lane == "compute":
            bars[-1] = Bar(last.start, bar.end, bar.kind, bar.unit, bar.detail)
        elif bar.end > bar.start:
            bars.append(bar)


# --- files --------------------------------------------------------------------------------------------------------


def read_timeline(file: str | os.PathLike[str], name: str | None = None) -> Timeline:
    """Reads a timeline from a file.

    The file is what ``Recorder.save_chrome`` or ``torch.profiler`` wrote (also compressed, ``.json.gz``), or a
    ``Timeline.as_json()`` saved as JSON. ``name`` defaults to the file's name, or to the name saved in it.
    """
    path = Path(file)
    content = _read_json(path)
    stem = name or path.name.removesuffix(".gz").removesuffix(".json")
    if isinstance(content, dict) and {"seconds", "lanes"} <= content.keys():
        return _saved_timeline(content, name, path)
    rows = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _unreadable(path, "it has neither 'traceEvents' nor 'lanes'")
    try:
        return (
            timeline_of_profile(rows, stem) if is_profile(rows) else timeline_of_events(_events(rows), stem)
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _unreadable(path, f"{type(error).__name__}: {error}") from None


def _read_json(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise _unreadable(path, str(error)) from None


def _events(rows: Sequence[Mapping[str, Any]]) -> list[Event]:
    """Returns the events that ``Recorder.save_chrome`` wrote."""
    events: list[Event] = []

    def add(row: Mapping[str, Any], kind: str, microseconds: float) -> None:
        arguments = row["args"]
        events.append(
            Event(
                kind,
                arguments["unit"],
                arguments["phase"],
                row["pid"],
                len(events),
                round(microseconds * 1000),
            )
        )

    ends = {kind: end for end, kind in _ENDS.items()}
    begins = {kind: begin for begin, kind in _BEGINS.items()}
    for row in rows:
        kind = row["tid"]
        if row["ph"] == "X":
            add(row, begins[kind], row["ts"])
            add(row, ends[kind], row["ts"] + row["dur"])
        else:
            add(row, kind, row["ts"])
    return events


def _saved_timeline(content: Mapping[str, Any], name: str | None, path: Path) -> Timeline:
    try:
        memory = content.get("memory")
        return Timeline(
            name or str(content["name"]),
            float(content["seconds"]),
            tuple(Lane(lane["name"], tuple(Bar(**bar) for bar in lane["bars"])) for lane in content["lanes"]),
            None
            if memory is None
            else Memory(**{key: _tuples(memory[key]) for key in ("kinds", "times", "levels")}),
            {str(key): str(value) for key, value in content.get("facts", {}).items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from None


def _tuples(values: Sequence[Any]) -> Any:
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a trace that can be drawn: {why}",
        where=f"file {path}",
        fix="pass a file of Recorder.save_chrome, of torch.profiler's export_chrome_trace, or a saved timeline",
    )
