"""Memory that this process lends to others of its host: they read it where it lies.

    arena   | flags | row of a gather | flags | rows of a reduce |        a file in memory that all of them map

A loan has a number and a flag for each reader. Who has read puts the number there; when all have, the place is lent
again. The arena is as large as the machine's memory and takes up only what was ever lent at once. It outlives its
process for as long as somebody maps it: a rank may end when others have yet to read from it.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

MAGIC_BYTES = 16
_NAME = "shardwise arena"
_ALIGNMENT = 64
_ADDRESSES = 1 << 45


class Loan:
    """A stretch of the arena that others may read, once they are told its ``start``."""

    def __init__(self, memory: Tensor, start: int, num_bytes: int, world: int, number: int) -> None:
        self.start = start
        self.number = number
        # Before that it is being written.
        self.is_sent = False
        self.payload = payload_at(memory, start, world, 0, num_bytes)
        self.end = start + _aligned(_flags_bytes(world) + num_bytes)
        self._flags = (ctypes.c_int64 * (world + 1)).from_address(memory.data_ptr() + start)
        self._flags[0] = number

    def is_over(self, readers: Sequence[int]) -> bool:
        flags, number = self._flags, self.number
        return self.is_sent and all(flags[1 + reader] == number for reader in readers)


class Arena:
    """What this rank lends to ``world`` ranks; those who read it map it too."""

    def __init__(self, world: int) -> None:
        self.num_bytes = _arena_bytes(world)
        self.descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self._world = world
        try:
            # No page of it is taken up before it is written to.
            os.ftruncate(self.descriptor, self.num_bytes)
            self.memory = map_arena(os.getpid(), self.descriptor, self.num_bytes)
        except BaseException:
            self.close()
            raise
        self.magic = secrets.token_bytes(MAGIC_BYTES)
        self.memory[:MAGIC_BYTES] = torch.frombuffer(bytearray(self.magic), dtype=torch.uint8)
        self._loans: list[Loan] = []
        self._num_lent = 0

    def close(self) -> None:
        """Lets nobody else map it; those who do keep it."""
        os.close(self.descriptor)

    def lend(self, num_bytes: int, readers: Sequence[int]) -> Loan:
        """A stretch in the first gap between loans that ``readers`` have not all read."""
        loans = [loan for loan in self._loans if not loan.is_over(readers)]
        needed = _aligned(_flags_bytes(self._world) + num_bytes)
        start, place = _ALIGNMENT, 0
        for place, loan in enumerate([*loans, None]):  # noqa: B007
            if loan is None or loan.start - start >= needed:
                break
            start = loan.end
        if start + needed > self.num_bytes:
            raise MemoryError(
                f"{num_bytes} bytes to lend to other ranks, beside {start} that are lent, are too many"
            )
        self._num_lent += 1
        made = Loan(self.memory, start, num_bytes, self._world, self._num_lent)
        loans.insert(place, made)
        self._loans = loans
        return made


def map_arena(pid: int, descriptor: int, num_bytes: int) -> Tensor:
    """The bytes of a process's arena, here.

    Raises:
        OSError, RuntimeError: there is none, or this process may not read it.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    if _NAME not in os.readlink(path):
        raise FileNotFoundError(f"{path} is no arena")
    with torch.inference_mode(False):
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def payload_at(memory: Tensor, start: int, world: int, offset: int, num_bytes: int) -> Tensor:
    """Part of what is lent at ``start``."""
    begin = start + _flags_bytes(world) + offset
    return memory[begin : begin + num_bytes]


def mark_read(memory: Tensor, start: int, reader: int) -> None:
    """Lets the owner know that this reader is through with what is lent at ``start``."""
    flags = memory.data_ptr() + start
    number = ctypes.c_int64.from_address(flags).value
    ctypes.c_int64.from_address(flags + 8 + 8 * reader).value = number


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _flags_bytes(world: int) -> int:
    return _aligned(8 + 8 * world)


def _arena_bytes(world: int) -> int:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Every rank maps all arenas of its host.
    return min(memory_bytes, _ADDRESSES // world) // _ALIGNMENT * _ALIGNMENT
