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
        self._eval_loss: float | None = None
        self._begun = time.monotonic()

    def begin(self, facts: RunFacts) -> None:
        self._facts = facts
        self._losses = [*facts.losses_before]
        self._begun = time.monotonic()
        title, ranks = headline(facts)
        self._console.print(Text(title, style="bold"))
        self._console.print(Text(ranks, style="dim"))
        self._live.start()

    def step(self, record: StepRecord) -> None:
        self._last = record
        self._losses.append(record.loss)
        if record.eval_loss is not None:
            self._eval_loss = record.eval_loss
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
        for key, value in summary_rows(summary):
            table.add_row(Text(key, style="dim"), Text(value))
        self._console.print(Panel(table, title="run", title_align="left", border_style="green", expand=False))

    def close(self) -> None:
        self._live.update("")
        self._live.stop()

    def render(self) -> RenderableType:
        facts, last = self._facts, self._last
        if facts is None or last is None:
            return Text("")
        left = (time.monotonic() - self._begun) / max(1, last.step - facts.first_step)
        left *= facts.num_steps - last.step
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(f"step {last.step}/{facts.num_steps}", style="bold cyan"),
            ProgressBar(total=facts.num_steps, completed=last.step, width=40),
            Text(f"{format_duration(left)} left", style="dim"),
        )
        figures = Table.grid(padding=(0, 3))
        cells = [
            ("loss", f"{last.loss:.4f}"),
            ("eval", "–" if self._eval_loss is None else f"{self._eval_loss:.4f}"),
            ("tokens/s", format_count(last.tokens_per_second)),
            *([("mfu", f"{last.mfu:.1%}")] if last.mfu is not None else []),
            ("norm", f"{last.grad_norm:.2f}" if last.grad_norm is not None else "skipped"),
            ("lr", f"{last.lr:.1e}"),
            ("memory", format_bytes(last.memory_bytes)),
            ("checkpoint", "writing" if last.saving else "–"),
        ]
        figures.add_row(*(Text(name, style="dim") for name, _ in cells))
        figures.add_row(*(Text(value, style="bold") for _, value in cells))
        curve = Text(sparkline(self._losses, 64), style="green")
        first = f"{self._losses[0]:.2f} "
        return Group(bar, figures, Text.assemble((first, "dim"), curve, (f" {last.loss:.2f}", "dim")))
