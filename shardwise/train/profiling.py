"""``shardwise train --profile``: a few steps of a run as a timeline, a picture, and torch's own trace.

    FOLDER/profile/
      step.html             the step as lanes of bars, of the first ranks; any browser opens it
      rank-0.timeline.json  the same, as records
      rank-0.engine.json    what the engine did to each unit, for Perfetto or chrome://tracing
      rank-0.torch.json     every operator and kernel of one more step, for the same

The first steps are left out, as they allocate and compile. The timeline is of the step with the median time, without
torch's profiler, which slows a step down. Its times are the host's: on a GPU they show when work was issued.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise import trace
from shardwise.forecast.timeline import Bar, Lane, Timeline
from shardwise.train.optional_packages import optional
from shardwise.train.records import counted, short_path
from shardwise.train.run_files import replace_file
from shardwise.train.run_folder import PROFILE
from shardwise.train.team import Team

__all__ = ["StepProfiler", "timeline_of"]

_WARM_UP = 2
_RANKS_ON_PAGE = 4


@dataclass(frozen=True)
class _Mark:
    """Something that the host began."""

    kind: str
    time_ns: int


@dataclass(frozen=True)
class _Measured:
    """One step: what the host did, what the engine did, and when the step was over."""

    step: int
    marks: tuple[_Mark, ...]
    recorder: trace.Recorder
    end_ns: int

    @property
    def nanoseconds(self) -> int:
        return self.end_ns - self.marks[0].time_ns


class StepProfiler:
    """Measures steps of a run; every rank has one.

    Args:
        module: the model, with or without units of the engine.
        optimizer: its optimizer.
        num_steps: how many steps to measure, after those that warm up.
        folder: the run's folder.
        team: all ranks of the run.
        facts: what the picture says beside the times.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        num_steps: int,
        folder: Path,
        team: Team,
        facts: dict[str, str],
    ) -> None:
        self._module, self._optimizer, self._num_steps = module, optimizer, num_steps
        self._folder, self._team, self._facts = folder / PROFILE, team, facts
        self._num_seen = 0
        self._measured: list[_Measured] = []
        self._torch_trace: torch.profiler.profile | None = None
        # Otherwise torch's profiler prints its own start and stop into the display.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")

    @property
    def is_done(self) -> bool:
        return self._torch_trace is not None

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Measures the step that the block runs, if it is one of those to measure."""
        self._num_seen += 1
        if self._num_seen <= _WARM_UP or self.is_done:
            yield
        elif len(self._measured) < self._num_steps:
            with self._measuring(number):
                yield
        else:
            # acc_events: torch 2.11 otherwise warns that it forgets what came before the one step.
            with torch.profiler.profile(acc_events=True) as self._torch_trace:
                yield

    @contextlib.contextmanager
    def _measuring(self, number: int) -> Iterator[None]:
        marks = [_Mark("data", time.perf_counter_ns())]

        def mark(kind: str) -> Callable[..., None]:
            return lambda *_: marks.append(_Mark(kind, time.perf_counter_ns()))

        hooks = [
            self._module.register_forward_pre_hook(mark("forward")),
            self._module.register_forward_hook(mark("loss, backward, clip")),
            self._optimizer.register_step_pre_hook(mark("optimizer")),
            self._optimizer.register_step_post_hook(mark("rest")),
        ]
        try:
            with trace.record(self._module) as recorder:
                yield
        finally:
            for hook in hooks:
                hook.remove()
        self._measured.append(_Measured(number, tuple(marks), recorder, time.perf_counter_ns()))

    def write(self) -> Path | None:
        """Writes what was measured, on every rank; returns the page, or the folder if there is no page.

        Raises:
            OSError: a file cannot be written, on any rank.
        """
        timeline = None
        if self._measured:
            measured = sorted(self._measured, key=lambda each: each.nanoseconds)[len(self._measured) // 2]
            timeline = self._timeline(measured)
        self._team.together(lambda: self._write_own(timeline))
        first = timeline if self._team.rank < _RANKS_ON_PAGE else None
        timelines = [each for each in self._team.collect(first) if each is not None]
        return self._team.from_first(lambda: self._write_page(timelines))

    def _timeline(self, measured: _Measured) -> Timeline:
        facts = {
            "step": str(measured.step),
            "measured": counted(len(self._measured), "step") + ", of which this has the median time",
            "times": "of the host; on a GPU, when work was issued",
            **self._facts,
        }
        marks = [(mark.kind, mark.time_ns) for mark in measured.marks]
        name = f"rank {self._team.rank}, measured"
        return timeline_of(name, marks, measured.recorder.events, measured.end_ns, facts)

    def _write_own(self, timeline: Timeline | None) -> None:
        self._folder.mkdir(exist_ok=True)
        rank = f"rank-{self._team.rank}"
        if timeline is not None:
            replace_file(self._folder / f"{rank}.timeline.json", json.dumps(timeline.as_json()) + "\n")
        events = trace.Recorder()
        events.events = [event for measured in self._measured for event in measured.recorder.events]
        if events.events:
            replace_file(self._folder / f"{rank}.engine.json", json.dumps(events.chrome()))
        if self._torch_trace is not None:
            path = self._folder / f"{rank}.torch.json"
            # torch writes through links; a new file is none.
            path.unlink(missing_ok=True)
            self._torch_trace.export_chrome_trace(str(path))

    def _write_page(self, timelines: Sequence[Timeline]) -> Path | None:
        page: Any = optional("shardwise.forecast.page")
        if not timelines:
            return None
        if page is None:
            return self._folder
        written: Path = page.write_page(
            self._folder / "step.html", timelines, title=f"A step of {short_path(self._folder.parent)}"
        )
        return written


# --- from events to a timeline --------------------------------------------------------------------------------------


def timeline_of(
    name: str,
    marks: Sequence[tuple[str, int]],
    events: Sequence[trace.Event],
    end_ns: int,
    facts: dict[str, str],
) -> Timeline:
    """Returns a step as lanes.

    Args:
        name: whose step it is.
        marks: what the host began, and when; each lasts until the next.
        events: what the engine did, in order.
        end_ns: when the step was over.
        facts: what a reader sees beside the picture.
    """
    start_ns = marks[0][1]

    def bar(kind: str, unit: str, begin: int, end: int) -> Bar:
        return Bar((begin - start_ns) / 1e9, (end - start_ns) / 1e9, kind, unit)

    ends = [time_ns for _, time_ns in marks[1:]] + [end_ns]
    host = [bar(kind, "", begin, end) for (kind, begin), end in zip(marks, ends, strict=True)]
    steps_at = next((time_ns for kind, time_ns in marks if kind == "optimizer"), end_ns)
    lanes = (
        Lane("compute", tuple(_compute(events, bar))),
        Lane("gather", tuple(_gathers(events, bar))),
        Lane("reduce", tuple(_reduces(events, steps_at, bar))),
        Lane("host", tuple(host)),
    )
    return Timeline(name, (end_ns - start_ns) / 1e9, tuple(lane for lane in lanes if lane.bars), facts=facts)


_MakeBar = Callable[[str, str, int, int], Bar]
_KINDS = {
    trace.PRE_FORWARD: "forward",
    trace.POST_FORWARD: "forward",
    trace.PRE_BACKWARD: "backward",
    trace.POST_BACKWARD: "backward",
}
_BEGINS = (trace.PRE_FORWARD, trace.PRE_BACKWARD)


def _compute(events: Sequence[trace.Event], bar: _MakeBar) -> Iterator[Bar]:
    """Yields when each unit ran, without the units inside it."""
    open_units: list[tuple[str, str]] = []
    since = 0
    for event in events:
        if event.kind not in _KINDS:
            continue
        entry = _KINDS[event.kind], event.unit
        if event.kind in _BEGINS:
            if open_units and event.time_ns > since:
                yield bar(*open_units[-1], since, event.time_ns)
            open_units.append(entry)
        elif entry in open_units:
            if event.time_ns > since:
                yield bar(*open_units[-1], since, event.time_ns)
            open_units.reverse()
            open_units.remove(entry)
            open_units.reverse()
        since = event.time_ns


def _gathers(events: Sequence[trace.Event], bar: _MakeBar) -> Iterator[Bar]:
    """Yields gathers, each from when it was issued until its unit ran; they are done in this order."""
    before = 0
    for number, event in enumerate(events):
        if event.kind != trace.UNSHARD:
            continue
        used = (trace.PRE_FORWARD, trace.PRE_BACKWARD, trace.RESHARD)
        later = (each for each in events[number:] if each.unit == event.unit and each.kind in used)
        end = next(later, None)
        begin = max(event.time_ns, before)
        if end is not None and end.time_ns > begin:
            yield bar("gather", event.unit, begin, end.time_ns)
            before = end.time_ns


def _reduces(events: Sequence[trace.Event], steps_at: int, bar: _MakeBar) -> Iterator[Bar]:
    """Yields reduces, each from when it was issued until the next one, the last until the optimizer steps."""
    issued = [event for event in events if event.kind == trace.REDUCE]
    for event, after in zip(issued, [*issued[1:], None], strict=False):
        end = steps_at if after is None else after.time_ns
        if end > event.time_ns:
            yield bar("reduce", event.unit, event.time_ns, end)
