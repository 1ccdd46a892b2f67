"""The ``rows`` layout: every parameter is cut along one dim, and a unit's parts travel together.

Take a unit of two parameters, A (5 rows) and B (4 rows), over 2 ranks. A rank's *row* holds its part of each,
padded at its end to the same length everywhere, so that one plain collective can carry the whole unit:

    rank 0   | A0 A1 A2 | B0 B1 |
    rank 1   | A3 A4 .. | B2 B3 |        '..' is padding, always zero

    full     | A0 A1 A2 A3 A4 |  | B0 B1 B2 B3 |      each parameter contiguous again

Parameters of the same kind (dtype) stand together in a *segment*: one cast serves a segment. Within it those of one
size stand together, so that one strided copy serves them all. Starts are aligned, so that every part can be used as a
tensor of its own. A row exists in two measures: *stored* (the dtype the optimizer sees) and *sent* (the dtype that goes
over the wire); element offsets within a segment are the same in both. The pieces below say which strided block of a
full parameter is which strided block of the packed rows; they serve the copy-out after a gather and the pack before a
reduce alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwise.plan.layout import (
    ALIGNMENT_BYTES,
    SHARD_ALIGNMENT_BYTES,
    Pad,
    Piece,
    RowParam,
    Section,
    Segment,
    Share,
)
from shardwise.plan.spans import Span, aligned, ceil_div, cut_evenly


@dataclass(frozen=True)
class RowCut:
    """How one parameter is cut along ``dim`` over ``world`` ranks."""

    shape: tuple[int, ...]
    dim: int
    world: int

    @property
    def size(self) -> int:
        return self.shape[self.dim]

    @property
    def share(self) -> int:
        """Rows a rank holds, padding included."""
        return ceil_div(self.size, self.world)

    @property
    def outer(self) -> int:
        return prod(self.shape[: self.dim])

    @property
    def inner(self) -> int:
        return prod(self.shape[self.dim + 1 :])

    @property
    def padded_numel(self) -> int:
        """Elements of the parameter in every rank's row."""
        return self.outer * self.share * self.inner

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def rows_of(self, rank: int) -> Span:
        return cut_evenly(self.size, self.world, rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.rows_of(rank).numel, *self.shape[self.dim + 1 :])


