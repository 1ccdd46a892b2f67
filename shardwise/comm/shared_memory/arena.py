"""The arena: shared memory that this process lends to others of its host, to be read in place.

    arena   | slot | slot | slot | ...        | row of a gather | rows of a reduce |     a file that all of them map
              number, start, size, a flag for each reader

A loan has a unique number and occupies a slot, which says where it is. Whoever has read it stores the number in its
flag there; once all have, memory and slot are free again. Slots are used for nothing else and no number is used twice,
so no leftover in memory can be mistaken for a flag. The arena is as large as the machine's memory, but only pages that
were lent are allocated. It outlives its process while somebody maps it: a rank may end before others have read from it.

On x86-64, a reader's loads of the data are visible before its store of the flag without a fence. Other architectures do
not guarantee that, and nothing is lent there.
"""

from __future__ import annotations

import ctypes
import os
import platform
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import PeerFailure

MAGIC_BYTES = 16
_NAME = "shardwise arena"
_ALIGNMENT = 64
_ADDRESSES = 1 << 45
# More than the announcements of unread loans that fit into a pipe.
_NUM_SLOTS = 1 << 16
# The fields at the start of a slot; then come the flags.
_NUMBER, _START, _SIZE, _FLAGS = range(4)


def is_possible() -> bool:
    """Returns whether this machine orders loads and stores as the flags require."""
    return platform.machine().lower() in ("x86_64", "amd64")


class Loan:
    """A range of the arena that others may read once its slot has been announced to them."""

    __slots__ = ("end", "entry", "is_sent", "number", "payload", "slot", "start")

    def __init__(self, slot: int, entry: Any, number: int, payload: Tensor, start: int) -> None:
        self.slot, self.entry, self.number = slot, entry, number
        # Until then it is being written.
        self.is_sent = False
        self.payload, self.start = payload, start
        self.end = start + _aligned(payload.numel())
        entry[_START], entry[_SIZE], entry[_NUMBER] = start, payload.numel(), number

    def is_over(self, readers: Sequence[int]) -> bool:
        entry, number = self.entry, self.number
        return self.is_sent and all(entry[_FLAGS + reader] == number for reader in readers)


class Arena:
    """What this rank lends to ``world`` ranks, which map it to read it."""

    def __init__(self, world: int) -> None:
        self.num_bytes = _arena_bytes(world)
        self.descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self._begin = _payloads_begin(world)
        try:
            # Pages are allocated when they are first written to.
            os.ftruncate(self.descriptor, self.num_bytes)
            self.memory = map_arena(os.getpid(), self.descriptor, self.num_bytes)
        except BaseException:
            self.close()
            raise
        self.magic = secrets.token_bytes(MAGIC_BYTES)
        self.memory[:MAGIC_BYTES] = torch.frombuffer(bytearray(self.magic), dtype=torch.uint8)
        self._entries = _Entries(self.memory, world)
        self._free_slots: list[int] = []
        self._loans: list[Loan] = []
        self._num_lent = 0

    def close(self) -> None:
        """Lets nobody else map it; existing maps stay."""
        os.close(self.descriptor)

    def lend(self, num_bytes: int, readers: Sequence[int]) -> Loan:
        """Lends the first gap between loans that ``readers`` have not all read."""
        loans = []
        for loan in self._loans:
            if loan.is_over(readers):
                self._free_slots.append(loan.slot)
            else:
                loans.append(loan)
        self._loans = loans
        needed = _aligned(num_bytes)
        start, place = self._begin, 0
        for place, next_loan in enumerate([*loans, None]):  # noqa: B007
            if next_loan is None or next_loan.start - start >= needed:
                break
            start = next_loan.end
        if start + needed > self.num_bytes or len(loans) == _NUM_SLOTS:
            raise MemoryError(
                f"cannot lend {num_bytes} bytes to other ranks: {start} of {self.num_bytes} bytes are in use"
            )
        # With no slot to reuse, all slots that were ever used are taken.
        slot = self._free_slots.pop() if self._free_slots else len(loans)
        self._num_lent += 1
        payload = self.memory[start : start + num_bytes]
        made = Loan(slot, self._entries[slot], self._num_lent, payload, start)
        loans.insert(place, made)
        return made


