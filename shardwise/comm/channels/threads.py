"""Collectives between ranks that are threads of one process, through a table in memory.

Ranks meet at the digest of their log, so only those with equal logs do; the last to arrive does the work for all. Ranks
that diverge wait at different entries of the table, until the watchdog explains it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.channels.channel import UNNAMED
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


@dataclass(eq=False)
class _Rendezvous:
    """One collective: the tensors of the ranks that have arrived."""

    arrived: dict[int, Pair] = field(default_factory=dict)
    is_over: threading.Event = field(default_factory=threading.Event)
    is_running: bool = False
    is_cancelled: bool = False
    error: Exception | None = None


_tables_lock = threading.Lock()
_tables: weakref.WeakValueDictionary[str, _Table] = weakref.WeakValueDictionary()


class ThreadWork:
    """This rank's side of a rendezvous. Inside of ``with``, the last rank to arrive does the work for all."""

    def __init__(self, channel: ThreadChannel, code: int, digest: int, own: Pair) -> None:
        """Puts this rank's tensors on the table, where ranks with the same digest look for them."""
        self.code = code
        self.channel = channel
        # The tensors of all ranks, if this one does the work.
        self.arrived: Sequence[Pair] = ()
        table, world = channel.table, channel.world
        with table.lock:
            self.rendezvous = met = table.rendezvous_by_digest.setdefault(digest, _Rendezvous())
            met.arrived[channel.rank] = own
            if len(met.arrived) == world:
                del table.rendezvous_by_digest[digest]
                met.is_running = not met.is_cancelled
                if met.is_running:
                    self.arrived = list(map(met.arrived.__getitem__, range(world)))

    def __enter__(self) -> Sequence[Pair]:
        return self.arrived

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not self.arrived:
            return False
        self.arrived, rendezvous = (), self.rendezvous
        if isinstance(error, Exception):
            # Every rank raises it.
            rendezvous.error = error
        elif error is not None:
            return False
        rendezvous.arrived.clear()
        rendezvous.is_over.set()
        return True

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
            self.table = _tables.setdefault(name_of(group), _Table())

    def is_over(self) -> bool:
        # Whether the group is destroyed only the rank's own thread can tell.
        return self.group_if_alive() is None

    def before_backend_collective(self, code: int) -> None:
        self.agree(code)

    def issue_all_gather(self, output: torch.Tensor, own: torch.Tensor, code: int = UNNAMED) -> ThreadWork:
        met = ThreadWork(self, code, self.log.record(code), (output, own))
        with met as arrived, torch.no_grad():
            for received, _ in arrived:
                rows = received.detach().view(self.world, -1)
                for row, (_, sent) in zip(rows, arrived, strict=True):
                    row.copy_(sent.detach().view(-1))
        return met

    def issue_reduce_scatter(
        self, output: torch.Tensor, rows: torch.Tensor, average: bool, code: int = UNNAMED
    ) -> ThreadWork:
        met = ThreadWork(self, code, self.log.record(code), (output, rows))
        with met as arrived, torch.no_grad():
            for rank, (reduced, _) in enumerate(arrived):
                total = reduced.detach()
                for term, (_, sent) in enumerate(arrived):
                    row = sent.detach().view(self.world, -1)[rank]
                    total.copy_(row) if term == 0 else total.add_(row)
        return met

    def issue_exchange(self, output: torch.Tensor, rows: torch.Tensor, code: int = UNNAMED) -> ThreadWork:
        met = ThreadWork(self, code, self.log.record(code), (output, rows))
        with met as arrived, torch.no_grad():
            for rank, (received, _) in enumerate(arrived):
                for row, (_, sent) in zip(received.detach().view(self.world, -1), arrived, strict=True):
                    row.copy_(sent.detach().view(self.world, -1)[rank])
        return met

    def agree(self, code: int) -> None:
        if self.checks:
            met = ThreadWork(self, code, self.log.record(code), _NOTHING)
            with met:
                # That all have arrived is enough.
                pass
            met.wait()

    def drain(self, work: Any) -> bool:
        rendezvous: _Rendezvous = work.rendezvous
        rendezvous.is_over.wait(_DRAIN_SECONDS)
        with self.table.lock:
            rendezvous.is_cancelled = True
        if rendezvous.is_running:
            rendezvous.is_over.wait()
        return True


_NOTHING = (torch.empty(0, device="cpu"), torch.empty(0, device="cpu"))
