"""Collectives between ranks that are threads of one process: a table in memory where they meet.

Ranks meet at the digest of their path, so only those who came the same way do; the last to arrive does the work for
all. Ranks that part wait at different places of the table, until the watch explains it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.channels.channel import WatchedChannel
from shardwise.torch_internals import name_of
from shardwise.torch_threads import threaded_ranks_are_stopping

# How often a rank that waits looks for a verdict; many of them would keep the one that works from working.
_SLICE_SECONDS = 0.05
_RANKS_A_SLICE = 8
_LANDING_SECONDS = 0.2

Pair = tuple[torch.Tensor, torch.Tensor]


class _Table:
    """Where the ranks of one group meet."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.meetings: dict[int, _Rendezvous] = {}


class _Rendezvous:
    """One collective: who has come, with which tensors."""

    def __init__(self) -> None:
        self.arrived: dict[int, Pair] = {}
        self.is_over = threading.Event()
        self.is_under_way = False
        self.is_called_off = False
        self.error: Exception | None = None


_tables_lock = threading.Lock()
_tables: weakref.WeakValueDictionary[str, _Table] = weakref.WeakValueDictionary()


class ThreadWork:
    """This rank's side of a meeting."""

    def __init__(self, channel: ThreadChannel, code: int, meeting: _Rendezvous) -> None:
        self.code = code
        self.channel = channel
        self.meeting = meeting

    def wait(self) -> None:
        meeting, channel = self.meeting, self.channel
        channel.waiting = self
        try:
            while not meeting.is_over.wait(channel.slice_seconds):
                if channel.failure is not None:
                    channel.raise_failure()
                if threaded_ranks_are_stopping():
                    raise SystemExit("the ranks are stopped")
        finally:
            channel.waiting = None
        if meeting.error is not None:
            raise meeting.error


class ThreadChannel(WatchedChannel):
    """A group of threads that compute on the CPU."""

    carries = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.slice_seconds = _SLICE_SECONDS * max(1.0, self.world / _RANKS_A_SLICE)
        with _tables_lock:
            self._table = _tables.setdefault(name_of(group), _Table())

    def is_over(self) -> bool:
        # Which groups are alive only the rank's own thread knows.
        return self.group() is None

    def before_backend_collective(self, code: int) -> None:
        self.agree(code)

    def gather(self, output: torch.Tensor, own: torch.Tensor, code: int) -> ThreadWork:
        return self._meet(code, (output, own), _gather)

    def reduce_scatter(self, output: torch.Tensor, rows: torch.Tensor, code: int) -> ThreadWork:
        return self._meet(code, (output, rows), _reduce)

    def exchange(self, output: torch.Tensor, rows: torch.Tensor, code: int) -> ThreadWork:
        return self._meet(code, (output, rows), _exchange)

    def agree(self, code: int) -> None:
        if self.checks:
            self._meet(code, _NOTHING, _agree).wait()

    def _meet(self, code: int, own: Pair, work: Callable[[list[Pair]], None]) -> ThreadWork:
        digest, table = self.record(code), self._table
        with table.lock:
            meeting = table.meetings.setdefault(digest, _Rendezvous())
            meeting.arrived[self.rank] = own
            is_last = len(meeting.arrived) == self.world
            if is_last:
                del table.meetings[digest]
            meeting.is_under_way = works = is_last and not meeting.is_called_off
        if works:
            try:
                with torch.no_grad():
                    work([meeting.arrived[rank] for rank in range(self.world)])
            except Exception as error:  # noqa: BLE001  it is every rank's, wherever it happened
                meeting.error = error
            meeting.arrived.clear()
            meeting.is_over.set()
        return ThreadWork(self, code, meeting)

    def land(self, work: Any) -> bool:
        meeting: _Rendezvous = work.meeting
        meeting.is_over.wait(_LANDING_SECONDS)
        with self._table.lock:
            meeting.is_called_off = True
        if meeting.is_under_way:
            meeting.is_over.wait()
        return True


_NOTHING = (torch.empty(0), torch.empty(0))


def _gather(arrived: list[Pair]) -> None:
    for output, _ in arrived:
        rows = output.detach().view(len(arrived), -1)
        for row, (_, own) in zip(rows, arrived, strict=True):
            row.copy_(own.detach().view(-1))


def _reduce(arrived: list[Pair]) -> None:
    for rank, (output, _) in enumerate(arrived):
        total = output.detach()
        for term, (_, rows) in enumerate(arrived):
            row = rows.detach().view(len(arrived), -1)[rank]
            total.copy_(row) if term == 0 else total.add_(row)


def _exchange(arrived: list[Pair]) -> None:
    for rank, (output, _) in enumerate(arrived):
        for row, (_, rows) in zip(output.detach().view(len(arrived), -1), arrived, strict=True):
            row.copy_(rows.detach().view(len(arrived), -1)[rank])


def _agree(arrived: list[Pair]) -> None:
    """To have come is all."""
