"""The ``flat`` layout: a unit's parameters end to end, cut evenly over ranks wherever the cuts may fall.

Take parameters A (5 elements) and B (4) over 2 ranks. They form one segment, and each rank holds a shard of it:

    full     | A0 A1 A2 A3 A4 | B0 B1 B2 B3 | . |        '.' is padding, always zero
    rank 0   | A0 A1 A2 A3 A4 |
    rank 1                    | B0 B1 B2 B3 . |

So a rank may hold all of one parameter and nothing of another, and the rows of all ranks, end to end, are the full
parameters: a gather has nothing to copy out. Parameters of one kind form one segment. With several segments a row holds
a shard of each, and one block per segment is copied out.

A reduce cuts full segments where the parameters are cut. Where only some parameters of a segment are trained, the rows
hold what each rank has of those and nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwise.planning.layout import (
    ALIGNMENT_BYTES,
    Block,
    GradientSegment,
    PaddingBlock,
    RowParam,
    Segment,
    Span,
    aligned,
    ceil_div,
    members_by_kind,
)

# In elements: every cut is a multiple of it, so that a shard is aligned to at least 16 bytes, whatever its dtype.
GRID = 16


def grid_of(itemsize: int) -> int:
    """The elements that every cut is a multiple of, so that full parameters of this itemsize are aligned."""
    return max(GRID, ALIGNMENT_BYTES // itemsize)


@dataclass(frozen=True)
class FlatLayout:
    """See ``planning.layout.Layout``. A segment's ``starts`` count in the full segment; ``numel`` is one rank's shard.

    ``positions`` has, for each parameter, the number of its segment and its start in the full segment.
    """

    world: int
    numels: tuple[int, ...]
    segments: tuple[Segment, ...]
    stored_bytes: int
    sent_bytes: int
    full_starts_bytes: tuple[int, ...]
    full_bytes: int
    positions: tuple[tuple[int, int], ...]

    @property
    def is_in_place(self) -> bool:
        return len(self.segments) == 1

    def shard_span(self, index: int, rank: int) -> Span:
        """What a rank holds of a parameter, in the parameter's own elements; may be empty."""
        number, start = self.positions[index]
        shard_numel, numel = self.segments[number].numel, self.numels[index]
        first = min(max(rank * shard_numel - start, 0), numel)
        return Span(first, max(first, min((rank + 1) * shard_numel - start, numel)))

    def shard_start(self, index: int, rank: int) -> int:
        """Where those elements begin in the rank's shard of the segment."""
        number, start = self.positions[index]
        shard_numel = self.segments[number].numel
        return min(max(start - rank * shard_numel, 0), shard_numel)

    def shard_shape(self, index: int, rank: int) -> tuple[int, ...]:
        return (self.shard_span(index, rank).numel,)

    def shard_start_bytes(self, index: int, rank: int) -> int:
        segment = self.segments[self.positions[index][0]]
        return segment.stored_start_bytes + self.shard_start(index, rank) * segment.stored_itemsize

    def even_shards(self) -> None:
        return None

    def copy_out_blocks(self) -> list[tuple[Segment, Block]]:
        if self.is_in_place:
            return []
        found = []
        full_start_bytes = 0
        for segment in self.segments:
            shard_numel, size = segment.numel, segment.sent_itemsize
            packed_start, packed_strides = segment.sent_start_bytes // size, (self.sent_bytes // size, 1)
            shape, strides = (self.world, shard_numel), (shard_numel, 1)
            block = Block(shape, full_start_bytes // size, strides, packed_start, packed_strides)
            found.append((segment, block))
            full_start_bytes += self.world * shard_numel * size
        return found


def plan_flat(
    params: Sequence[RowParam], world: int, grids: Mapping[Hashable, int] | None = None
) -> FlatLayout:
    """Lays out a unit's parameters end to end, those of one kind together, in the order given.

    ``grids`` keeps, by kind, the grid of an earlier plan, so that cuts stay where they are when dtypes change.
    """
    numels = tuple(prod(param.shape) for param in params)
    segments: list[Segment] = []
    positions = [(0, 0)] * len(params)
    full_starts = [0] * len(params)
    stored_end = sent_end = full_end = 0
    for kind, members in members_by_kind(params).items():
        stored_itemsize, sent_itemsize = params[members[0]].stored_itemsize, params[members[0]].sent_itemsize
        # Modules use the full parameters where they lie in the gathered segment, so each is aligned there.
        grid = grid_of(sent_itemsize) if grids is None else grids[kind]
        starts: list[int] = []
        end = 0
        for index in members:
            starts.append(end)
            positions[index] = (len(segments), end)
            full_starts[index] = full_end + end * sent_itemsize
            end = aligned(end + numels[index], grid)
        shard_numel = max(grid, aligned(ceil_div(end, world), grid))
        segments.append(
            Segment(
                kind,
                tuple(members),
                tuple(starts),
                shard_numel,
                stored_itemsize,
                sent_itemsize,
                stored_end,
                sent_end,
            )
        )
        stored_end += shard_numel * stored_itemsize
        sent_end += shard_numel * sent_itemsize
        full_end += world * shard_numel * sent_itemsize
    return FlatLayout(
        world, numels, tuple(segments), stored_end, sent_end, tuple(full_starts), full_end, tuple(positions)
    )


class FlatPacking:
    """Gradients of some parameters of a flat layout, in rows that are cut where the parameters are cut."""

    def __init__(self, layout: FlatLayout, indices: Sequence[int]) -> None:
        self.world = layout.world
        self._layout = layout
        self._indices = tuple(indices)
        numbers = {index: number for number, index in enumerate(indices)}
        packed: list[GradientSegment] = []
        self._segment_of: dict[int, GradientSegment] = {}
        # For parameters of incomplete segments: by rank, where its shard of the parameter begins in the segment.
        self._compacted: dict[int, dict[int, int]] = {}
        self._complete: list[tuple[GradientSegment, Segment]] = []
        end = 0
        for segment in layout.segments:
            members = [index for index in segment.members if index in numbers]
            if not members:
                continue
            is_complete = len(members) == len(segment.members)
            numel = segment.numel if is_complete else self._compact(members)
            gradients = GradientSegment(end, numel, tuple(numbers[index] for index in members))
            packed.append(gradients)
            self._segment_of.update(dict.fromkeys(gradients.members, gradients))
            if is_complete:
                self._complete.append((gradients, segment))
            end += numel
        self.segments = tuple(packed)
        self.row_numel = end

    def _compact(self, members: list[int]) -> int:
        """Puts what each rank has of these parameters end to end; returns a length that suffices for every rank."""
        ends: dict[int, int] = {}
        for index in members:
            starts = self._compacted[index] = {}
            for rank in self._ranks_with_elements(*self._position(index)):
                starts[rank] = ends.get(rank, 0)
                ends[rank] = starts[rank] + aligned(self._layout.shard_span(index, rank).numel, GRID)
        return max(ends.values(), default=GRID)

    def _position(self, index: int) -> tuple[int, int, int]:
        """A parameter's start and length in its full segment, and the length of a rank's shard of that segment."""
        number, start = self._layout.positions[index]
        return start, self._layout.numels[index], self._layout.segments[number].numel

    @staticmethod
    def _ranks_with_elements(start: int, numel: int, shard_numel: int) -> range:
        """The ranks that hold some of ``numel`` elements from ``start`` on of a full segment."""
        return range(start // shard_numel, ceil_div(start + numel, shard_numel)) if numel else range(0)

    @property
    def is_contiguous(self) -> bool:
        """Whether the rows of all ranks, end to end, are all gradients end to end."""
        return len(self.segments) == 1 and not self._compacted

    def start(self, index: int) -> int:
        """Where a gradient begins in its full segment."""
        return self._layout.positions[self._indices[index]][1]

    def shard_shape(self, index: int, rank: int) -> tuple[int, ...]:
        return self._layout.shard_shape(self._indices[index], rank)

    def shard_start(self, index: int, rank: int) -> int:
        param = self._indices[index]
        if param in self._compacted:
            return self._compacted[param].get(rank, 0)
        return self._layout.shard_start(param, rank)

    def blocks(self, index: int) -> list[Block]:
        """At most three: on the first rank that has elements, on those that have nothing else, and on the last."""
        param = self._indices[index]
        start, numel, shard_numel = self._position(param)
        if self.is_contiguous:
            return [Block((numel,), 0, (1,), start, (1,))] if numel else []
        return self._blocks(start, numel, shard_numel, self._segment_of[index], self._compacted.get(param))

    def _blocks(
        self,
        start: int,
        numel: int,
        shard_numel: int,
        segment: GradientSegment,
        compacted: dict[int, int] | None,
    ) -> list[Block]:
        ranks = self._ranks_with_elements(start, numel, shard_numel)
        blocks = []
        for rank in sorted({ranks[0], ranks[-1]}) if ranks else ():
            first, stop = max(start, rank * shard_numel), min(start + numel, (rank + 1) * shard_numel)
            shard_start = first - rank * shard_numel if compacted is None else compacted[rank]
            packed_start = rank * self.row_numel + segment.start + shard_start
            blocks.append(Block((stop - first,), first - start, (1,), packed_start, (1,)))
        if len(ranks) > 2:
            first_rank = ranks[1]
            packed_start = first_rank * self.row_numel + segment.start
            shape, full_start = (len(ranks) - 2, shard_numel), first_rank * shard_numel - start
            blocks.append(Block(shape, full_start, (shard_numel, 1), packed_start, (self.row_numel, 1)))
        return blocks

    def padding(self) -> list[PaddingBlock]:
        padding = []
        for gradients, segment in self._complete:
            ends = [*segment.starts[1:], self.world * segment.numel]
            for index, start, end in zip(segment.members, segment.starts, ends, strict=True):
                gap = start + self._layout.numels[index]
                if gap == end:
                    continue
                if self.is_contiguous:
                    padding.append(PaddingBlock((end - gap,), gap, (1,)))
                    continue
                padding += [
                    PaddingBlock(block.shape, block.packed_start, block.packed_strides)
                    for block in self._blocks(gap, end - gap, segment.numel, gradients, None)
                ]
        # Ranks hold different amounts of an incomplete segment: all of it is zeroed before gradients are copied in.
        for gradients in self.segments:
            if any(self._indices[index] in self._compacted for index in gradients.members):
                padding.append(
                    PaddingBlock((self.world, gradients.numel), gradients.start, (self.row_numel, 1))
                )
        return padding
