"""Exchange between processes of one host that can read each other's memory with ``process_vm_readv``.

    rank 0   step ─ "my pieces are here" ─▶ rank 1   reads them into place ─ receipt ─▶ rank 0   may go on

The kernel copies from a peer's address space into ours in one go, where loopback sockets take two copies and a
protocol. The few bytes of announcements go through pipes.

The processes need permission: same host, same user, no security rule against it. That is tried once, on all ranks; if
it fails on any of them, none uses it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.channels.channel import Channel
from shardwise.comm.channels.watched import LostConnection
from shardwise.comm.shared_memory.pipes import Pipes, close, open_pipes
from shardwise.errors import RankDisagreement, StateError

__all__ = [
    "DirectReads",
    "InFlight",
    "ProcessVMPeers",
    "find_process_vm_peers",
    "zeros_in_huge_pages",
]

_LOGGER = logging.getLogger("shardwise")
_MAGIC_BYTES = 16
_HANDLE = struct.Struct(f"<qq{_MAGIC_BYTES}s")
_MASK = (1 << 61) - 1
_MIX = 0x2545F4914F6CDD1D & _MASK


class ProcessVMPeers(Pipes):
    """The ranks of a group on one host, as one of them sees them."""

    def __init__(
        self,
        channel: Channel,
        pids: Sequence[int],
        read_ends: Mapping[int, int],
        write_ends: Mapping[int, int],
    ) -> None:
        super().__init__(channel, read_ends, write_ends)
        self._pids = pids
        self._digest, self._num_since = 0, 0

    def next_tag(self) -> int:
        """Returns a tag for the next exchange: the same on all ranks with equal logs."""
        digest = self._channel.log.digest
        self._num_since = self._num_since + 1 if digest == self._digest else 0
        self._digest = digest
        # Tags from an earlier log can never equal this one.
        return (digest + self._num_since * _MIX) & _MASK

    def read(self, peer: int, here: Tensor, there: Tensor) -> int:
        """Copies a peer's memory ranges ``there`` to the ranges ``here``; returns the number of bytes copied."""
        return _read(self._pids[peer], here, there)


def find_process_vm_peers(
    channel: Channel, all_gather: Callable[[bytes], list[bytes]]
) -> ProcessVMPeers | None:
    """Returns the ranks of a group if each can read every other's memory, else None. Called by all ranks."""
    rank, world = channel.rank, channel.world
    magic = ctypes.create_string_buffer(secrets.token_bytes(_MAGIC_BYTES), _MAGIC_BYTES)
    pipes: dict[int, tuple[int, int]] = {}
    try:
        pipes = open_pipes([peer for peer in range(world) if peer != rank])
    except OSError as error:
        _LOGGER.warning("ranks exchange messages instead of reading memory: cannot open a pipe: %s", error)
    ends = [pipes[peer][1] if peer in pipes else -1 for peer in range(world)]
    own = _HANDLE.pack(os.getpid(), ctypes.addressof(magic), magic.raw) + struct.pack(f"<{world}q", *ends)
    pids, write_ends = [], {}
    all_read = len(pipes) == world - 1
    for peer, handle in enumerate(all_gather(own)):
        pid, address, theirs = _HANDLE.unpack_from(handle)
        pids.append(pid)
        # A PID from another namespace means some other process here; only the magic bytes can tell.
        all_read = all_read and _read_magic(pid, address) == theirs
        if all_read and peer != rank:
            end = struct.unpack_from(f"<{world}q", handle, _HANDLE.size)[rank]
            try:
                write_ends[peer] = os.open(f"/proc/{pid}/fd/{end}", os.O_WRONLY | os.O_CLOEXEC)
            except OSError as error:
                if end >= 0:
                    _LOGGER.warning(
                        "ranks exchange messages instead of reading memory: no pipe to rank %d: %s",
                        peer,
                        error,
                    )
                all_read = False
    # Every rank keeps its magic bytes and the pipes' write ends until all ranks have tried.
    agreed = all(answer == b"\1" for answer in all_gather(bytes([all_read])))
    close([end for _, end in pipes.values()])
    read_ends = {peer: end for peer, (end, _) in pipes.items()}
    if agreed:
        return ProcessVMPeers(channel, pids, read_ends, write_ends)
    close([*read_ends.values(), *write_ends.values()])
    return None


def _read_magic(pid: int, address: int) -> bytes:
    found = ctypes.create_string_buffer(_MAGIC_BYTES)
    here = torch.tensor([[ctypes.addressof(found), _MAGIC_BYTES]], device="cpu")
    there = torch.tensor([[address, _MAGIC_BYTES]], device="cpu")
    return found.raw if _read(pid, here, there) == _MAGIC_BYTES else b""


def _read(pid: int, here: Tensor, there: Tensor) -> int:
    """Reads ranges given as tables of (address, length) rows, in the layout that the kernel takes."""
    copied: int = _libc.process_vm_readv(
        pid, here.data_ptr(), here.size(0), there.data_ptr(), there.size(0), 0
    )
    return copied


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    table = (ctypes.c_void_p, ctypes.c_ulong)
    libc.process_vm_readv.argtypes = (ctypes.c_int, *table, *table, ctypes.c_ulong)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


_libc = _load_libc()


# --- the exchange -----------------------------------------------------------------------------------------------------

