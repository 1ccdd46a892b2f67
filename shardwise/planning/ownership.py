"""ZeRO's ownership: which rank steps which piece of which parameter, and where pieces lie in one shared buffer.

Two ways to distribute parameters:

    whole   largest first, each to the rank that owns least; no parameter is cut

            rank 0  [ embedding                       ]
            rank 1  [ w1      ][ w2      ][ b1 ][ b2 ]

    even    end to end, cut into equal spans; at most world - 1 parameters are cut, and no small ones

            |------ rank 0 ------|------ rank 1 ------|
            [ embedding                       ][w1 ][w2]

Parameters are given by index; sizes are in elements or bytes, as the names say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.planning.layout import ALIGNMENT_BYTES, Span, aligned, ceil_div

# Vectorized kernels process up to 128 bytes at a time, and the remainder one by one. Every rank's span starts at a
# multiple of that, and so does every parameter that may be cut: its pieces are then stepped by the same instructions
# as the uncut parameter.
_STEP_BYTES = 128
_LARGE_BYTES = 16 * 1024
# A parameter smaller than a span by this factor is never cut: it starts the next span instead.
_UNCUT_FACTOR = 256


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
class ParamSize:
    """How much memory a parameter takes."""

    numel: int
    itemsize: int

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class BufferLayout:
    """Where parameters lie in one buffer, and which span of it each rank owns; all in bytes."""

    starts: tuple[int, ...]
    spans: tuple[Span, ...]

    @property
    def total_bytes(self) -> int:
        return self.spans[-1].stop

    @property
    def is_even(self) -> bool:
        """Whether the ranks' spans are equal and cover the buffer without gaps."""
        size = self.spans[0].stop
        return all(span == Span(rank * size, (rank + 1) * size) for rank, span in enumerate(self.spans))


def whole_pieces(numels: Sequence[int], loads: Sequence[int]) -> list[OwnedPiece]:
    """Assigns whole parameters, largest first, each to the rank that owns least.

    Args:
        numels: the sizes of the parameters, in elements.
        loads: how many elements each rank owns already.

    Returns:
        One piece per parameter, in the order of ``numels``. The lowest of equally loaded ranks is taken, and the first
        of equally large parameters, so every rank computes the same assignment.
    """
    running = list(loads)
    owners = [0] * len(numels)
    for param in sorted(range(len(numels)), key=lambda param: -numels[param]):
        owner = running.index(min(running))
        owners[param] = owner
        running[owner] += numels[param]
    return [OwnedPiece(param, 0, numel, owners[param]) for param, numel in enumerate(numels)]


def loads_of(pieces: Sequence[OwnedPiece], world: int) -> list[int]:
    """How many elements each rank owns."""
    loads = [0] * world
    for piece in pieces:
        loads[piece.owner] += piece.numel
    return loads


def owned_layout(sizes: Sequence[ParamSize], pieces: Sequence[OwnedPiece], world: int) -> BufferLayout:
    """Places the pieces of each owner next to each other; a rank's span is as large as what it owns.

    Args:
        sizes: the sizes of the parameters.
        pieces: all pieces, in the order of the parameters. A parameter that is cut lies across its owners' spans.
        world: how many ranks.
    """
    starts = [0] * len(sizes)
    spans = []
    end = 0
    for rank in range(world):
        owned = [piece for piece in pieces if piece.owner == rank]
        begins_inside_param = bool(owned) and owned[0].start > 0
        begin = end = end if begins_inside_param else aligned(end, _STEP_BYTES)
        for piece in owned:
            size = sizes[piece.param]
            if piece.start == 0:
                starts[piece.param] = aligned(end, _alignment(size))
            end = starts[piece.param] + piece.stop * size.itemsize
        spans.append(Span(begin, end))
    return BufferLayout(tuple(starts), tuple(spans))


def even_pieces(sizes: Sequence[ParamSize], world: int) -> tuple[list[OwnedPiece], BufferLayout]:
    """Places parameters end to end and cuts them into equal spans, one per rank."""
    span_bytes = _even_span_bytes(sizes, world)
    starts = []
    end = 0
    for size in sizes:
        start = aligned(end, _alignment(size))
        crosses = size.numel > 0 and start // span_bytes != (start + size.bytes - 1) // span_bytes
        if crosses and size.bytes * _UNCUT_FACTOR < span_bytes:
            start = aligned(start, span_bytes)
        starts.append(start)
        end = start + size.bytes
    spans = tuple(Span(rank * span_bytes, (rank + 1) * span_bytes) for rank in range(world))
    pieces = [
        piece
        for param, (start, size) in enumerate(zip(starts, sizes, strict=True))
        for piece in _cut(param, start, size, span_bytes, world)
    ]
    return pieces, BufferLayout(tuple(starts), spans)


def _even_span_bytes(sizes: Sequence[ParamSize], world: int) -> int:
    """The smallest equal span that holds everything, allowing for a gap at the end of each."""
    total = sum(size.bytes + _alignment(size) - 1 for size in sizes)
    with_gaps = ceil_div(total * _UNCUT_FACTOR, world * _UNCUT_FACTOR - (world - 1))
    return aligned(max(with_gaps, 1), _STEP_BYTES)


def _cut(param: int, start: int, size: ParamSize, span_bytes: int, world: int) -> list[OwnedPiece]:
    """Cuts a parameter that begins at byte ``start`` where spans meet."""
    if size.numel == 0:
        return [OwnedPiece(param, 0, 0, min(start // span_bytes, world - 1))]
    first = start // span_bytes
    last = (start + size.bytes - 1) // span_bytes
    # No element is cut in two: spans meet at multiples of _STEP_BYTES, parameters start at multiples of their own
    # itemsize, and the one divides the other.
    cuts = [(span * span_bytes - start) // size.itemsize for span in range(first + 1, last + 1)]
    bounds = [0, *cuts, size.numel]
    return [OwnedPiece(param, bounds[i], bounds[i + 1], first + i) for i in range(len(bounds) - 1)]


def _alignment(size: ParamSize) -> int:
    return _STEP_BYTES if size.bytes >= _LARGE_BYTES else ALIGNMENT_BYTES