class Lent:
    """A loan as one of its readers sees it."""

    __slots__ = ("_entry", "_flag", "_memory", "_number", "_size", "_start")

    def __init__(self, memory: Tensor, entry: Any, flag: int) -> None:
        self._memory, self._entry, self._flag = memory, entry, flag
        # The owner does not change the slot until this reader has set its flag.
        self._number, self._start, self._size = entry[:_FLAGS]

    def payload(self, offset: int, num_bytes: int) -> Tensor:
        """Returns part of the loan."""
        if offset + num_bytes > self._size:
            raise PeerFailure(
                f"bytes {offset} to {offset + num_bytes} of a loan of {self._size} bytes cannot be read",
                fix="run the same version of shardwise on every rank",
            )
        begin = self._start + offset
        return self._memory[begin : begin + num_bytes]

    def mark_read(self) -> None:
        """Tells the owner that this reader has finished."""
        self._entry[self._flag] = self._number


class Borrower:
    """One rank's view of an arena, its own or a peer's."""

    def __init__(self, memory: Tensor, world: int, reader: int) -> None:
        self.memory = memory
        self._flag = _FLAGS + reader
        self._begin = _payloads_begin(world)
        self._end = memory.numel()
        self._entries = _Entries(memory, world)

    def find(self, slot: int) -> Lent:
        """Returns the loan in a slot that its owner has announced.

        Raises:
            PeerFailure: there is no such slot, or no valid loan in it.
        """
        if not 0 <= slot < _NUM_SLOTS:
            raise _impossible_loan(f"slot {slot} of an arena that has {_NUM_SLOTS}")
        lent = Lent(self.memory, self._entries[slot], self._flag)
        if lent._number <= 0 or lent._size < 0 or not self._begin <= lent._start <= self._end - lent._size:
            raise _impossible_loan(
                f"{lent._size} bytes from byte {lent._start} on of an arena of {self._end}, in slot {slot}"
            )
        return lent


def _impossible_loan(loan: str) -> PeerFailure:
    return PeerFailure(
        f"another rank announced a loan that cannot exist: {loan}",
        fix="run the same version of shardwise on every rank; if it does, report this",
    )


class _Entries(dict[int, Any]):
    """The slots of an arena as arrays of integers, created on first use."""

    def __init__(self, memory: Tensor, world: int) -> None:
        super().__init__()
        self._memory = memory  # alive: the arrays are in it
        self._first = memory.data_ptr() + _ALIGNMENT
        self._stride = _slot_bytes(world)
        self._numbers = ctypes.c_int64 * (_FLAGS + world)

    def __missing__(self, slot: int) -> Any:
        entry = self[slot] = self._numbers.from_address(self._first + slot * self._stride)
        return entry


def map_arena(pid: int, descriptor: int, num_bytes: int) -> Tensor:
    """Returns the bytes of a process's arena, mapped here.

    Raises:
        OSError, RuntimeError: it does not exist, has another size, or must not be read by this process.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    if _NAME not in os.readlink(path) or os.stat(path).st_size != num_bytes:
        raise FileNotFoundError(f"{path} is no arena of {num_bytes} bytes")
    with torch.inference_mode(False):
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _slot_bytes(world: int) -> int:
    return _aligned(8 * (_FLAGS + world))


def _payloads_begin(world: int) -> int:
    return _ALIGNMENT + _NUM_SLOTS * _slot_bytes(world)


def _arena_bytes(world: int) -> int:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Every rank maps all arenas of its host. Slots come on top of the memory to lend.
    return min(memory_bytes, _ADDRESSES // world) // _ALIGNMENT * _ALIGNMENT + _payloads_begin(world)
