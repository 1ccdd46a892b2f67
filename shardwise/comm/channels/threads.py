"""Collectives between ranks that are threads of one process, through a table in memory.

Ranks meet at the digest of their log, so only those with equal logs do; the last to arrive does the work for all. Ranks
that diverge wait at different entries of the table, until the watchdog explains it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.channels.watched import WatchedChannel
from shardwise.torch_internals import name_of
from shardwise.torch_threads import threaded_ranks_are_stopping

# How often a waiting rank polls for a failure; less often with many ranks, which would slow down the one that works.
_POLL_SECONDS = 0.05
_RANKS_PER_POLL = 8
_DRAIN_SECONDS = 0.2

Pair = tuple[torch.Tensor, torch.Tensor]


class _Table:
    """Where the ranks of one group meet."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rendezvous_by_digest: dict[int, _Rendezvous] = {}


class _Rendezvous:
    """One collective: the tensors of the ranks that have arrived."""

    def __init__(self) -> None:
        self.arrived: dict[int, Pair] = {}
        self.is_over = threading.Event()
        self.is_running = False
        self.is_cancelled = False
        self.error: Exception | None = None


_tables_lock = threading.Lock()
_tables: weakref.WeakValueDictionary[str, _Table] = weakref.WeakValueDictionary()


class ThreadWork:
    """This rank's side of a rendezvous."""

    def __init__(self, channel: ThreadChannel, code: int, rendezvous: _Rendezvous) -> None:
        self.code = code
        self.channel = channel
        self.rendezvous = rendezvous

    def wait(self) -> None:
        rendezvous, channel = self.rendezvous, self.channel
        channel.waiting = self
        try:
            while not rendezvous.is_over.wait(channel.poll_seconds):
                if channel.failure is not None:
                    channel.raise_failure()
                if threaded_ranks_are_stopping():
                    raise SystemExit("the ranks are stopped")
        finally:
            channel.waiting = None
        if rendezvous.error is not None:
            raise rendezvous.error


class ThreadChannel(WatchedChannel):
    """A group of threads that compute on the CPU."""

    carries_data = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.poll_seconds = _POLL_SECONDS * max(1.0, self.world / _RANKS_PER_POLL)
        with _tables_lock:
            self._table = _tables.setdefault(name_of(group), _Table())

    def is_over(self) -> bool:
        # Whether the group is destroyed only the rank's own thread can tell.
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
        digest, table = self.log.record(code), self._table
        with table.lock:
            rendezvous = table.rendezvous_by_digest.setdefault(digest, _Rendezvous())
            rendezvous.arrived[self.rank] = own
            is_last = len(rendezvous.arrived) == self.world
            if is_last:
                del table.rendezvous_by_digest[digest]
            rendezvous.is_running = works = is_last and not rendezvous.is_cancelled
        if works:
            try:
                with torch.no_grad():
                    work([rendezvous.arrived[rank] for rank in range(self.world)])
            except Exception as error:  # noqa: BLE001  every rank raises it
                rendezvous.error = error
            rendezvous.arrived.clear()
            rendezvous.is_over.set()
        return ThreadWork(self, code, rendezvous)

    def drain(self, work: Any) -> bool:
        rendezvous: _Rendezvous = work.rendezvous
        rendezvous.is_over.wait(_DRAIN_SECONDS)
        with self._table.lock:
            rendezvous.is_cancelled = True
        if rendezvous.is_running:
            rendezvous.is_over.wait()
        return True


_NOTHING = (torch.empty(0, device="cpu"), torch.empty(0, device="cpu"))


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
    """Does nothing: that all have arrived is enough."""