@dataclass(frozen=True)
class RowsLayout:
    """Where every parameter of a unit stands: in a rank's row (stored and sent) and in the full buffer."""

    world: int
    cuts: tuple[RowCut, ...]
    segments: tuple[Segment, ...]
    stored_bytes: int
    sent_bytes: int
    stored_starts_bytes: tuple[int, ...]
    sent_starts_bytes: tuple[int, ...]
    full_starts_bytes: tuple[int, ...]
    full_bytes: int

    @property
    def is_in_place(self) -> bool:
        # With one rank whose row begins and ends as the full buffer does.
        return (
            self.world == 1
            and self.sent_starts_bytes == self.full_starts_bytes
            and self.sent_bytes == self.full_bytes
        )

    @property
    def sent_as_stored(self) -> bool:
        """Whether a row goes over the wire byte for byte as it is stored."""
        return all(segment.stored_itemsize == segment.sent_itemsize for segment in self.segments)

    def own_shape(self, index: int, rank: int) -> tuple[int, ...]:
        return self.cuts[index].local_shape(rank)

    def own_start_bytes(self, index: int, rank: int) -> int:
        return self.stored_starts_bytes[index]

    def copy_out(self) -> list[tuple[Segment, Piece]]:
        found = []
        for segment in self.segments:
            size = segment.sent_itemsize
            pieces = plan_segment_pieces(
                [self.cuts[index] for index in segment.members],
                [self.sent_starts_bytes[index] // size for index in segment.members],
                [self.full_starts_bytes[index] // size for index in segment.members],
                self.sent_bytes // size,
            )
            found += [(segment, piece) for piece in pieces]
        return found

    def shares(self) -> list[Share] | None:
        found = []
        for segment in self.segments:
            for index in segment.members:
                cut = self.cuts[index]
                if cut.dim != 0 or not cut.shape or cut.shape[0] % self.world or not cut.padded_numel:
                    return None
                own_bytes = cut.padded_numel * segment.sent_itemsize
                found.append(Share(self.sent_starts_bytes[index], own_bytes, self.full_starts_bytes[index]))
        return found


class RowsPacking:
    """Gradients in rows as their parameters are, all in the dtype they are reduced in."""

    def __init__(self, layout: RowsLayout) -> None:
        itemsize = layout.segments[0].sent_itemsize
        self.world = layout.world
        self.cuts = layout.cuts
        self.row_numel = layout.sent_bytes // itemsize
        self.starts = [start // itemsize for start in layout.sent_starts_bytes]
        self.sections = tuple(
            Section(segment.sent_start_bytes // itemsize, segment.numel, segment.members)
            for segment in layout.segments
        )
        self._section_starts = {
            index: start
            for segment in layout.segments
            for index, start in zip(segment.members, segment.starts, strict=True)
        }

    def own_shape(self, index: int, rank: int) -> tuple[int, ...]:
        return self.cuts[index].local_shape(rank)

    def own_start(self, index: int, rank: int) -> int:
        return self._section_starts[index]

    def pieces(self, index: int) -> tuple[Piece, ...]:
        return plan_pieces(self.cuts[index], self.starts[index], self.row_numel)

    def pads(self) -> tuple[Pad, ...]:
        return plan_pads(self.cuts, self.starts, self.row_numel)


def plan_rows(params: Sequence[RowParam], world: int) -> RowsLayout:
    """Lays out a unit's parameters; those of one kind stand together, and among them those of one size."""
    cuts = tuple(RowCut(param.shape, param.dim, world) for param in params)
    members_by_kind: dict[Hashable, list[int]] = {}
    for index, param in enumerate(params):
        members_by_kind.setdefault(param.kind, []).append(index)

    # With one rank, whose row is the full buffer, parameters stand in it as modules use them.
    alignment_bytes = ALIGNMENT_BYTES if world == 1 else SHARD_ALIGNMENT_BYTES
    segments: list[Segment] = []
    stored_starts = [0] * len(params)
    sent_starts = [0] * len(params)
    stored_end = sent_end = 0
    for kind, members in members_by_kind.items():
        members.sort(key=lambda index: cuts[index].padded_numel)
        stored_itemsize = params[members[0]].stored_itemsize
        sent_itemsize = params[members[0]].sent_itemsize
        # The narrowest measure needs the coarsest grid; all then start on whole aligned bytes.
        grid_itemsize = min(params[index].grid_itemsize for index in members)
        grid = max(1, alignment_bytes // min(stored_itemsize, sent_itemsize, grid_itemsize))
        starts: list[int] = []
        end = 0
        for index in members:
            starts.append(end)
            stored_starts[index] = stored_end + end * stored_itemsize
            sent_starts[index] = sent_end + end * sent_itemsize
            end = aligned(end + cuts[index].padded_numel, grid)
        segments.append(
            Segment(
                kind,
                tuple(members),
                tuple(starts),
                end,
                stored_itemsize,
                sent_itemsize,
                stored_end,
                sent_end,
            )
        )
        stored_end = aligned(stored_end + end * stored_itemsize, alignment_bytes)
        sent_end = aligned(sent_end + end * sent_itemsize, alignment_bytes)

    full_starts = [0] * len(params)
    full_end = 0
    for index in (index for segment in segments for index in segment.members):
        full_starts[index] = full_end
        full_end = aligned(full_end + cuts[index].numel * params[index].sent_itemsize, ALIGNMENT_BYTES)
    return RowsLayout(
        world,
        cuts,
        tuple(segments),
        stored_end,
        sent_end,
        tuple(stored_starts),
        tuple(sent_starts),
        tuple(full_starts),
        full_end,
    )


def plan_pieces(cut: RowCut, start: int, row_numel: int) -> tuple[Piece, ...]:
    """The blocks of one parameter: one for the ranks whose share is whole, one for the rank that has the rest.

    ``start`` is where the parameter stands in a row and ``row_numel`` a row's length, both in its own elements.
    """
    if cut.numel == 0:
        return ()
    block = cut.share * cut.inner
    whole_ranks, rest = divmod(cut.size, cut.share)
    pieces = []
    if whole_ranks:
        pieces.append(
            _squeezed(
                Piece(
                    (whole_ranks, cut.outer, block),
                    0,
                    (block, cut.size * cut.inner, 1),
                    start,
                    (row_numel, block, 1),
                )
            )
        )
    if rest:
        pieces.append(
            _squeezed(
                Piece(
                    (cut.outer, rest * cut.inner),
                    whole_ranks * block,
                    (cut.size * cut.inner, 1),
                    whole_ranks * row_numel + start,
                    (rest * cut.inner, 1),
                )
            )
        )
    return tuple(pieces)


def plan_segment_pieces(
    cuts: Sequence[RowCut], starts: Sequence[int], full_starts: Sequence[int], row_numel: int
) -> list[Piece]:
    """The blocks of neighbours of one kind, offsets counted from the full buffer's start; equals merged into one.

    Parameters of one size that divide evenly along dim 0 and stand at equal distances are one block of three dims.
    """
    pieces: list[Piece] = []
    index = 0
    while index < len(cuts):
        cut = cuts[index]
        count = _num_alike(cuts, starts, full_starts, index)
        if count > 1:
            step, full_step = starts[index + 1] - starts[index], full_starts[index + 1] - full_starts[index]
            numel = cut.padded_numel
            pieces.append(
                Piece(
                    (cut.world, count, numel),
                    full_starts[index],
                    (numel, full_step, 1),
                    starts[index],
                    (row_numel, step, 1),
                )
            )
        else:
            pieces += [
                replace(piece, full_start=piece.full_start + full_starts[index])
                for piece in plan_pieces(cut, starts[index], row_numel)
            ]
        index += count
    return pieces


def _num_alike(cuts: Sequence[RowCut], starts: Sequence[int], full_starts: Sequence[int], first: int) -> int:
    """How many parameters from ``first`` on one block can hold."""
    cut = cuts[first]
    if cut.dim or cut.size % cut.world or not cut.numel:
        return 1
    count = 1
    for index in range(first + 1, len(cuts)):
        other = cuts[index]
        alike = other.dim == 0 and other.size % other.world == 0 and other.padded_numel == cut.padded_numel
        steps = (starts[index] - starts[index - 1], full_starts[index] - full_starts[index - 1])
        first_steps = (starts[first + 1] - starts[first], full_starts[first + 1] - full_starts[first])
        if not alike or steps != first_steps:
            break
        count += 1
    return count


def plan_pads(cuts: Sequence[RowCut], starts: Sequence[int], row_numel: int) -> tuple[Pad, ...]:
    """What is left between and behind the parameters in the rows of all ranks; all parameters of one dtype."""
    pads: list[Pad] = []
    order = sorted(range(len(cuts)), key=lambda index: (starts[index], cuts[index].padded_numel))
    ends = [starts[index] for index in order[1:]] + [row_numel]
    if not order:
        return ()
    world = cuts[0].world
    for index, end in zip(order, ends, strict=True):
        cut, start = cuts[index], starts[index]
        gap = end - start - cut.padded_numel
        if gap:
            pads.append(Pad((world, gap), start + cut.padded_numel, (row_numel, 1)))
        if cut.padded_numel == 0:
            continue
        whole_ranks, rest = divmod(cut.size, cut.share)
        if rest:
            filled = cut.outer * rest * cut.inner
            pads.append(Pad((cut.padded_numel - filled,), whole_ranks * row_numel + start + filled, (1,)))
        empty_from = whole_ranks + bool(rest)
        if empty_from < world:
            pads.append(
                Pad((world - empty_from, cut.padded_numel), empty_from * row_numel + start, (row_numel, 1))
            )
    return tuple(pads)


def _squeezed(piece: Piece) -> Piece:
    """The piece without dims of length one: fewer dims make faster copies."""
    keep = [i for i, length in enumerate(piece.shape) if length != 1] or [len(piece.shape) - 1]
    return Piece(
        tuple(piece.shape[i] for i in keep),
        piece.full_start,
        tuple(piece.full_strides[i] for i in keep),
        piece.packed_start,
        tuple(piece.packed_strides[i] for i in keep),
    )
