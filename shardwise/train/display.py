"""Shows a run: live in a terminal, line by line in a log, as JSON for a program, or not at all.

The settings choose one display at the start; the training loop calls it and does not know which one it is.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from shardwise.train.config import Output
from shardwise.train.optional_packages import optional
from shardwise.train.records import RunFacts, StepRecord, Summary

__all__ = ["Display", "FaultTolerantDisplay", "JsonLines", "Lines", "Quiet", "make_display", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"


class Display(Protocol):
    def begin(self, facts: RunFacts) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def end(self, summary: Summary) -> None: ...

    def close(self) -> None: ...


def make_display(output: Output, stream: TextIO | None = None) -> Display:
    """Returns the display that the settings ask for, which writes to ``stream``, or to standard output."""
    target = sys.stdout if stream is None else stream
    show = output.show
    if show == "auto":
        show = "live" if target.isatty() and optional("rich") is not None else "lines"
    if show == "live":
        # Imported on use: nothing else needs rich.
        from shardwise.train.live import Live

        return Live(target)
    if show == "json":
        return JsonLines(target)
    if show == "quiet":
        return Quiet()
    return Lines(target, output.every)


class FaultTolerantDisplay:
    """Wraps a display so that a run goes on when the disk behind a log is full, or the log's reader is gone.

    Args:
        shown: the display.
        on_loss: called with each error.
    """

    def __init__(self, shown: Display, on_loss: Callable[[OSError], None]) -> None:
        self._shown, self._on_loss = shown, on_loss

    def begin(self, facts: RunFacts) -> None:
        self._try(self._shown.begin, facts)

    def step(self, record: StepRecord) -> None:
        self._try(self._shown.step, record)

    def note(self, text: str) -> None:
        self._try(self._shown.note, text)

    def warn(self, text: str) -> None:
        self._try(self._shown.warn, text)

    def end(self, summary: Summary) -> None:
        self._try(self._shown.end, summary)

    def close(self) -> None:
        self._try(self._shown.close)

    def _try(self, show: Callable[..., None], *args: object) -> None:
        try:
            show(*args)
        except OSError as error:
            self._on_loss(error)


class Quiet:
    """Shows only warnings."""

    def begin(self, facts: RunFacts) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def end(self, summary: Summary) -> None: ...

    def close(self) -> None: ...


class JsonLines(Quiet):
    """Prints one JSON object per line, each with its kind."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _print_object(self, kind: str, values: dict[str, Any]) -> None:
        print(json.dumps({"kind": kind, **values}), file=self._stream, flush=True)

    def begin(self, facts: RunFacts) -> None:
        self._print_object(
            "begin", {key: value for key, value in vars(facts).items() if key != "losses_before"}
        )

    def step(self, record: StepRecord) -> None:
        self._print_object("step", json.loads(record.to_json()))

    def note(self, text: str) -> None:
        self._print_object("note", {"text": text})

    def warn(self, text: str) -> None:
        self._print_object("warning", {"text": text})

    def end(self, summary: Summary) -> None:
        self._print_object("end", summary.as_json())


class Lines:
    """Prints a line per step, or per ``every`` steps, for logs and pipes."""

    def __init__(self, stream: TextIO, every: int) -> None:
        self._stream, self._every = stream, every
        self._facts: RunFacts | None = None
        self._begun = time.monotonic()
        self._losses: list[float] = []

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def begin(self, facts: RunFacts) -> None:
        self._facts = facts
        self._losses = [*facts.losses_before]
        self._begun = time.monotonic()
        for line in headline(facts):
            self._print(line)

    def step(self, record: StepRecord) -> None:
        facts = self._facts
        assert facts is not None
        self._losses.append(record.loss)
        if record.step % self._every and record.step != facts.num_steps and record.eval_loss is None:
            return
        done = record.step - facts.first_step
        left = (time.monotonic() - self._begun) / max(1, done) * (facts.num_steps - record.step)
        columns = [
            f"step {record.step:>{len(str(facts.num_steps))}}/{facts.num_steps}",
            f"loss {record.loss:.4f}",
            f"{format_count(record.tokens_per_second)} tok/s",
            *([f"mfu {record.mfu:.1%}"] if record.mfu is not None else []),
            f"norm {record.grad_norm:.2f}",
            f"lr {record.lr:.1e}",
            f"mem {format_bytes(record.memory_bytes)}",
            f"left {format_duration(left)}",
            *([f"eval {record.eval_loss:.4f}"] if record.eval_loss is not None else []),
            *(["saving"] if record.saving else []),
        ]
        self._print("  ".join(columns))

    def note(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def end(self, summary: Summary) -> None:
        for key, value in summary_rows(summary):
            self._print(f"  {key:<12} {value}")
        self._print(f"  {'':<12} {sparkline(self._losses, 64)}")

    def close(self) -> None: ...


# --- formatting ---------------------------------------------------------------------------------------------------


def headline(facts: RunFacts) -> list[str]:
    ranks = "rank" if facts.world_size == 1 else "ranks"
    return [
        (
            f"{facts.name}: {facts.model}, {format_count(facts.num_parameters)} parameters, "
            f"{format_count(facts.num_tokens)} tokens of data"
        ),
        (
            f"{facts.world_size} {facts.device} {ranks}, sharding {facts.mode}, {facts.precision}, "
            f"{format_count(facts.tokens_of_step)} tokens per step; {facts.folder}"
        ),
    ]


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    ended = f"{summary.ended} at step {summary.step} of {summary.num_steps}"
    speed = f"{format_count(summary.tokens_per_second)} tokens/s, {format_duration(summary.seconds)} in total"
    if not summary.tokens:
        speed = ""
        if summary.step >= summary.num_steps:
            ended += ": no steps were left; use --set train.steps=N to train longer"
    rows = [
        ("ended", ended),
        ("loss", _loss_change(summary.first_loss, summary.last_loss)),
        ("eval loss", "" if summary.eval_loss is None else f"{summary.eval_loss:.4f}"),
        ("speed", speed),
        ("memory", f"{format_bytes(summary.memory_bytes)} peak per rank"),
        ("checkpoint", summary.checkpoint or "none"),
        ("curve", summary.curve or ""),
        ("not written", "; ".join(summary.unwritten)),
    ]
    return [(key, value) for key, value in rows if value]


def _loss_change(first: float | None, last: float | None) -> str:
    return "" if first is None or last is None else f"{first:.4f} → {last:.4f}"


def format_count(number: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def format_bytes(number: float) -> str:
    for size, letter in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number / 1024:.0f} KiB"


def format_duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def sparkline(values: list[float], width: int) -> str:
    """Returns a curve as one line of text, in which each bar is the mean of several consecutive values."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [len(finite) * number // count for number in range(count + 1)]
    means = [sum(finite[low:high]) / (high - low) for low, high in itertools.pairwise(edges) if high > low]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)
