"""Runs ranks as threads of this process: cheap enough for 128 of them, and a debugger can see them all.

Collectives are copies under a lock, done by torch's own threaded group. The ranks share what threads share:
the default random generator, warning filters, module globals. Autograd runs in the rank's own thread,
because an autograd engine thread would not know which rank it works for.

Rank threads never end; they wait for the next call. A thread that ends destroys its C++ thread-local state. In
torch 2.11, DTensor's part of that takes a lock and then the GIL, while a running rank takes them in the other
order: a deadlock.

A thread cannot be killed. A rank that does not return to Python bytecode in time (it blocks in a C call) is
abandoned, and another thread takes its place. An abandoned rank keeps its memory but cannot interfere with
later calls, whose groups have other names.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from shardwise import torch_internals, torch_threads
from shardwise.comm.mesh import forget_meshes
from shardwise.comm.watchdog.thread import WATCHDOG
from shardwise.errors import StateError
from shardwise.testing.failures import SIGNALS_WAIT_SECONDS, Outcome, RankReport, failure_of

__all__ = ["run_threads"]

_INTERRUPT_SECONDS = 1.0
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.02
_FEW_RANKS = 16

_one_call_at_a_time = threading.Lock()
_call_numbers = itertools.count(1)
_thread_numbers = itertools.count(1)
_rank_thread = threading.local()


def run_threads(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    call: str,
    timeout_seconds: float,
) -> list[Any]:
    """Call ``fn`` on ``world_size`` threads, each with its own default group; return the results in rank order."""
    if getattr(_rank_thread, "active", False):
        raise StateError(
            "run_ranks was called on a rank", where=call, fix="start all ranks from outside, in one call"
        )
    with _one_call_at_a_time:
        threaded_call = _ThreadedCall(fn, world_size, args, kwargs, timeout_seconds)
        with torch_threads.threaded_world():
            return threaded_call.run(call)


class _RankThread:
    """A thread that runs one job after another until the process exits."""

    def __init__(self) -> None:
        self.number = next(_thread_numbers)
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def run_as(self, rank: int, job: Callable[[], None]) -> None:
        self._thread.name = f"rank {rank}"
        self._jobs.put(job)

    def frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread.ident or -1)

    def interrupt(self) -> None:
        """Raise SystemExit in the thread at its next bytecode; has no effect while it blocks in a C call."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(SystemExit)
        )

    def _serve(self) -> None:
        _rank_thread.active = True
        while True:
            # A late interrupt may end a job, but never the thread.
            with contextlib.suppress(SystemExit):
                self._jobs.get()()


# Oldest first, without abandoned threads. Calls take the newest first, because stack dumps (faulthandler's) show only
# the 100 newest threads of a process.
_idle_threads: list[_RankThread] = []


