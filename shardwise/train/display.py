"""Shows a run: live in a terminal, line by line in a log, as JSON for a program, or not at all.

The settings choose one display at the start; the training loop calls it and does not know which one it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO

from shardwise.train.config import Output
from shardwise.train.optional_packages import optional
from shardwise.train.records import (
    RunFacts,
    StepRecord,
    Summary,
    format_bytes,
    format_count,
    format_duration,
    headline,
    json_line,
    recent_loss,
    sparkline,
    summary_rows,
)
from shardwise.train.run_files import open_for_append, write_with_time

__all__ = ["Display", "FaultTolerantDisplay", "JsonLines", "Lines", "Logged", "Quiet", "make_display"]


class Display(Protocol):
    def begin(self, facts: RunFacts) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def end(self, summary: Summary) -> None: ...

    def close(self) -> None: ...


def make_display(output: Output) -> Display:
    """Returns the display that the settings ask for, which writes to standard output."""
    target = sys.stdout
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
    """Wraps a display so that a run continues when the disk behind a log is full, or the log's reader is gone.

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


class Logged:
    """Writes what a display says besides its steps into a file too, with the time, so that it can be read later.

    Args:
        shown: the display.
        path: the file. It is opened when the run begins, and once, so that it stays that of this run if another
            takes over the folder. What cannot be written is only shown.
    """

    def __init__(self, shown: Display, path: Path) -> None:
        self._shown, self._path = shown, path
        self._waiting: list[str] = []
        self._descriptor: int | None = None

    def begin(self, facts: RunFacts) -> None:
        with contextlib.suppress(OSError):
            self._descriptor = open_for_append(self._path)
        for line in (*self._waiting, *headline(facts)):
            self._log(line)
        self._shown.begin(facts)

    def step(self, record: StepRecord) -> None:
        self._shown.step(record)

    def note(self, text: str) -> None:
        self._log(text)
        self._shown.note(text)

    def warn(self, text: str) -> None:
        self._log(f"warning: {text}")
        self._shown.warn(text)

    def end(self, summary: Summary) -> None:
        (_, ended), *rest = summary_rows(summary)
        self._log(", ".join([ended, *(f"{key} {value}" for key, value in rest[:2])]))
        self._shown.end(summary)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._shown.close()

    def _log(self, text: str) -> None:
        if self._descriptor is None:
            self._waiting.append(text)
            return
        with contextlib.suppress(OSError):
            write_with_time(self._descriptor, text)


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
        # At once: a note may come from another thread.
        self._stream.write(json_line({"kind": kind, **values}) + "\n")
        self._stream.flush()

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
    """Prints a line per step, or per ``every`` steps, for logs and pipes; the loss is ``recent_loss``."""

    def __init__(self, stream: TextIO, every: int) -> None:
        self._stream, self._every = stream, every
        self._facts: RunFacts | None = None
        self._begun = time.monotonic()
        self._losses: list[float] = []

    def _print(self, text: str) -> None:
        # At once: a note may come from another thread.
        self._stream.write(text + "\n")
        self._stream.flush()

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
            f"loss {recent_loss(self._losses):.4f}",
            f"{format_count(record.tokens_per_second)} tok/s",
            *([f"mfu {record.mfu:.1%}"] if record.mfu is not None else []),
            f"norm {record.grad_norm:.2f}" if record.grad_norm is not None else "skipped",
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
            if key == "loss":
                self._print(f"  {'':<12} {sparkline(self._losses, 44)}")

    def close(self) -> None: ...
