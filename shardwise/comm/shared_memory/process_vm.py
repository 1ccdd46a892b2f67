"""Processes of one host that read each other's memory, and tell each other when.

The kernel copies from a peer's address space into ours in one go (``process_vm_readv``), where loopback sockets take
two copies and a protocol. What is left to say, a few bytes, goes through pipes.

It takes processes that may read each other: one host, one user, and no rule against it. That is tried out, once, on
all ranks; if it fails on any of them, nobody does it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import struct
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.channels.channel import Channel
from shardwise.comm.shared_memory.pipes import Pipes, close

__all__ = ["ProcessVMPeers", "find_process_vm_peers"]

_LOGGER = logging.getLogger("shardwise")
_MAGIC_BYTES = 16
_CARD = struct.Struct(f"<qq{_MAGIC_BYTES}s")
_MASK = (1 << 61) - 1
_MIX = 0x2545F4914F6CDD1D & _MASK


class ProcessVMPeers(Pipes):
    """The ranks of a group on one host, as one of them sees the others."""

    def __init__(
        self, channel: Channel, pids: Sequence[int], ears: Mapping[int, int], mouths: Mapping[int, int]
    ) -> None:
        super().__init__(channel, ears, mouths)
        self._pids = pids
        self._digest, self._num_here = 0, 0

    def number(self) -> int:
        """For the next thing that ranks do together: the same on all that have come by the same path."""
        digest = self._channel.log.digest
        self._num_here = self._num_here + 1 if digest == self._digest else 0
        self._digest = digest
        # What was told on a path that ranks have left is never taken for this.
        return (digest + self._num_here * _MIX) & _MASK

    def read(self, peer: int, here: Tensor, there: Tensor) -> int:
        """Copies the stretches of a peer's memory ``there`` to those ``here``; the number of bytes copied."""
        return _read(self._pids[peer], here, there)


def find_process_vm_peers(group: dist.ProcessGroup, channel: Channel) -> ProcessVMPeers | None:
    """The ranks of a group if every one can read every other's memory, else None. Called by all ranks."""
    rank, world = group.rank(), group.size()
    magic = ctypes.create_string_buffer(secrets.token_bytes(_MAGIC_BYTES), _MAGIC_BYTES)
    pipes = _open_pipes([peer for peer in range(world) if peer != rank])
    ends = [pipes[peer][1] if peer in pipes else -1 for peer in range(world)]
    own = _CARD.pack(os.getpid(), ctypes.addressof(magic), magic.raw) + struct.pack(f"<{world}q", *ends)
    pids, mouths = [], {}
    all_read = len(pipes) == world - 1
    for peer, card in enumerate(_all_gather(own, group)):
        pid, address, theirs = _CARD.unpack_from(card)
        pids.append(pid)
        # Ranks in another PID namespace have ids that mean some other process here: only the magic tells.
        all_read = all_read and _peek(pid, address) == theirs
        if all_read and peer != rank:
            end = struct.unpack_from(f"<{world}q", card, _CARD.size)[rank]
            try:
                mouths[peer] = os.open(f"/proc/{pid}/fd/{end}", os.O_WRONLY | os.O_CLOEXEC)
            except OSError as error:
                if end >= 0:
                    _LOGGER.warning(
                        "ranks send what they could read: rank %d cannot be told: %s", peer, error
                    )
                all_read = False
    # All ranks have tried before any of them lets go of its magic, and of the ends that are theirs no more.
    agreed = all(answer == b"\1" for answer in _all_gather(bytes([all_read]), group))
    close([end for _, end in pipes.values()])
    ears = {peer: ear for peer, (ear, _) in pipes.items()}
    if agreed:
        return ProcessVMPeers(channel, pids, ears, mouths)
    close([*ears.values(), *mouths.values()])
    return None


def _open_pipes(peers: Sequence[int]) -> dict[int, tuple[int, int]]:
    """A pipe from each peer; none at all if there are no descriptors left for them, which the others are told of."""
    pipes: dict[int, tuple[int, int]] = {}
    try:
        for peer in peers:
            pipes[peer] = os.pipe()
    except OSError as error:
        _LOGGER.warning("ranks send what they could read: no pipe can be opened: %s", error)
        close([end for ends in pipes.values() for end in ends])
        return {}
    return pipes


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
    """A table of (address, length) rows is what the kernel takes, as it lies in memory."""
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
