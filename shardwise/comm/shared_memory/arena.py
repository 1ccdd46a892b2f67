"""Memory that this process lends to others of its host: they read it where it lies.

    arena   | slot | slot | slot | ...        | row of a gather | rows of a reduce |     a file that all of them map
              number, start, size, a flag for each reader

A loan has a number of its own and takes a slot, which says where it lies. Who has read it puts the number into its flag
there; when all have, the place and the slot are lent again. Slots are never used for anything else, and no number comes
twice, so nothing that is left over in memory can be taken for a flag. The arena is as large as the machine's memory and
takes up only what was ever lent at once. It outlives its process for as long as somebody maps it: a rank may end when
others have yet to read from it.

A reader's loads of the data come before its store of the flag, for all to see, on x86-64 without further ado. On other
machines they may not, and nothing is lent.
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
# More than a pipe has room for words of loans that nobody has read.
_NUM_SLOTS = 1 << 16
# What a slot begins with; then come the flags.
_NUMBER, _START, _SIZE, _FLAGS = range(4)


def is_possible() -> bool:
    """Whether this machine keeps loads and stores in the order that flags rely on."""
    return platform.machine().lower() in ("x86_64", "amd64")


class Loan:
    """A stretch of the arena that others may read, once they are told its slot."""

    __slots__ = ("end", "entry", "is_sent", "number", "payload", "slot", "start")

    def __init__(self, slot: int, entry: Any, number: int, payload: Tensor, start: int) -> None:
        self.slot, self.entry, self.number = slot, entry, number
        # Before that it is being written.
        self.is_sent = False
        self.payload, self.start = payload, start
        self.end = start + _aligned(payload.numel())
        entry[_START], entry[_SIZE], entry[_NUMBER] = start, payload.numel(), number

    def is_over(self, readers: Sequence[int]) -> bool:
        entry, number = self.entry, self.number
        return self.is_sent and all(entry[_FLAGS + reader] == number for reader in readers)


class Arena:
    """What this rank lends to ``world`` ranks; those who read it map it too."""

    def __init__(self, world: int) -> None:
        self.num_bytes = _arena_bytes(world)
        self.descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self._begin = _payloads_begin(world)
        try:
            # No page of it is taken up before it is written to.
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
        """Lets nobody else map it; those who do keep it."""
        os.close(self.descriptor)

    def lend(self, num_bytes: int, readers: Sequence[int]) -> Loan:
        """A stretch in the first gap between loans that ``readers`` have not all read."""
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
                f"{num_bytes} bytes to lend to other ranks, beside {start} that are lent in {len(loans)} pieces, "
                "are too many"
            )
        # Where none is free again, all that were ever used are taken.
        slot = self._free_slots.pop() if self._free_slots else len(loans)
        self._num_lent += 1
        payload = self.memory[start : start + num_bytes]
        made = Loan(slot, self._entries[slot], self._num_lent, payload, start)
        loans.insert(place, made)
        return made


class Lent:
    """A loan as one of its readers finds it."""

    __slots__ = ("_entry", "_flag", "_memory", "_number", "_size", "_start")

    def __init__(self, memory: Tensor, entry: Any, flag: int) -> None:
        self._memory, self._entry, self._flag = memory, entry, flag
        # The owner leaves the slot as it is until this reader has set its flag.
        self._number, self._start, self._size = entry[:_FLAGS]

    def payload(self, offset: int, num_bytes: int) -> Tensor:
        """Part of what is lent."""
        if offset + num_bytes > self._size:
            raise PeerFailure(
                f"{num_bytes} bytes from byte {offset} on are to be read of a loan of {self._size} bytes",
                fix="run the same version of shardwise on every rank",
            )
        begin = self._start + offset
        return self._memory[begin : begin + num_bytes]

    def mark_read(self) -> None:
        """Lets the owner know that this reader is through with it."""
        self._entry[self._flag] = self._number


class Borrower:
    """One rank's view of an arena, its own or that of a peer."""

    def __init__(self, memory: Tensor, world: int, reader: int) -> None:
        self.memory = memory
        self._flag = _FLAGS + reader
        self._begin = _payloads_begin(world)
        self._end = memory.numel()
        self._entries = _Entries(memory, world)

    def find(self, slot: int) -> Lent:
        """What is lent in a slot, of which the owner has told.

        Raises:
            PeerFailure: there is no such slot, or nothing is lent there that lies in the arena.
        """
        if not 0 <= slot < _NUM_SLOTS:
            raise _astray(f"slot {slot} of an arena that has {_NUM_SLOTS}")
        lent = Lent(self.memory, self._entries[slot], self._flag)
        if lent._number <= 0 or lent._size < 0 or not self._begin <= lent._start <= self._end - lent._size:
            raise _astray(
                f"{lent._size} bytes from byte {lent._start} on of an arena of {self._end}, in slot {slot}"
            )
        return lent


def _astray(told: str) -> PeerFailure:
    return PeerFailure(
        f"another rank tells this one to read what it cannot have lent: {told}",
        fix="run the same version of shardwise on every rank; if it does, report this",
    )


class _Entries(dict[int, Any]):
    """The slots of an arena as arrays of numbers, each made when it is first used."""

    def __init__(self, memory: Tensor, world: int) -> None:
        super().__init__()
        self._memory = memory  # alive: the arrays lie in it
        self._first = memory.data_ptr() + _ALIGNMENT
        self._stride = _slot_bytes(world)
        self._numbers = ctypes.c_int64 * (_FLAGS + world)

    def __missing__(self, slot: int) -> Any:
        entry = self[slot] = self._numbers.from_address(self._first + slot * self._stride)
        return entry


def map_arena(pid: int, descriptor: int, num_bytes: int) -> Tensor:
    """The bytes of a process's arena, here.

    Raises:
        OSError, RuntimeError: there is none of that size, or this process may not read it.
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
    # Every rank maps all arenas of its host. Slots come on top of what may be lent.
    return min(memory_bytes, _ADDRESSES // world) // _ALIGNMENT * _ALIGNMENT + _payloads_begin(world)
