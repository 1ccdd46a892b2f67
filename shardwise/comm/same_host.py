"""Exchange between processes of one host: ranks read one another's memory, without a network in between.

The kernel copies from a peer's address space into ours in one go (``process_vm_readv``), where loopback sockets take
two copies and a protocol. The group carries only small notes:

    rank 0   step ─ note: "my pieces lie here" ─▶ rank 1   reads them into place ─ "read" ─▶ rank 0   may go on

It takes processes that may read each other: one host, one user, and no rule against it. That is tried out, once, on
all ranks; if it fails on any of them, nobody does it.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import struct
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import RankDisagreement, StateError

__all__ = ["DirectReads", "neighbour_pids", "zeros_in_huge_pages"]

_NOTE_TAG, _READ_TAG = 0x5A46, 0x5A47
# The kernel's limits for one call: 1024 stretches of memory, and a little less than 2 GiB.
_MAX_STRETCHES = 1024
_MAX_BYTES = 1 << 30
_MAGIC_BYTES = 16
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_HUGEPAGE = 14


def neighbour_pids(group: dist.ProcessGroup) -> tuple[int, ...] | None:
    """The ranks' process ids if every rank can read every other's memory, else None. Called by all ranks."""
    magic = ctypes.create_string_buffer(secrets.token_bytes(_MAGIC_BYTES), _MAGIC_BYTES)
    own = struct.pack("<qq", os.getpid(), ctypes.addressof(magic)) + magic.raw
    cards = _all_gather(own, group)
    pids = []
    all_read = True
    for card in cards:
        pid, address = struct.unpack("<qq", card[:16])
        pids.append(pid)
        # Ranks in another PID namespace have ids that mean some other process here: only the magic tells.
        all_read = all_read and _peek(pid, address) == card[16:]
    # All ranks have tried before any of them lets go of its magic.
    agreed = all(answer == b"\1" for answer in _all_gather(bytes([all_read]), group))
    return tuple(pids) if agreed else None


def _all_gather(message: bytes, group: dist.ProcessGroup) -> list[bytes]:
    received = [torch.empty(len(message), dtype=torch.uint8) for _ in range(group.size())]
    dist.all_gather(received, torch.frombuffer(bytearray(message), dtype=torch.uint8), group=group)
    return [bytes(tensor.tolist()) for tensor in received]


def _peek(pid: int, address: int) -> bytes:
    found = ctypes.create_string_buffer(_MAGIC_BYTES)
    here = torch.tensor([[ctypes.addressof(found), _MAGIC_BYTES]])
    there = torch.tensor([[address, _MAGIC_BYTES]])
    return found.raw if _read(pid, here, there) == _MAGIC_BYTES else b""


def _read(pid: int, here: Tensor, there: Tensor) -> int:
    """Copies the stretches of memory ``there``, in process ``pid``, to those ``here``; the number of bytes copied.

    A table of (address, length) rows is what the kernel takes, as it lies in memory.
    """
    return int(
        _libc.process_vm_readv(
            pid,
            ctypes.c_void_p(here.data_ptr()),
            ctypes.c_ulong(len(here)),
            ctypes.c_void_p(there.data_ptr()),
            ctypes.c_ulong(len(there)),
            ctypes.c_ulong(0),
        )
    )


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


_libc = _load_libc()


def zeros_in_huge_pages(num_bytes: int) -> Tensor:
    """A byte buffer that begins at a huge page, held in such where the kernel takes the advice.

    Reading a peer's memory, it looks up every page: with larger ones a read takes less time.
    """
    if num_bytes < _HUGE_PAGE_BYTES:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    room = torch.empty(num_bytes + _HUGE_PAGE_BYTES, dtype=torch.uint8)
    start = -room.data_ptr() % _HUGE_PAGE_BYTES
    buffer = room[start : start + num_bytes]
    whole_pages_bytes = num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    # Before anything is written: then pages are there to be made large. If it fails, they stay small.
    _libc.madvise(
        ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(whole_pages_bytes), ctypes.c_int(_MADV_HUGEPAGE)
    )
    return buffer.zero_()


class DirectReads:
    """An exchange by notes of where things lie."""

    in_lockstep = False

    def __init__(
        self, sections: Sequence[Sequence[Tensor]], group: dist.ProcessGroup, pids: Sequence[int]
    ) -> None:
        self._sections = sections  # alive: their addresses are in the tables
        self._group = group
        self._pids = pids
        rank = group.rank()
        self._peers = [peer for peer in range(group.size()) if peer != rank]
        self._tables = [_table(section) for section in sections]
        self._own = self._tables[rank]
        self._writers = [peer for peer in self._peers if len(self._tables[peer])]

    def issue(self) -> _Reading:
        group = self._group
        notes = {peer: torch.empty_like(self._tables[peer]) for peer in self._writers}
        arrivals = {peer: group.recv([note], peer, _NOTE_TAG) for peer, note in notes.items()}
        sent = []
        if len(self._own):
            # The note is sent anew each time: a peer cannot know that our memory was replaced.
            sent = [group.send([self._own], peer, _NOTE_TAG) for peer in self._peers]
        return _Reading(self, notes, arrivals, sent)

    def finish(self, notes: dict[int, Tensor], arrivals: dict[int, dist.Work], sent: list[dist.Work]) -> None:
        receipt = torch.zeros(1, dtype=torch.uint8)
        for peer in self._writers:
            arrivals[peer].wait()
            self._read_from(peer, notes[peer])
            sent.append(self._group.send([receipt], peer, _READ_TAG))
        if len(self._own):
            # order: the last peer's read before anything here writes to these tensors again
            for peer in self._peers:
                self._group.recv([torch.empty_like(receipt)], peer, _READ_TAG).wait()
        for work in sent:
            work.wait()

    def _read_from(self, peer: int, there: Tensor) -> None:
        here = self._tables[peer]
        where = f"exchange of parameters, rank {self._group.rank()}"
        if not torch.equal(here[:, 1], there[:, 1]):
            raise RankDisagreement(
                f"rank {peer} has pieces of other sizes than this rank expects of it",
                where=where,
                fix="build the same model on every rank",
            )
        for begin, end, num_bytes in _calls(here[:, 1].tolist()):
            if _read(self._pids[peer], here[begin:end], there[begin:end]) != num_bytes:
                reason = os.strerror(ctypes.get_errno())
                raise StateError(f"rank {peer}'s memory could not be read: {reason}", where=where)


class _Reading:
    """Notes on their way."""

    def __init__(
        self,
        exchange: DirectReads,
        notes: dict[int, Tensor],
        arrivals: dict[int, dist.Work],
        sent: list[dist.Work],
    ) -> None:
        self._exchange = exchange
        self._notes = notes
        self._arrivals = arrivals
        self._sent = sent

    def wait(self) -> None:
        self._exchange.finish(self._notes, self._arrivals, self._sent)


def _table(section: Sequence[Tensor]) -> Tensor:
    """Addresses and lengths of byte tensors, none longer than one call may copy."""
    rows = [
        (wire.data_ptr() + offset, min(_MAX_BYTES, wire.numel() - offset))
        for wire in section
        for offset in range(0, wire.numel(), _MAX_BYTES)
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)


def _calls(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Rows from, rows to and bytes of each call, within the kernel's limits."""
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
