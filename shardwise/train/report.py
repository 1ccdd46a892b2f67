"""Writes what a run keeps besides checkpoints: metrics, a summary, a plot of the loss.

A file that cannot be written does not stop a run: it causes one warning at once, and an error when the run has ended.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

from shardwise.errors import StateError
from shardwise.train.display import Display
from shardwise.train.optional_packages import optional
from shardwise.train.records import (
    CURVE,
    METRICS,
    SUMMARY,
    StepRecord,
    Summary,
    keep_metrics_up_to,
    read_metrics,
)
from shardwise.train.run_files import LineFile, replace_file

__all__ = ["Report", "Unwritten"]


class Unwritten:
    """Collects what a run did not manage beside its checkpoints: for each name how often, and the last reason."""

    def __init__(self) -> None:
        self._problems: dict[str, tuple[int, str]] = {}
        self._are_files = True

    def add(self, name: str, error: Exception, *, is_file: bool = True) -> bool:
        """Adds a problem with ``name``, and returns whether it is the first one."""
        times, _ = self._problems.get(name, (0, ""))
        self._are_files &= is_file
        reason = (
            error.strerror if isinstance(error, OSError) and is_file else f"{type(error).__name__}: {error}"
        )
        self._problems[name] = (times + 1, reason or str(error))
        return times == 0

    def lines(self) -> tuple[str, ...]:
        return tuple(
            f"{name}: {reason}" + (f", {times} times" if times > 1 else "")
            for name, (times, reason) in self._problems.items()
        )

    def raise_if_any(self, summary: Summary) -> None:
        """Raises StateError, once a run has ended, if there is anything."""
        if lines := self.lines():
            problem = "some files could not be written" if self._are_files else "something beside it failed"
            repair = "free disk space" if self._are_files else "repair what failed"
            raise StateError(
                f"the run {summary.ended} at step {summary.step} and its checkpoint is complete, but {problem}:"
                + "".join(f"\n    {line}" for line in lines),
                where=summary.folder,
                fix=f"{repair}; what is missing is lost, but the run can continue with --resume",
            )


class Report:
    """The files that rank 0 writes during a run; a crash loses at most the line being written.

    Args:
        folder: the run's folder.
        display: shows warnings about what cannot be written.
        unwritten: collects what cannot be written.
        other_run_in_folder: returns the other run that has begun in the folder, if any; then nothing is written.
        from_step: the step that the run continues from; the metrics of later steps are dropped.
    """

    def __init__(
        self,
        folder: Path,
        display: Display,
        unwritten: Unwritten,
        other_run_in_folder: Callable[[], str | None],
        *,
        from_step: int,
    ) -> None:
        self._folder, self._display, self._unwritten = folder, display, unwritten
        self._other_run_in_folder = other_run_in_folder
        self._metrics = LineFile(folder / METRICS)
        with self._warn_if_unwritable(METRICS):
            keep_metrics_up_to(folder, from_step)

    def step(self, record: StepRecord) -> None:
        with self._warn_if_unwritable(METRICS):
            self._check_folder()
            self._metrics.write(record.to_json())

    def draw_curve(self) -> str | None:
        """Plots the loss of the whole run, before and after resumes, and returns the PNG's path, if it was written."""
        path = None
        with self._warn_if_unwritable(CURVE):
            self._check_folder()
            if (drawn := _render_plot(read_metrics(self._folder), _title(self._folder))) is not None:
                replace_file(self._folder / CURVE, drawn)
                path = str(self._folder / CURVE)
        return path

    def end(self, summary: Summary) -> None:
        with self._warn_if_unwritable(SUMMARY):
            self._check_folder()
            replace_file(self._folder / SUMMARY, json.dumps(summary.as_json(), indent=2) + "\n")

    def close(self) -> None:
        self._metrics.close()

    def _check_folder(self) -> None:
        if other := self._other_run_in_folder():
            raise OSError(errno.EBUSY, f"another run is using the folder: {other}")

    @contextlib.contextmanager
    def _warn_if_unwritable(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._unwritten.add(name, error):
                self._display.warn(f"{name} cannot be written, training continues: {error.strerror or error}")


def _title(folder: Path) -> str:
    """Returns a run's name, with the folder above it where that says something: ``runs/tiny`` is ``tiny``."""
    above = folder.resolve().parent.name
    return folder.name if above in ("", "runs") else f"{above}/{folder.name}"


def _means_around(values: list[float]) -> list[float]:
    """Returns means over a twentieth of all values, half before and half after each, so that they do not lag."""
    sums, reach = [0.0, *accumulate(values)], len(values) // 40
    ranges = [(max(0, at - reach), min(len(values), at + reach + 1)) for at in range(len(values))]
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in ranges]


def _render_plot(records: list[StepRecord], title: str) -> bytes | None:
    if optional("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    finite = [record for record in records if math.isfinite(record.loss)]
    steps, losses = [record.step for record in finite], [record.loss for record in finite]
    evaluated = [
        (record.step, record.eval_loss)
        for record in records
        if record.eval_loss is not None and math.isfinite(record.eval_loss)
    ]
    # Many dots to the inch: sharp on screens that have two or three pixels where others have one.
    figure = Figure(figsize=(7.5, 4.2), dpi=240, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="#2a78d6", alpha=0.3, linewidth=0.8)
    axes.plot(steps, _means_around(losses), color="#2a78d6", linewidth=1.8, label="training, smoothed")
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", color="#e06c2b", markersize=4, label="held out")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    drawn = io.BytesIO()
    FigureCanvasAgg(figure).print_png(drawn)
    return drawn.getvalue()
