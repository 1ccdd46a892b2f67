"""Processes of one host that can read each other's memory with ``process_vm_readv``, and announce when.

The kernel copies from a peer's address space into ours in one go, where loopback sockets take two copies and a
protocol. The few bytes of announcements go through pipes.

The processes need permission: same host, same user, no security rule against it. That is tried once, on all ranks; if
it fails on any of them, none uses it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shardwise.comm.channels.channel import Channel
from shardwise.comm.shared_memory.pipes import Pipes, close, open_pipes

__all__ = ["ProcessVMPeers", "find_process_vm_peers"]

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
    here = torch.tensor([[ctypes.addressof(found), _MAGIC_BYTES]])
    there = torch.tensor([[address, _MAGIC_BYTES]])
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
