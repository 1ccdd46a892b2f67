"""Traces of what the engine did, for tests and users.

    with trace.record(model) as recorder:
        model(batch).sum().backward()
    print(recorder.text())
    recorder.save_chrome("step.json")       # for chrome://tracing or Perfetto

Without a recorder, an event costs a unit one attribute test. Events carry host time: they show when the engine issued
work, not when a device ran it.

A rank that fails because of another writes its last collectives to a file, which ``read_failure`` reads.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import ConfigError

__all__ = ["KINDS", "Event", "Failure", "Recorder", "read_failure", "record"]

UNSHARD = "unshard"
RESHARD = "reshard"
REDUCE = "reduce"
SEND = "send"
PRE_FORWARD = "pre_forward"
POST_FORWARD = "post_forward"
PRE_BACKWARD = "pre_backward"
POST_BACKWARD = "post_backward"
KINDS = (UNSHARD, RESHARD, REDUCE, SEND, PRE_FORWARD, POST_FORWARD, PRE_BACKWARD, POST_BACKWARD)

IN_FORWARD = "forward"
IN_PRE_BACKWARD = "pre_backward"
IN_POST_BACKWARD = "post_backward"
IDLE = "idle"

# Start and end events of the bars in Chrome's trace format.
_BARS = {PRE_FORWARD: POST_FORWARD, PRE_BACKWARD: POST_BACKWARD}
_BAR_NAMES = {PRE_FORWARD: "forward", PRE_BACKWARD: "backward"}


@dataclass(frozen=True)
class Event:
    """One thing the engine did to one unit.

    ``kind`` is one of ``KINDS``; ``phase`` is the part of the step in which it happened; ``order`` counts the events
    of one recorder; ``unit`` is the module's name within its root, "" for the root itself.
    """

    kind: str
    unit: str
    phase: str
    rank: int
    order: int
    time_ns: int


class Traced(Protocol):
    """Anything that a recorder can be attached to."""

    @property
    def settings(self) -> Any: ...
    def configure(self, *, recorder: Recorder | None) -> None: ...


class Recorder:
    """Collects the events of the units it is attached to."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, kind: str, unit: str, phase: str, rank: int) -> None:
        self.events.append(Event(kind, unit, phase, rank, len(self.events), time.perf_counter_ns()))

    def of(self, *kinds: str) -> list[tuple[str, str, str]]:
        """Returns ``(kind, unit, phase)`` of the events of these kinds, or of all events, in order."""
        return [(e.kind, e.unit, e.phase) for e in self.events if not kinds or e.kind in kinds]

    def clear(self) -> None:
        self.events.clear()

    def text(self) -> str:
        """Returns a table, one event per line, with microseconds since the first event."""
        if not self.events:
            return "(no events)"
        start = self.events[0].time_ns
        lines = [f"{'order':>5} {'us':>10} rank {'phase':<14}{'event':<15}unit"]
        for e in self.events:
            elapsed_us = (e.time_ns - start) / 1000
            lines.append(
                f"{e.order:>5} {elapsed_us:>10.1f} {e.rank:>4} {e.phase:<14}{e.kind:<15}{e.unit or '(root)'}"
            )
        return "\n".join(lines)

    def chrome(self) -> dict[str, Any]:
        """Returns the events in Chrome's trace format: forwards and backwards as bars, the rest as instants."""
        rows: list[dict[str, Any]] = []
        open_bars: dict[tuple[str, str, int], list[Event]] = {}
        for e in self.events:
            if e.kind in _BARS:
                open_bars.setdefault((_BARS[e.kind], e.unit, e.rank), []).append(e)
            elif begins := open_bars.get((e.kind, e.unit, e.rank)):
                rows.append(_bar(begins.pop(), e))
            else:
                rows.append(_instant(e))
        for begins in open_bars.values():
            rows.extend(_instant(begin) for begin in begins)
        rows.sort(key=lambda row: row["ts"])
        return {"traceEvents": rows, "displayTimeUnit": "ms"}

    def save_chrome(self, path: str | Path) -> None:
        """Writes ``chrome()`` to a file; a new file is readable only by its owner."""
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(self.chrome(), file)


def _bar(begin: Event, end: Event) -> dict[str, Any]:
    row = _row(begin, _BAR_NAMES[begin.kind])
    return {**row, "ph": "X", "dur": (end.time_ns - begin.time_ns) / 1000}


def _instant(event: Event) -> dict[str, Any]:
    return {**_row(event, event.kind), "ph": "i", "s": "t"}


def _row(event: Event, name: str) -> dict[str, Any]:
    return {
        "name": f"{name} {event.unit or '(root)'}",
        "cat": event.phase,
        "pid": event.rank,
        "tid": name,
        "ts": event.time_ns / 1000,
        "args": {"unit": event.unit, "phase": event.phase, "order": event.order},
    }


@contextmanager
def record(model: Any) -> Iterator[Recorder]:
    """Records the events of every unit below ``model`` while the block runs.

    The recorder belongs to this model on this rank: ranks that are threads of one process record separately.
    """
    recorder = Recorder()
    units: list[Traced] = list({id(unit): unit for unit in _units_below(model)}.values())
    outer = [unit.settings.recorder for unit in units]
    for unit in units:
        unit.configure(recorder=recorder)
    try:
        yield recorder
    finally:
        for unit, previous in zip(units, outer, strict=True):
            unit.configure(recorder=previous)


def _units_below(model: Any) -> Iterator[Traced]:
    for module in model.modules():
        yield from getattr(module, "_shardwise_units", ())


@dataclass(frozen=True)
class Failure:
    """A rank's last events before it failed, each with its age in seconds."""

    rank: int
    ranks: list[int]
    error: str
    stack: list[str]
    num_events: int
    events: list[tuple[str, float]]

    def text(self) -> str:
        """Returns a table, one event per line, the latest last."""
        lines = [f"rank {self.rank} of {self.ranks} failed after {self.num_events} events", self.error, ""]
        lines += [f"{'event':>7} {'seconds ago':>12}  what"]
        first = self.num_events - len(self.events)
        for number, (event, seconds_ago) in enumerate(self.events, start=first):
            lines.append(f"{number:>7} {seconds_ago:>12.3f}  {event}")
        return "\n".join([*lines, "", "stack:", *self.stack])


def save_failure(folder: str | None, failure: Failure) -> Path | None:
    """Writes a failure to a new file and returns its path, or None if it cannot be written."""
    place = Path(folder or tempfile.gettempdir())
    try:
        place.mkdir(parents=True, exist_ok=True)
        # The folder may be shared: an unpredictable name, a new file, readable only by its owner.
        descriptor, name = tempfile.mkstemp(
            prefix=f"shardwise-failure-rank{failure.rank}-{os.getpid()}-", suffix=".json", dir=place
        )
        with open(descriptor, "w") as file:
            json.dump(asdict(failure), file, indent=1)
    except OSError:
        return None
    return Path(name)


def read_failure(file: str | Path) -> Failure:
    """Reads the file of a rank that failed; ``shardwise trace`` prints it."""
    try:
        return Failure(**json.loads(Path(file).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{file} is not the trace of a failed rank: {error}",
            where="read_failure",
            fix="pass the file named in that rank's error; to draw a recorded step, use shardwise trace --html",
        ) from None
