"""Draws the losses of one run, or of several, as a picture: the dots and lines of ``loss.png``."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from shardwise.train.optional_packages import optional
from shardwise.train.records import StepRecord, short_path

__all__ = ["loss_picture"]

_COLORS = ("#2a78d6", "#e06c2b", "#2c9f5b", "#9a5bd0", "#c43d5a", "#8a7a18")
_HELD_OUT = "#e06c2b"


def loss_picture(runs: Mapping[Path, Sequence[StepRecord]]) -> bytes | None:
    """Returns a PNG of the losses of runs, by folder; None without matplotlib, which draws it."""
    if optional("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # Many dots to the inch: sharp on screens that have two or three pixels where others have one.
    figure = Figure(figsize=(7.5, 4.2), dpi=240, layout="constrained")
    axes = figure.add_subplot()
    is_alone = len(runs) == 1
    for number, (folder, records) in enumerate(runs.items()):
        color = _COLORS[number % len(_COLORS)]
        steps, losses = _finite([(record.step, record.loss) for record in records])
        axes.plot(steps, losses, color=color, alpha=0.3 if is_alone else 0.15, linewidth=0.8)
        label = "training, smoothed" if is_alone else short_path(folder)
        axes.plot(steps, _means_around(losses), color=color, linewidth=1.8, label=label)
        evaluated = _finite([(each.step, each.eval_loss) for each in records if each.eval_loss is not None])
        if evaluated[0]:
            (line,) = axes.plot(*evaluated, "o--", color=color, markersize=4)
            if is_alone:
                line.set(color=_HELD_OUT, linestyle="-", label="held out")
    title = _title(next(iter(runs))) if is_alone else "training, smoothed; held out, dashed with dots"
    axes.set_title(title, loc="left", fontweight="bold" if is_alone else "normal")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    drawn = io.BytesIO()
    FigureCanvasAgg(figure).print_png(drawn)
    return drawn.getvalue()


def _finite(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Returns the steps and losses of the points whose loss is a number."""
    found = [(step, loss) for step, loss in points if math.isfinite(loss)]
    return [step for step, _ in found], [loss for _, loss in found]


def _title(folder: Path) -> str:
    """Returns a run's name, with the folder above it where that says something: ``runs/tiny`` is ``tiny``."""
    above = folder.resolve().parent.name
    return folder.name if above in ("", "runs") else f"{above}/{folder.name}"


def _means_around(values: list[float]) -> list[float]:
    """Returns means over a twentieth of all values, half before and half after each, so that they do not lag.

    The first values, where losses fall fastest, have as few after as before them.
    """
    sums, most = [0.0, *accumulate(values)], len(values) // 40
    reaches = [min(most, at) for at in range(len(values))]
    ranges = [(at - reach, min(len(values), at + reach + 1)) for at, reach in enumerate(reaches)]
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in ranges]
