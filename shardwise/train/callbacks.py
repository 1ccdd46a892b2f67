"""Code of your own that a run calls: at its start, after each step, evaluation and checkpoint, and at its end.

    class Early(Callback):
        def on_evaluation(self, run, step, loss):
            if loss < 1.0:
                run.stop()

    Config(..., callbacks=(Early(),))

Callbacks run on rank 0, unless they ask for all ranks, and the step waits for them. One that fails before the first
step ends the run. One that fails later does not: it causes one warning, and an error when the run has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.train.records import RunFacts, StepRecord, Summary

__all__ = ["Callback", "CallbackList", "Run"]


@dataclass
class Run:
    """What a callback sees of a run."""

    folder: Path
    facts: RunFacts
    """What is known before the first step: sizes, ranks, number of steps."""
    settings: Mapping[str, Any]
    """All settings by dotted name."""
    rank: int
    module: nn.Module
    """The model on this rank; running or gathering it takes all ranks."""
    optimizer: Optimizer
    stop_requested: bool = field(default=False, init=False)

    def stop(self) -> None:
        """Asks the run to stop, as SIGTERM does: all ranks take one more step, save a checkpoint and end."""
        self.stop_requested = True


class Callback:
    """Override what you need; every method is called on the same rank, in the order of the steps."""

    on_all_ranks = False
    """Whether every rank calls it, not only rank 0."""

    def on_start(self, run: Run) -> None:
        """Before the first step, also of a resumed run."""

    def on_step(self, run: Run, record: StepRecord) -> None:
        """After a step."""

    def on_evaluation(self, run: Run, step: int, loss: float) -> None:
        """After an evaluation on held-out data."""

    def on_checkpoint(self, run: Run, step: int, path: Path) -> None:
        """After a checkpoint is on disk, which may be some steps after the step that it is of."""

    def on_end(self, run: Run, summary: Summary | None) -> None:
        """At the end; without a summary if the run ended with an error."""


class CallbackList:
    """The callbacks of this rank, called one after the other.

    Args:
        callbacks: all callbacks of the run.
        run: what they see of it.
        on_problem: called with a callback's name and its error, except for errors at the start, which are raised.
    """

    def __init__(
        self, callbacks: Iterable[Callback], run: Run, on_problem: Callable[[str, Exception], None]
    ) -> None:
        self._run, self._on_problem = run, on_problem
        self._callbacks = [callback for callback in callbacks if run.rank == 0 or callback.on_all_ranks]
        self._started: list[Callback] = []

    @property
    def stop_requested(self) -> bool:
        return self._run.stop_requested

    def start(self) -> None:
        for callback in self._callbacks:
            try:
                callback.on_start(self._run)
            except ConfigError:
                raise
            except Exception as error:
                name = type(callback).__name__
                raise ConfigError(
                    f"callback {name} failed: {type(error).__name__}: {error}",
                    where=f"{name}.on_start, rank {self._run.rank}",
                    fix="repair the callback, or leave it out",
                ) from error
            self._started.append(callback)

    def step(self, record: StepRecord) -> None:
        self._call("on_step", record)
        if record.eval_loss is not None:
            self._call("on_evaluation", record.step, record.eval_loss)

    def checkpoint(self, step: int, path: Path) -> None:
        self._call("on_checkpoint", step, path)

    def end(self, summary: Summary | None) -> None:
        self._call("on_end", summary)

    def _call(self, method: str, *args: Any) -> None:
        for callback in self._started:
            try:
                getattr(callback, method)(self._run, *args)
            except Exception as error:  # noqa: BLE001  a logger's failure must not end a run of days
                self._on_problem(f"{type(callback).__name__}.{method}", error)
