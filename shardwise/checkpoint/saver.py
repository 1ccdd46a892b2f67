"""Saving while training goes on: the step waits for a copy to host memory, a thread does the rest.

    step    ─stage─┬── next steps …
    thread         └─ plan ─ write ─ fsync ─ manifest ─ rename ─ latest ─ prune

The thread talks to its peers over a group of its own, so that its messages never meet the steps'. A save that fails
(a full disk) leaves no trace on disk and is told to whoever asks for outcomes; training goes on.
"""

from __future__ import annotations

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
from shardwise.checkpoint.state import stage
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.writing import save_parts

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
        store: where to.
        group: a gloo group of all ranks for the saver alone.
        keep: how many to keep, 0 for all.
        asynchronous: ``False`` makes ``save`` return when everything is on disk.
    """

    def __init__(
        self, store: Store, group: dist.ProcessGroup, *, keep: int, asynchronous: bool = True
    ) -> None:
        self._store, self._group, self._keep = store, group, keep
        self._asynchronous = asynchronous
        self._room: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._outcomes: list[Outcome] = []

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, parts: dict[str, Part], run: dict[str, Any]) -> None:
        """Saves a rank's parts as they are now; called on every rank, at the same step."""
        self.wait()
        staged = stage(parts, self._room)
        self._thread = threading.Thread(
            target=self._save, args=(step, staged, run), name=f"save step {step}", daemon=True
        )
        self._thread.start()
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

    def _save(self, step: int, parts: dict[str, Part], run: dict[str, Any]) -> None:
        begin = time.perf_counter()
        problem = None
        if self._asynchronous:
            # Steps go first where cores are few; on Linux this is the priority of the thread alone.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        try:
            save_parts(parts, self._store.saving_path(step), run, self._group, partial(self._commit, step))
        except BaseException as error:  # noqa: BLE001  DCP's is one; whatever it is, it must not end the training
            problem = _first_cause(error)
            if dist.get_rank(self._group) == 0:
                self._store.discard(step)
        path = self._store.path_of(step)
        self._outcomes.append(Outcome(step, path, time.perf_counter() - begin, problem))

    def _commit(self, step: int) -> None:
        self._store.commit(step)
        self._store.prune(self._keep)


def _first_cause(error: BaseException) -> str:
    """DCP wraps what the ranks raised; the first of them says what happened."""
    failures = getattr(error, "failures", None)
    if failures:
        rank = min(failures)
        cause, _ = failures[rank]
        return f"{type(cause).__name__}: {cause} (rank {rank})"
    return f"{type(error).__name__}: {error}"
