"""Who owns which part of which parameter, and where the parts lie when all of them share one buffer.

Two ways to share parameters out:

    whole   largest first, each to the rank with the least so far; no parameter is ever cut

            rank 0  [ embedding                       ]
            rank 1  [ w1      ][ w2      ][ b1 ][ b2 ]

    even    end to end, cut into equal sections; at most world - 1 parameters are cut, and no small ones

            |------ rank 0 ------|------ rank 1 ------|
            [ embedding                       ][w1 ][w2]

Integers in, integers out: parameters are numbers, sizes are counted in elements or bytes as the names say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.plan.layout import ALIGNMENT_BYTES, Span, aligned, ceil_div

__all__ = ["BufferLayout", "Extent", "OwnedPiece", "even_pieces", "loads_of", "owned_layout", "whole_pieces"]

# Kernels take memory in steps of up to 128 bytes, and finish what is left over one by one. Every section starts on such
# a step, and so does every parameter that may be cut: it is then stepped by the same instructions as if it were whole.
_STEP_BYTES = 128
_LARGE_BYTES = 16 * 1024
# What is smaller than this part of a section is never cut: it starts the next section instead.
_UNCUT_PART = 256


class OwnedPiece(NamedTuple):
    """Elements ``start <= i < stop`` of a parameter, in memory order, and the rank that steps them."""

    param: int
    start: int
    stop: int
    owner: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Extent:
    """How much memory a parameter takes."""

    numel: int
    itemsize: int

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class BufferLayout:
    """Where parameters lie in one buffer, and which section of it each rank owns; all in bytes."""

    starts: tuple[int, ...]
    sections: tuple[Span, ...]

    @property
    def total_bytes(self) -> int:
        return self.sections[-1].stop

    @property
    def is_even(self) -> bool:
        """Whether the sections are equal and leave no gaps, so that the buffer is made of nothing else."""
        size = self.sections[0].stop
        return all(
            section == Span(rank * size, (rank + 1) * size) for rank, section in enumerate(self.sections)
        )


def whole_pieces(numels: Sequence[int], loads: Sequence[int]) -> list[OwnedPiece]:
    """Every parameter whole, largest first, each to the rank with the least so far.

    Args:
        numels: the parameters, in elements.
        loads: elements that each rank owns already; one entry a rank.

    Returns:
        One piece a parameter, in the order of ``numels``. Of equal loads the lowest rank is taken, of equal sizes
        the earlier parameter goes first, so every rank comes to the same answer.
    """
    running = list(loads)
    owners = [0] * len(numels)
    for param in sorted(range(len(numels)), key=lambda param: -numels[param]):
        owner = running.index(min(running))
        owners[param] = owner
        running[owner] += numels[param]
    return [OwnedPiece(param, 0, numel, owners[param]) for param, numel in enumerate(numels)]


def loads_of(pieces: Sequence[OwnedPiece], world: int) -> list[int]:
    """Elements a rank, over all its pieces."""
    loads = [0] * world
    for piece in pieces:
        loads[piece.owner] += piece.numel
    return loads


def owned_layout(extents: Sequence[Extent], pieces: Sequence[OwnedPiece], world: int) -> BufferLayout:
    """Pieces side by side with those of the same owner; sections are as large as what is owned.

    Args:
        extents: the parameters.
        pieces: all of them, in the order of the parameters. One that is cut lies across the sections of its owners.
        world: how many ranks.
    """
    starts = [0] * len(extents)
    sections = []
    end = 0
    for rank in range(world):
        owned = [piece for piece in pieces if piece.owner == rank]
        goes_on = bool(owned) and owned[0].start > 0
        begin = end = end if goes_on else aligned(end, _STEP_BYTES)
        for piece in owned:
            extent = extents[piece.param]
            if piece.start == 0:
                starts[piece.param] = aligned(end, _alignment(extent))
            end = starts[piece.param] + piece.stop * extent.itemsize
        sections.append(Span(begin, end))
    return BufferLayout(tuple(starts), tuple(sections))


def even_pieces(extents: Sequence[Extent], world: int) -> tuple[list[OwnedPiece], BufferLayout]:
    """Parameters end to end, cut into equal sections: rank r owns what lies in section r."""
    section_bytes = _section_bytes(extents, world)
    starts = []
    end = 0
    for extent in extents:
        start = aligned(end, _alignment(extent))
        crosses = extent.numel > 0 and start // section_bytes != (start + extent.bytes - 1) // section_bytes
        if crosses and extent.bytes * _UNCUT_PART < section_bytes:
            start = aligned(start, section_bytes)
        starts.append(start)
        end = start + extent.bytes
    sections = tuple(Span(rank * section_bytes, (rank + 1) * section_bytes) for rank in range(world))
    pieces = [
        piece
        for param, (start, extent) in enumerate(zip(starts, extents, strict=True))
        for piece in _cut(param, start, extent, section_bytes, world)
    ]
    return pieces, BufferLayout(tuple(starts), sections)


def _section_bytes(extents: Sequence[Extent], world: int) -> int:
    """The least that holds everything, although each section may end with a gap where the next did not fit."""
    total = sum(extent.bytes + _alignment(extent) - 1 for extent in extents)
    with_gaps = ceil_div(total * _UNCUT_PART, world * _UNCUT_PART - (world - 1))
    return aligned(max(with_gaps, 1), _STEP_BYTES)


def _cut(param: int, start: int, extent: Extent, section_bytes: int, world: int) -> list[OwnedPiece]:
    """A parameter that begins at byte ``start``, cut where sections meet."""
    if extent.numel == 0:
        return [OwnedPiece(param, 0, 0, min(start // section_bytes, world - 1))]
    first = start // section_bytes
    last = (start + extent.bytes - 1) // section_bytes
    # Sections meet on a step, and a parameter starts on a multiple of its own itemsize, which divides a step: so
    # no element is ever cut in two.
    cuts = [(section * section_bytes - start) // extent.itemsize for section in range(first + 1, last + 1)]
    bounds = [0, *cuts, extent.numel]
    return [OwnedPiece(param, bounds[i], bounds[i + 1], first + i) for i in range(len(bounds) - 1)]


def _alignment(extent: Extent) -> int:
    return _STEP_BYTES if extent.bytes >= _LARGE_BYTES else ALIGNMENT_BYTES
