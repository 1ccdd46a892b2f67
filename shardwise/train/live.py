"""Shows a run in a terminal with rich: a progress bar, the figures of the last step, and the loss curve so far."""

from __future__ import annotations

import time
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live as RichLive
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardwise.train.records import (
    RunFacts,
    StepRecord,
    Summary,
    format_bytes,
    format_count,
    format_duration,
    headline,
    recent_loss,
    sparkline,
    summary_rows,
)

__all__ = ["Live"]


class Live:
    def __init__(self, stream: TextIO | None = None, console: Console | None = None) -> None:
        self._console = Console(file=stream) if console is None else console
        self._live = RichLive(console=self._console, refresh_per_second=8, transient=True)
        self._facts: RunFacts | None = None
        self._losses: list[float] = []
        self._last: StepRecord | None = None
        self._evaluated: StepRecord | None = None
        self._begun = time.monotonic()
        self._step_seconds = 0.0

    def begin(self, facts: RunFacts) -> None:
        self._facts = facts
        self._losses = [*facts.losses_before]
        self._begun = time.monotonic()
        title, ranks = headline(facts)
        self._console.print(Text(title, style="bold"))
        self._console.print(Text(ranks, style="dim"))
        self._live.start()
        self._live.update(Text("waiting for the first step …", style="dim"))

    def step(self, record: StepRecord) -> None:
        self._last = record
        done = record.step - self._facts.first_step if self._facts else 0
        self._step_seconds = (time.monotonic() - self._begun) / max(1, done)
        self._losses.append(record.loss)
        if record.eval_loss is not None:
            self._evaluated = record
        self._live.update(self.render())

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))

    def warn(self, text: str) -> None:
        self._console.print(Text(f"warning: {text}", style="yellow"))

    def end(self, summary: Summary) -> None:
        last = self.render()
        self.close()
        self._console.print(last)
        table = Table.grid(padding=(0, 2))
        table.add_column()
        table.add_column(overflow="fold")
        rows = dict(summary_rows(summary))
        command = rows.pop("go on with", "")
        for key, value in rows.items():
            table.add_row(Text(key, style="dim"), Text(value))
        self._console.print(Panel(table, title="run", title_align="left", border_style="green", expand=False))
        if command:
            # Beside no border and on one line, however long, so that it can be copied.
            self._console.print(Text.assemble(("go on with  ", "dim"), command), soft_wrap=True)

    def close(self) -> None:
        self._live.update("")
        self._live.stop()

    def render(self) -> RenderableType:
        facts, last = self._facts, self._last
        if facts is None or last is None:
            return Text("")
        left = self._step_seconds * (facts.num_steps - last.step)
        loss = recent_loss(self._losses) or 0.0
        cells = [
            ("loss", f"{loss:.4f}"),
            ("eval", "–" if self._evaluated is None else _evaluation(self._evaluated, last.step)),
            ("tokens/s", format_count(last.tokens_per_second)),
            *([("mfu", f"{last.mfu:.1%}")] if last.mfu is not None else []),
            ("norm", f"{last.grad_norm:.2f}" if last.grad_norm is not None else "skipped"),
            ("lr", f"{last.lr:.1e}"),
            ("memory", format_bytes(last.memory_bytes)),
            ("checkpoint", "writing" if last.saving else "–"),
        ]
        width = self._console.width
        steps, time_left = f"step {last.step}/{facts.num_steps}", f"{format_duration(left)} left"
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(steps, style="bold cyan"),
            ProgressBar(
                total=facts.num_steps,
                completed=last.step,
                width=max(4, min(40, width - len(steps) - len(time_left) - 2)),
            ),
            Text(time_left, style="dim"),
        )
        ends = f"{self._losses[0]:.2f} ", f" {loss:.2f}"
        curve = sparkline(self._losses, max(8, min(64, width - len("".join(ends)))))
        return Group(
            bar,
            *(_figures(row) for row in _rows_that_fit(cells, width)),
            Text.assemble((ends[0], "dim"), (curve, "green"), (ends[1], "dim")),
        )


_GAP = 3


def _evaluation(record: StepRecord, step: int) -> str:
    old = "" if record.step == step else f" at {record.step}"
    return f"{record.eval_loss:.4f}{old}"


def _figures(cells: list[tuple[str, str]]) -> Table:
    figures = Table.grid(padding=(0, _GAP))
    figures.add_row(*(Text(name, style="dim") for name, _ in cells))
    figures.add_row(*(Text(value, style="bold") for _, value in cells))
    return figures


def _rows_that_fit(cells: list[tuple[str, str]], width: int) -> list[list[tuple[str, str]]]:
    """Divides figures into rows, so that a narrow terminal cuts none of them."""
    rows: list[list[tuple[str, str]]] = [[]]
    used = 0
    for cell in cells:
        size = max(map(len, cell)) + _GAP
        if rows[-1] and used + size > width:
            rows.append([])
            used = 0
        rows[-1].append(cell)
        used += size
    return rows
