"""Saves checkpoints while training continues: the step waits for a copy to host memory, a thread does the rest.

    step    ─stage─┬── next steps …
    thread         └─ write ─ fsync ─ manifest ─ rename ─ latest ─ prune

Which rank writes what is planned by the thread of the first save, and again when parts have changed on any rank. With
a plan, ranks stage only what they will write.

The thread uses a process group of its own, so that its messages cannot mix with those of training steps. A failed save
(disk full, no memory for the copy) leaves nothing on disk and is reported by ``outcomes()``; training continues.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.checkpoint.parts import Part
from shardwise.checkpoint.staging import Outline, StagedFile, lay_out
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.writing import WritePlan, plan_writes, write_checkpoint
from shardwise.engine.step.agreement import note_checkpoint
from shardwise.errors import CheckpointError

__all__ = ["Outcome", "Saver"]

_LOWEST_PRIORITY = 19


@dataclass(frozen=True)
class Outcome:
    """The result of one save, the same on every rank; ``problem`` is None if it succeeded."""

    step: int
    path: Path
    seconds: float
    problem: str | None


class Saver:
    """Saves a run's checkpoints, one at a time.

    Args:
        store: the folder to save to; it is created if its parent exists.
        group: a gloo group of all ranks that only the saver uses.
        keep: how many checkpoints to keep, 0 for all.
        asynchronous: if False, ``save`` returns when everything is on disk.
    """

    def __init__(
        self, store: Store, group: dist.ProcessGroup, *, keep: int, asynchronous: bool = True
    ) -> None:
        self._store, self._group, self._keep = store, group, keep
        self._is_first = dist.get_rank(group) == 0
        self._asynchronous = asynchronous
        self._image = StagedFile()
        self._outlines: dict[str, Outline] = {}
        self._plan: WritePlan | None = None
        self._thread: threading.Thread | None = None
        self._outcomes: list[Outcome] = []

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, parts: dict[str, Part], run: dict[str, Any]) -> None:
        """Saves this rank's parts as they are now. Called on every rank, at the same step."""
        self.wait()
        outlines = {name: Outline.of(part) for name, part in parts.items()}
        if not self._holds_on_all_ranks(self._plan is not None and outlines == self._outlines):
            self._outlines, self._plan = outlines, None
        layout = lay_out(outlines.items()) if self._plan is None else self._plan.layout
        problem = None
        try:
            self._image.stage(parts, layout)
        except Exception as error:  # noqa: BLE001  reported to the other ranks, and training continues
            problem = CheckpointError(f"the copy in host memory failed: {type(error).__name__}: {error}")
        thread = threading.Thread(
            target=self._save_in_thread, args=(step, run, problem), name=f"save step {step}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no thread can be started: save synchronously
            self._save(step, run, problem)
            return
        self._thread = thread
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Waits until no save is running."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def outcomes(self) -> list[Outcome]:
        """Returns the results of the saves that have ended since the last call."""
        ended, self._outcomes = self._outcomes, []
        return ended

    def _holds_on_all_ranks(self, holds: bool) -> bool:
        """Whether a condition holds on all ranks."""
        flag = torch.tensor([holds], dtype=torch.uint8, device="cpu")
        dist.all_reduce(flag, dist.ReduceOp.MIN, self._group)
        return bool(flag)

    def _save_in_thread(self, step: int, run: dict[str, Any], staging_error: CheckpointError | None) -> None:
        if self._asynchronous:
            # Training goes first if there are few cores. On Linux this sets the priority of this thread only.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        self._save(step, run, staging_error)

    def _save(self, step: int, run: dict[str, Any], staging_error: CheckpointError | None) -> None:
        begin = time.perf_counter()
        problem = None
        try:
            if self._plan is None:
                self._plan = plan_writes(self._outlines, self._group)
            saving, commit = self._store.saving_path(step), partial(self._commit, step)
            write_checkpoint(self._image, self._plan, saving, run, self._group, commit, staging_error)
        except Exception as error:  # noqa: BLE001  no error may end the training
            problem = error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            if self._is_first:
                with contextlib.suppress(OSError):
                    self._store.sweep()
        path = self._store.path_of(step)
        self._outcomes.append(Outcome(step, path, time.perf_counter() - begin, problem))

    def _commit(self, step: int) -> None:
        self._store.commit(step)
        note_checkpoint(str(self._store.path_of(step)))
        self._store.prune(self._keep)