_ANNOUNCEMENT, _RECEIPT = 0, 1
# The kernel's limits for one call: 1024 ranges, and a little less than 2 GiB.
_MAX_RANGES = 1024
_MAX_BYTES = 1 << 30
# An announcement is the address of a table of addresses and, in the bits above, a number that differs from the last.
_ADDRESS_BITS = 48
_numbers = count()
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_HUGEPAGE = 14


def zeros_in_huge_pages(num_bytes: int) -> Tensor:
    """Returns a byte buffer that starts at a huge page, backed by huge pages where the kernel follows the advice.

    To read a peer's memory the kernel looks up every page: with larger pages a read takes less time.
    """
    if num_bytes < _HUGE_PAGE_BYTES:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    padded = torch.empty(num_bytes + _HUGE_PAGE_BYTES, dtype=torch.uint8, device="cpu")
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
    """An exchange by announcing where tensors are. All ranks issue theirs, and wait for them, in the same order."""

    in_lockstep = True

    def __init__(self, sections: Sequence[Sequence[Tensor]], rank: int, local_peers: ProcessVMPeers) -> None:
        self._sections = sections  # alive: their addresses are in the tables
        self._rank, self._local_peers = rank, local_peers
        self._tables = [_address_table(section) for section in sections]
        self._calls = [_split_into_calls(table[:, 1].tolist()) for table in self._tables]
        self._own = self._tables[rank]
        self._announced = self._own.data_ptr() | (next(_numbers) & 0x7FFF) << _ADDRESS_BITS
        # By peer: its last announcement, and the table that was read there.
        self._known: dict[int, tuple[int, Tensor]] = {}
        # Each rank starts with the next one, so that not all of them read from the same rank.
        world = len(sections)
        self._peers = [(rank + step) % world for step in range(1, world)]
        self._writers = [peer for peer in self._peers if len(self._tables[peer])]

    def issue(self) -> InFlight:
        number = self._local_peers.next_tag()
        if len(self._own):
            # Sent every time: a peer cannot know whether our memory was replaced.
            for peer in self._peers:
                self._local_peers.send(peer, (number, _ANNOUNCEMENT), self._announced)
        return InFlight(partial(self.finish, number))

    def finish(self, number: int) -> None:
        local_peers = self._local_peers
        waits_for = list(self._writers)
        while waits_for:
            # In order of arrival, so that a slow peer holds up nobody else.
            peer, announced = local_peers.receive_first(waits_for, (number, _ANNOUNCEMENT))
            waits_for.remove(peer)
            self._read_from(peer, announced)
            local_peers.send(peer, (number, _RECEIPT))
        if len(self._own):
            # order: the last peer's read before anything here writes to these tensors again
            for peer in self._peers:
                local_peers.receive(peer, (number, _RECEIPT))

    def _read_from(self, peer: int, announced: int) -> None:
        here = self._tables[peer]
        known, there = self._known.get(peer, (None, here))
        if known != announced:
            there = self._table_at(peer, announced & (1 << _ADDRESS_BITS) - 1)
            self._known[peer] = (announced, there)
        for begin, end, num_bytes in self._calls[peer]:
            self._copy(peer, here[begin:end], there[begin:end], num_bytes)

    def _table_at(self, peer: int, address: int) -> Tensor:
        here = self._tables[peer]
        there = torch.empty_like(here)
        self._copy(
            peer, _table_of_one(there), torch.tensor([[address, there.nbytes]], device="cpu"), there.nbytes
        )
        if not torch.equal(here[:, 1], there[:, 1]):
            raise RankDisagreement(
                f"rank {peer} has pieces of other sizes than this rank expects",
                where=self._where,
                fix="build the same model on every rank",
            )
        return there

    def _copy(self, peer: int, here: Tensor, there: Tensor, num_bytes: int) -> None:
        copied = self._local_peers.read(peer, here, there)
        if copied < 0 and ctypes.get_errno() == errno.ESRCH:
            raise LostConnection(f"rank {peer} of the group has ended")
        if copied != num_bytes:
            reason = (
                os.strerror(ctypes.get_errno())
                if copied < 0
                else f"only {copied} of {num_bytes} bytes were readable"
            )
            raise StateError(f"rank {peer}'s memory could not be read: {reason}", where=self._where)

    @property
    def _where(self) -> str:
        return f"exchange of parameters, rank {self._rank}"


def _table_of_one(tensor: Tensor) -> Tensor:
    return torch.tensor([[tensor.data_ptr(), tensor.nbytes]], device="cpu")


def _address_table(section: Sequence[Tensor]) -> Tensor:
    """Returns addresses and lengths of byte tensors, none longer than one call may copy."""
    rows = [
        (view.data_ptr() + offset, min(_MAX_BYTES, view.numel() - offset))
        for view in section
        for offset in range(0, view.numel(), _MAX_BYTES)
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 2)


def _split_into_calls(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Splits a table into calls within the kernel's limits: first row, end row and bytes of each."""
    calls = []
    begin = total = 0
    for row, length in enumerate(lengths):
        if row - begin == _MAX_RANGES or total + length > _MAX_BYTES:
            calls.append((begin, row, total))
            begin, total = row, 0
        total += length
    if total:
        calls.append((begin, len(lengths), total))
    return calls
