"""Ranks as threads of this process: cheap enough for 128 of them, and a debugger can see them all.

Collectives are copies under a lock, done by torch's own threaded group. What threads share, these ranks
share: the default random generator, warning filters, module globals. Autograd runs in the rank's own thread,
because an engine thread would not know which rank it works for.

A thread cannot be killed. A rank that never returns to Python bytecode (a C call that blocks for good) is
left behind as a daemon when its call is over; it keeps its memory but cannot meet later calls, whose groups
have other names.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardwise import torch_internals
from shardwise.errors import StateError
from shardwise.testing.failures import Outcome, RankReport, failure_of

__all__ = ["run_threads"]

_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.02

_one_call_at_a_time = threading.Lock()
_call_numbers = itertools.count(1)
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
    """Call ``fn`` on ``world_size`` threads, each with its own default group; results in rank order."""
    if getattr(_rank_thread, "active", False):
        raise StateError(
            "run_ranks was called on a rank", where=call, fix="start all ranks from outside, in one call"
        )
    with _one_call_at_a_time:
        crew = _Crew(fn, world_size, args, kwargs, timeout_seconds)
        with torch_internals.threaded_world():
            return crew.run(call)


class _Crew:
    """The threads of one call, and what has become of each."""

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
        self._results: list[Any] = [None] * world_size
        self._reports: dict[int, RankReport] = {}
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._be_rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(world_size)
        ]

    def run(self, call: str) -> list[Any]:
        deadline = time.monotonic() + self._timeout_seconds
        started = 0
        try:
            for thread in self._threads:
                thread.start()
                started += 1
            in_time = self._wait_until_failure_or_end(deadline)
            stacks = {} if in_time else self._stacks()
        finally:
            # Nothing to stop after an ordinary end; but after a failure, a hang or an interrupt there is.
            self._stop_the_rest(self._threads[:started])
        if len(self._reports) == self._world_size and all(
            report.outcome is Outcome.FINISHED for report in self._reports.values()
        ):
            return self._results
        raise failure_of(self._final_reports(stacks), call=call, timeout_seconds=self._timeout_seconds)

    def _be_rank(self, rank: int) -> None:
        _rank_thread.active = True
        try:
            # Numbers never come twice, so a rank left behind by an earlier call can meet nobody here.
            torch_internals.start_threaded_rank(
                rank,
                self._world_size,
                self._store,
                call_number=self._call_number,
                timeout=timedelta(seconds=self._timeout_seconds + 60),
            )
            try:
                self._results[rank] = self._fn(*self._args, **self._kwargs)
                report = RankReport(rank, Outcome.FINISHED, at_seconds=time.monotonic())
            finally:
                dist.destroy_process_group()
        except BaseException as error:  # noqa: BLE001  a rank reports whatever ended it, SystemExit included
            report = self._report_of(rank, error)
        with self._changed:
            self._reports.setdefault(rank, report)
            self._changed.notify_all()

    def _report_of(self, rank: int, error: BaseException) -> RankReport:
        now = time.monotonic()
        if isinstance(error, SystemExit) and torch_internals.threaded_ranks_are_stopping():
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
        """False if the time was up first."""
        with self._changed:
            return self._changed.wait_for(self._is_over, timeout=deadline - time.monotonic())

    def _is_over(self) -> bool:
        if len(self._reports) == self._world_size:
            return True
        return any(report.outcome is not Outcome.FINISHED for report in self._reports.values())

    def _stop_the_rest(self, threads: list[threading.Thread]) -> None:
        """Wake ranks that wait in a collective, interrupt those that compute, leave those that are deaf."""
        grace_ends = time.monotonic() + _GRACE_SECONDS
        interrupted = False
        while any(thread.is_alive() for thread in threads):
            if len(self._reports) < self._world_size:
                torch_internals.stop_threaded_ranks()
                remaining = grace_ends - time.monotonic()
                if remaining < 0:
                    break
                if remaining < _GRACE_SECONDS / 2 and not interrupted:
                    interrupted = True
                    for thread in threads:
                        _interrupt(thread)
            with self._changed:
                self._changed.wait(_POLL_SECONDS)

    def _stacks(self) -> dict[int, str]:
        frames = sys._current_frames()
        stacks = {}
        for rank, thread in enumerate(self._threads):
            frame = frames.get(thread.ident or -1)
            if rank not in self._reports and frame is not None:
                lines = traceback.format_stack(frame)
                # The first frames are how a thread starts, up to the call of the rank's function.
                own = [index for index, line in enumerate(lines) if "in _be_rank" in line]
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
                    rank, Outcome.TORN_DOWN, summary="did not answer; its thread is left behind"
                )
            reports.append(report)
        return reports


def _interrupt(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread at its next bytecode; what blocks in C does not notice."""
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
