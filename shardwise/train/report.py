"""Writes what a run keeps besides checkpoints: metrics, a summary, a plot of the loss.

A file that cannot be written does not stop a run: it causes one warning at once, and an error when the run has ended.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from shardwise.errors import StateError
from shardwise.train.display import Display
from shardwise.train.loss_picture import loss_picture
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
            raise StateError(
                f"the run {summary.ended} at step {summary.step} and its checkpoint is complete, but {problem}:"
                + "".join(f"\n    {line}" for line in lines),
                where=summary.folder,
                fix="repair what these lines name; what is missing is lost, but the run can continue with --resume",
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
            if (drawn := loss_picture({self._folder: read_metrics(self._folder)})) is not None:
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
