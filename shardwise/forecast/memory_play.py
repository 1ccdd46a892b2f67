"""Plays a tape through the caching allocator: the peak of memory, what holds it, and where in the step it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise import trace
from shardwise.forecast.allocator import Block, CachingAllocator
from shardwise.forecast.tape import COMPUTE, WORKSPACES, Allocate, Entry, Free, Mark, Op

__all__ = ["MemoryForecast", "Place", "play_memory"]


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

    ``by_kind`` adds up to ``allocated``; ``by_phase`` has the most allocated in each phase of the step; ``idle`` is
    what is allocated when the step begins.
    """

    allocated: int
    reserved: int
    by_kind: dict[str, int]
    place: Place
    idle: int
    by_phase: dict[str, int]
    # How often the device's memory ran out, and cached segments had to be returned to it.
    num_retries: int = 0

    @property
    def fragmentation(self) -> int:
        """What is reserved beyond the most that is allocated."""
        return self.reserved - self.allocated


def play_memory(tape: Sequence[Entry], workspaces: Sequence[int], limit: int | None = None) -> MemoryForecast:
    """Returns the peak over all steps of a tape; ``workspaces`` are allocated first and stay."""
    playing = _Playing(limit)
    for num_bytes in workspaces:
        playing.held[WORKSPACES] += playing.allocator.allocate(num_bytes, COMPUTE).size
    for entry in tape:
        if isinstance(entry, Allocate):
            playing.allocate(entry)
        elif isinstance(entry, Free):
            playing.free(entry)
        elif isinstance(entry, Op):
            playing.call(entry)
        elif isinstance(entry, Mark):
            playing.move_on(entry)
    allocator = playing.allocator
    return MemoryForecast(
        playing.most,
        allocator.most_reserved,
        {kind: num_bytes for kind, num_bytes in playing.at_peak.items() if num_bytes},
        playing.place,
        playing.idle,
        dict(playing.by_phase),
        allocator.num_retries,
    )


class _Playing:
    """The state of memory at one entry of the tape, and the peak so far."""

    def __init__(self, limit: int | None) -> None:
        self.allocator = CachingAllocator(limit)
        self.held: Counter[str] = Counter()
        self.by_phase: Counter[str] = Counter()
        self.most, self.idle = 0, 0
        self.at_peak: Counter[str] = Counter()
        self.place = Place("set-up", "", "")
        self._phase, self._unit = "set-up", ""
        self._blocks: dict[int, tuple[Block, str]] = {}
        # On a tape an op follows the memory that it allocates.
        self._awaits_call = False

    def allocate(self, entry: Allocate) -> None:
        block = self.allocator.allocate(entry.num_bytes, entry.stream)
        self._blocks[entry.key] = block, entry.what
        self.held[entry.what] += block.size
        self._look(entry.what)
        self._awaits_call |= self.most == self.allocator.allocated

    def free(self, entry: Free) -> None:
        block, what = self._blocks.pop(entry.key)
        self.held[what] -= block.size
        self.allocator.free(block)

    def call(self, op: Op) -> None:
        if self._awaits_call and op.kind != "view":
            self.place = Place(self.place.phase, self.place.unit, op.name)
            self._awaits_call = False
        temporary = [self.allocator.allocate(num_bytes, op.stream) for num_bytes in op.temporaries]
        if temporary:
            size = sum(block.size for block in temporary)
            self.held[WORKSPACES] += size
            self._look(op.name)
            self.held[WORKSPACES] -= size
        for block in temporary:
            self.allocator.free(block)

    def _look(self, call: str) -> None:
        allocated = self.allocator.allocated
        self.by_phase[self._phase] = max(self.by_phase[self._phase], allocated)
        if allocated > self.most:
            self.most, self.at_peak = allocated, self.held.copy()
            self.place = Place(self._phase, self._unit, call)

    def move_on(self, mark: Mark) -> None:
        if mark.kind == "phase":
            self._phase, self._unit = mark.phase, ""
            if mark.phase == "forward":
                self.idle = self.allocator.allocated
            self.by_phase[mark.phase] = max(self.by_phase[mark.phase], self.allocator.allocated)
        elif mark.kind in (trace.PRE_FORWARD, trace.PRE_BACKWARD):
            self._unit = mark.unit
        elif mark.kind in (trace.POST_FORWARD, trace.POST_BACKWARD):
            self._unit = ""
