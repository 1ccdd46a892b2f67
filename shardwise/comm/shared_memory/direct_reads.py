"""Exchange between processes of one host: ranks read each other's tensors with ``process_vm_readv``.

rank 0   step ─ note: "my pieces are here" ─▶ rank 1   reads them into place ─ receipt ─▶ rank 0   may go on
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.channels.channel import LostConnection
from shardwise.comm.shared_memory.process_vm import ProcessVMPeers
from shardwise.errors import RankDisagreement, StateError

__all__ = ["DirectReads", "InFlight", "zeros_in_huge_pages"]

_NOTE, _RECEIPT = 0, 1
# The kernel's limits for one call: 1024 ranges, and a little less than 2 GiB.
_MAX_STRETCHES = 1024
_MAX_BYTES = 1 << 30
# A note is the address of a table of addresses and, in the bits above, a number that the next notes do not have.
_ADDRESS_BITS = 48
_numbers = count()
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_HUGEPAGE = 14


def zeros_in_huge_pages(num_bytes: int) -> Tensor:
    """Returns a byte buffer that starts at a huge page, backed by huge pages where the kernel follows the advice.

    To read a peer's memory the kernel looks up every page: with larger pages a read takes less time.
    """
    if num_bytes < _HUGE_PAGE_BYTES:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    padded = torch.empty(num_bytes + _HUGE_PAGE_BYTES, dtype=torch.uint8)
    start = -padded.data_ptr() % _HUGE_PAGE_BYTES
    buffer = padded[start : start + num_bytes]
    whole_pages_bytes = num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    # Before the first write, while the pages are not allocated yet. If it fails, they stay small.
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(whole_pages_bytes), ctypes.c_int(_MADV_HUGEPAGE)
    )
    return buffer.zero_()


class InFlight(NamedTuple):
    """An issued exchange whose data ``wait`` copies into place."""

    wait: Callable[[], None]


class DirectReads:
    """An exchange by notes that say where tensors are. All ranks issue theirs, and wait for them, in the same order."""

    in_lockstep = True

    def __init__(self, sections: Sequence[Sequence[Tensor]], rank: int, neighbours: ProcessVMPeers) -> None:
        self._sections = sections  # alive: their addresses are in the tables
        self._rank, self._neighbours = rank, neighbours
        self._tables = [_table(section) for section in sections]
        self._calls = [_calls(table[:, 1].tolist()) for table in self._tables]
        self._own = self._tables[rank]
        self._note = self._own.data_ptr() | (next(_numbers) & 0x7FFF) << _ADDRESS_BITS
        # By peer: its last note, and the table that was read there.
        self._followed: dict[int, tuple[int, Tensor]] = {}
        # Each rank starts with the next one, so that not all of them read from the same rank.
        world = len(sections)
        self._peers = [(rank + step) % world for step in range(1, world)]
        self._writers = [peer for peer in self._peers if len(self._tables[peer])]

    def issue(self) -> InFlight:
        number = self._neighbours.next_tag()
        if len(self._own):
            # Sent every time: a peer cannot know whether our memory was replaced.
            for peer in self._peers:
                self._neighbours.send(peer, (number, _NOTE), self._note)
        return InFlight(partial(self.finish, number))

    def finish(self, number: int) -> None:
        neighbours = self._neighbours
        waits_for = list(self._writers)
        while waits_for:
            # In order of arrival, so that a slow peer holds up nobody else.
            peer, note = neighbours.receive_first(waits_for, (number, _NOTE))
            waits_for.remove(peer)
            self._read_from(peer, note)
            neighbours.send(peer, (number, _RECEIPT))
        if len(self._own):
            # order: the last peer's read before anything here writes to these tensors again
            for peer in self._peers:
                neighbours.receive(peer, (number, _RECEIPT))

    def _read_from(self, peer: int, note: int) -> None:
        here = self._tables[peer]
        followed, there = self._followed.get(peer, (None, here))
        if followed != note:
            there = self._table_at(peer, note & (1 << _ADDRESS_BITS) - 1)
            self._followed[peer] = (note, there)
        for begin, end, num_bytes in self._calls[peer]:
            self._copy(peer, here[begin:end], there[begin:end], num_bytes)

    def _table_at(self, peer: int, address: int) -> Tensor:
        here = self._tables[peer]
        there = torch.empty_like(here)
        self._copy(peer, _row(there), torch.tensor([[address, there.nbytes]]), there.nbytes)
        if not torch.equal(here[:, 1], there[:, 1]):
            raise RankDisagreement(
                f"rank {peer} has pieces of other sizes than this rank expects",
                where=self._where,
                fix="build the same model on every rank",
            )
        return there

    def _copy(self, peer: int, here: Tensor, there: Tensor, num_bytes: int) -> None:
        copied = self._neighbours.read(peer, here, there)
        if copied < 0 and ctypes.get_errno() == errno.ESRCH:
            raise LostConnection(f"rank {peer} of the group has ended")
        if copied != num_bytes:
            reason = (
                os.strerror(ctypes.get_errno())
                if copied < 0
                else f"only {copied} of {num_bytes} bytes were there"
            )
            raise StateError(f"rank {peer}'s memory could not be read: {reason}", where=self._where)

    @property
    def _where(self) -> str:
        return f"exchange of parameters, rank {self._rank}"


def _row(tensor: Tensor) -> Tensor:
    return torch.tensor([[tensor.data_ptr(), tensor.nbytes]])


def _table(section: Sequence[Tensor]) -> Tensor:
    """Returns addresses and lengths of byte tensors, none longer than one call may copy."""
    rows = [
        (view.data_ptr() + offset, min(_MAX_BYTES, view.numel() - offset))
        for view in section
        for offset in range(0, view.numel(), _MAX_BYTES)
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)


def _calls(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Splits a table into calls within the kernel's limits: first row, end row and bytes of each."""
    calls = []
    begin = total = 0
    for row, length in enumerate(lengths):
        if row - begin == _MAX_STRETCHES or total + length > _MAX_BYTES:
            calls.append((begin, row, total))
            begin, total = row, 0
        total += length
    if total:
        calls.append((begin, len(lengths), total))
    return calls