class _ThreadedCall:
    """The threads of one call, with their results and reports."""

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_seconds: float,
    ) -> None:
        self._fn = fn
        self._args = args
        self._kwargs = kwargs
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self._call_number = next(_call_numbers)
        # torch's number of compute threads is per thread: ranks get the caller's, whatever an earlier call has set.
        self._num_compute_threads = torch.get_num_threads()
        self._results: list[Any] = [None] * world_size
        self._reports: dict[int, RankReport] = {}
        self._changed = threading.Condition()
        self._threads: list[_RankThread] = []

    def run(self, call: str) -> list[Any]:
        deadline = time.monotonic() + self._timeout_seconds
        stacks: dict[int, str] = {}
        try:
            for rank in range(self._world_size):
                thread = _idle_threads.pop() if _idle_threads else _RankThread()
                self._threads.append(thread)
                thread.run_as(rank, partial(self._run_rank, rank))
            if not self._wait_until_failure_or_end(deadline):
                stacks = self._stacks()
        finally:
            # Stops nothing after a normal end, only after a failure, a hang or an interrupt.
            self._stop_the_rest()
            _idle_threads.extend(thread for rank, thread in enumerate(self._threads) if rank in self._reports)
            _idle_threads.sort(key=lambda thread: thread.number)
            if self._world_size > _FEW_RANKS:
                # The watchdog would watch groups held in reference cycles of models until they are collected. Twice,
                # because what gradients hold is freed only after their parameters.
                gc.collect()
                gc.collect()
        if len(self._reports) == self._world_size and all(
            report.outcome is Outcome.FINISHED for report in self._reports.values()
        ):
            return self._results
        raise failure_of(self._final_reports(stacks), call=call, timeout_seconds=self._timeout_seconds)

    def _run_rank(self, rank: int) -> None:
        try:
            if torch.get_num_threads() != self._num_compute_threads:
                torch.set_num_threads(self._num_compute_threads)
            # Call numbers are unique, so a rank abandoned by an earlier call cannot join a collective of this one.
            torch_threads.start_threaded_rank(
                rank,
                self._world_size,
                self._store,
                call_number=self._call_number,
                timeout=timedelta(seconds=self._timeout_seconds + 60),
            )
            try:
                self._results[rank] = self._fn(*self._args, **self._kwargs)
                WATCHDOG.end_rank(threading.get_ident())
                report = RankReport(rank, Outcome.FINISHED, at_seconds=time.monotonic())
            finally:
                dist.destroy_process_group()
                forget_meshes()
                torch_internals.forget_meshes()
        except BaseException as error:  # noqa: BLE001  a rank reports whatever ended it, SystemExit included
            report = self._report_of(rank, error)
        with self._changed:
            self._reports.setdefault(rank, report)
            self._changed.notify_all()

    def _report_of(self, rank: int, error: BaseException) -> RankReport:
        now = time.monotonic()
        if isinstance(error, SystemExit) and torch_threads.threaded_ranks_are_stopping():
            return RankReport(rank, Outcome.TORN_DOWN, at_seconds=now)
        return RankReport(
            rank,
            Outcome.RAISED,
            summary="raised " + "".join(traceback.format_exception_only(type(error), error)).strip(),
            details="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            at_seconds=now,
            exception=error,
        )

    def _wait_until_failure_or_end(self, deadline: float) -> bool:
        """Returns whether all ranks finished or one failed before the deadline."""
        with self._changed:
            while (remaining := deadline - time.monotonic()) > 0:
                if self._changed.wait_for(self._is_over, timeout=min(remaining, SIGNALS_WAIT_SECONDS)):
                    return True
            return self._is_over()

    def _is_over(self) -> bool:
        if len(self._reports) == self._world_size:
            return True
        return any(report.outcome is not Outcome.FINISHED for report in self._reports.values())

    def _stop_the_rest(self) -> None:
        """Wakes ranks that wait in a collective, interrupts those that compute, abandons those that do not react."""
        began = time.monotonic()
        interrupted = False
        with self._changed:
            while len(self._reports) < len(self._threads):
                torch_threads.stop_threaded_ranks()
                waited_seconds = time.monotonic() - began
                if waited_seconds > _GRACE_SECONDS:
                    break
                if waited_seconds > _INTERRUPT_SECONDS and not interrupted:
                    interrupted = True
                    for rank, thread in enumerate(self._threads):
                        # A thread whose rank has reported waits for its next job; an interrupt could lose that job.
                        if rank not in self._reports:
                            thread.interrupt()
                self._changed.wait(_POLL_SECONDS)

    def _stacks(self) -> dict[int, str]:
        stacks = {}
        for rank, thread in enumerate(self._threads):
            frame = thread.frame()
            if rank not in self._reports and frame is not None:
                lines = traceback.format_stack(frame)
                # Skips the frames up to the call of the rank's function, which are the same in every rank.
                own = [index for index, line in enumerate(lines) if "in _run_rank" in line]
                stacks[rank] = "".join(lines[own[0] + 1 :] if own else lines)
        return stacks

    def _final_reports(self, stacks: dict[int, str]) -> list[RankReport]:
        reports = []
        for rank in range(self._world_size):
            report = self._reports.get(rank)
            if rank in stacks:
                report = RankReport(
                    rank, Outcome.HUNG, summary="was still running, here:", details=stacks[rank]
                )
            elif report is None:
                report = RankReport(
                    rank, Outcome.TORN_DOWN, summary="did not react; its thread was abandoned"
                )
            reports.append(report)
        return reports
