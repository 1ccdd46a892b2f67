"""Saving while training goes on: the step waits for a copy to host memory, a thread does the rest.

    step    ─stage─┬── next steps …
    thread         └─ write ─ fsync ─ manifest ─ rename ─ latest ─ prune

Who writes what is planned in the first save's thread, and again when a rank comes with other parts than before; as
long as all have the same, ranks stage no more than they will write.

The thread talks to its peers over a group of its own, so that its messages never meet the steps'. A save that fails
(a full disk, no memory for the copy) leaves no trace on disk and is told to whoever asks for outcomes; training goes
on, and the next save starts afresh.
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
    """What became of one save, the same on every rank."""

    step: int
    path: Path
    seconds: float
    problem: str | None


class Saver:
    """Saves a run's checkpoints, one at a time.

    Args:
        store: where to. Its folder is made if need be; the one that it lies in must be there.
        group: a gloo group of all ranks for the saver alone.
        keep: how many to keep, 0 for all.
        asynchronous: ``False`` makes ``save`` return when everything is on disk.
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
        """Saves a rank's parts as they are now; called on every rank, at the same step."""
        self.wait()
        outlines = {name: Outline.of(part) for name, part in parts.items()}
        if not self._on_all(self._plan is not None and outlines == self._outlines):
            self._outlines, self._plan = outlines, None
        layout = lay_out(outlines.items()) if self._plan is None else self._plan.layout
        problem = None
        try:
            self._image.stage(parts, layout)
        except Exception as error:  # noqa: BLE001  the other ranks wait to hear of it, and training goes on
            problem = CheckpointError(f"the copy in host memory failed: {type(error).__name__}: {error}")
        thread = threading.Thread(
            target=self._save_aside, args=(step, run, problem), name=f"save step {step}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no more threads: the step waits instead
            self._save(step, run, problem)
            return
        self._thread = thread
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Returns when no save is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def outcomes(self) -> list[Outcome]:
        """What has ended since this was last asked."""
        ended, self._outcomes = self._outcomes, []
        return ended

    def _on_all(self, holds: bool) -> bool:
        """A plan is all ranks' together: who writes what depends on what the others have."""
        flag = torch.tensor([holds], dtype=torch.uint8)
        dist.all_reduce(flag, dist.ReduceOp.MIN, self._group)
        return bool(flag)

    def _save_aside(self, step: int, run: dict[str, Any], unstaged: CheckpointError | None) -> None:
        if self._asynchronous:
            # Steps go first where cores are few; on Linux this is the priority of the thread alone.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        self._save(step, run, unstaged)

    def _save(self, step: int, run: dict[str, Any], unstaged: CheckpointError | None) -> None:
        begin = time.perf_counter()
        problem = None
        try:
            if self._plan is None:
                self._plan = plan_writes(self._outlines, self._group)
            saving, commit = self._store.saving_path(step), partial(self._commit, step)
            write_checkpoint(self._image, self._plan, saving, run, self._group, commit, unstaged)
        except Exception as error:  # noqa: BLE001  whatever it is, it must not end the training
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
