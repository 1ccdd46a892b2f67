"""Processes of one host that read each other's memory, and tell each other when.

The kernel copies from a peer's address space into ours in one go (``process_vm_readv``), where loopback sockets take
two copies and a protocol. What is left to say, a few bytes, goes through pipes: whoever listens sleeps until it is
there, or until the watch ends the wait. (A message of gloo's passes a thread of its own on either side, which spins
while the connection is in use.)

    rank 0   pipe 0→1 ──▶ rank 1        opened through /proc, so the ranks need no common parent
    rank 0 ◀── pipe 1→0   rank 1

It takes processes that may read each other: one host, one user, and no rule against it. That is tried out, once, on
all ranks; if it fails on any of them, nobody does it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import struct
import weakref
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.wire import WatchedWire, Wire

__all__ = ["Neighbours", "find_neighbours"]

_MAGIC_BYTES = 16
_CARD = struct.Struct(f"<qq{_MAGIC_BYTES}s")
_MESSAGE = struct.Struct("<qqq")
_MASK = (1 << 61) - 1
_MIX = 0x2545F4914F6CDD1D & _MASK
# How often whoever listens looks whether the watch has ended the wait.
_LOOK_SECONDS = 0.1

Key = tuple[int, int]


class Neighbours:
    """The ranks of a group on one host, as one of them sees the others."""

    def __init__(
        self, wire: Wire, pids: Sequence[int], ears: Mapping[int, int], mouths: Mapping[int, int]
    ) -> None:
        self._wire, self._pids = wire, pids
        self._ears, self._mouths = ears, mouths
        self._heard: dict[int, dict[Key, int]] = {peer: {} for peer in ears}
        self._digest, self._num_here = 0, 0
        weakref.finalize(self, _close, [*ears.values(), *mouths.values()])

    def number(self) -> int:
        """For the next thing that ranks do together: the same on all that have come by the same path."""
        digest = self._wire.path.digest
        self._num_here = self._num_here + 1 if digest == self._digest else 0
        self._digest = digest
        # What was told on a path that ranks have left is never taken for this.
        return (digest + self._num_here * _MIX) & _MASK

    def read(self, peer: int, here: Tensor, there: Tensor) -> int:
        """Copies the stretches of a peer's memory ``there`` to those ``here``; the number of bytes copied."""
        return _read(self._pids[peer], here, there)

    def tell(self, peer: int, key: Key, value: int = 0) -> None:
        """Sends a number under a key; it waits at the peer until that asks for it."""
        try:
            os.write(self._mouths[peer], _MESSAGE.pack(*key, value))
        except OSError:
            raise RuntimeError(f"rank {peer} of the group has ended") from None

    def hear(self, peer: int, key: Key) -> int:
        """Waits for what a peer tells under a key.

        Raises:
            RuntimeError: it has ended, or a verdict has ended the wait.
        """
        heard = self._heard[peer]
        while key not in heard:
            *told, value = _MESSAGE.unpack(self._receive(peer))
            heard[told[0], told[1]] = value
        return heard.pop(key)

    def _receive(self, peer: int) -> bytes:
        ear, message = self._ears[peer], b""
        # Not select(): its descriptors end at 1023.
        listening = select.poll()
        listening.register(ear, select.POLLIN)
        while len(message) < _MESSAGE.size:
            if listening.poll(_LOOK_SECONDS * 1000):
                more = os.read(ear, _MESSAGE.size - len(message))
                if not more:
                    raise RuntimeError(f"rank {peer} of the group has ended")
                message += more
            elif isinstance(self._wire, WatchedWire) and self._wire.verdict is not None:
                raise RuntimeError(f"rank {peer} of the group does not come")
        return message


def find_neighbours(group: dist.ProcessGroup, wire: Wire) -> Neighbours | None:
    """The ranks of a group if every one can read every other's memory, else None. Called by all ranks."""
    rank, world = group.rank(), group.size()
    magic = ctypes.create_string_buffer(secrets.token_bytes(_MAGIC_BYTES), _MAGIC_BYTES)
    pipes = {peer: os.pipe() for peer in range(world) if peer != rank}
    ends = [pipes[peer][1] if peer != rank else -1 for peer in range(world)]
    own = _CARD.pack(os.getpid(), ctypes.addressof(magic), magic.raw) + struct.pack(f"<{world}q", *ends)
    pids, mouths = [], {}
    all_read = True
    for peer, card in enumerate(_all_gather(own, group)):
        pid, address, theirs = _CARD.unpack_from(card)
        pids.append(pid)
        # Ranks in another PID namespace have ids that mean some other process here: only the magic tells.
        all_read = all_read and _peek(pid, address) == theirs
        if all_read and peer != rank:
            end = struct.unpack_from(f"<{world}q", card, _CARD.size)[rank]
            try:
                mouths[peer] = os.open(f"/proc/{pid}/fd/{end}", os.O_WRONLY | os.O_CLOEXEC)
            except OSError:
                all_read = False
    # All ranks have tried before any of them lets go of its magic, and of the ends that are theirs no more.
    agreed = all(answer == b"\1" for answer in _all_gather(bytes([all_read]), group))
    _close([end for _, end in pipes.values()])
    ears = {peer: ear for peer, (ear, _) in pipes.items()}
    if agreed:
        return Neighbours(wire, pids, ears, mouths)
    _close([*ears.values(), *mouths.values()])
    return None


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


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
