"""Plays a tape through the caching allocator: the peak of memory, what holds it, and where in the step it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise import trace
from shardwise.forecast.allocator import CachingAllocator
from shardwise.forecast.tape import WORKSPACES, Allocate, Entry, Free, Mark, Op

FRAGMENTATION = "fragmentation"


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a step something is: the phase, the unit that runs or "" for the root, and the call of torch."""

    phase: str
    unit: str
    call: str

    def __str__(self) -> str:
        where = f"in {self.unit}" if self.unit else "outside of the blocks"
        return f"{self.phase}, {where}, at {self.call}" if self.call else f"{self.phase}, {where}"


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Bytes of one rank's device in torch's allocator.

    ``by_kind`` adds up to ``allocated``; ``by_phase`` has the most allocated in each phase of the step.
    """

    allocated: int
    reserved: int
    by_kind: dict[str, int]
    place: Place
    idle: int
    by_phase: dict[str, int]
    # When the device's memory ran out, and cached segments had to be returned to it.
    num_retries: int = 0

    @property
    def fragmentation(self) -> int:
        """What is reserved beyond the most that is allocated."""
        return self.reserved - self.allocated


def play_memory(tape: Sequence[Entry], workspaces: Sequence[int], limit: int | None = None) -> MemoryForecast:
    """Returns the peak over all steps of a tape; ``workspaces`` are allocated first and stay."""
    allocator = CachingAllocator(limit)
    held: Counter[str] = Counter()
    for num_bytes in workspaces:
        held[WORKSPACES] += allocator.allocate(num_bytes, "compute").size
    blocks = {}
    place = Place("set-up", "", "")
    phase, unit, idle = "set-up", "", 0
    most, at_peak, where = 0, Counter[str](), place
    by_phase: Counter[str] = Counter()
    # An op's call follows the memory it allocates on the tape.
    awaits_call = False
    for entry in tape:
        kind = type(entry)
        if kind is Allocate:
            block = allocator.allocate(entry.num_bytes, entry.stream)
            blocks[entry.key] = block, entry.what
            held[entry.what] += block.size
            by_phase[phase] = max(by_phase[phase], allocator.allocated)
            if allocator.allocated > most:
                most, at_peak = allocator.allocated, held.copy()
                where, awaits_call = Place(phase, unit, entry.what), True
        elif kind is Free:
            block, what = blocks.pop(entry.key)
            held[what] -= block.size
            allocator.free(block)
        elif kind is Op:
            if awaits_call and entry.kind != "view":
                where, awaits_call = Place(where.phase, where.unit, entry.name), False
            if entry.workspace:
                block = allocator.allocate(entry.workspace, entry.stream)
                held[WORKSPACES] += block.size
                if allocator.allocated > most:
                    most, at_peak, where = allocator.allocated, held.copy(), Place(phase, unit, entry.name)
                held[WORKSPACES] -= block.size
                allocator.free(block)
        elif kind is Mark:
            phase, unit, idle = _next_place(entry, phase, unit, idle, allocator.allocated)
            by_phase[phase] = max(by_phase[phase], allocator.allocated)
    return MemoryForecast(
        most,
        allocator.most_reserved,
        {kind: num_bytes for kind, num_bytes in at_peak.items() if num_bytes},
        where,
        idle,
        dict(by_phase),
        allocator.num_retries,
    )


def _next_place(mark: Mark, phase: str, unit: str, idle: int, allocated: int) -> tuple[str, str, int]:
    if mark.kind == "phase":
        return mark.phase, "", allocated if mark.phase == "forward" else idle
    if mark.kind in (trace.PRE_FORWARD, trace.PRE_BACKWARD):
        return phase, mark.unit, idle
    if mark.kind in (trace.POST_FORWARD, trace.POST_BACKWARD):
        return phase, "", idle
    return phase, unit, idle
