"""The ``rows`` layout: every parameter is cut along one dim, and a rank's shards of a unit form its row.

Take a unit of two parameters, A (5 elements along the dim) and B (4), over 2 ranks. A rank's *row* holds its shard of
each, padded at the end to the same length on every rank, so that one collective can gather the whole unit:

    rank 0   | A0 A1 A2 | B0 B1 |
    rank 1   | A3 A4 .. | B2 B3 |        '..' is padding, always zero

    full     | A0 A1 A2 A3 A4 |  | B0 B1 B2 B3 |      each parameter contiguous again

Parameters of the same kind (dtype) form a *segment*, which is cast in one go. Within a segment, parameters of one size
are neighbours, so that one strided copy serves them all. Starts are aligned, so that every shard can be used as a
tensor of its own. A row has two sizes: *stored* (in the dtype the optimizer sees) and *sent* (in the dtype the
collective carries); element offsets within a segment are the same in both. Blocks map full parameters to packed rows,
for the copy-out after a gather and for the pack before a reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwise.planning.layout import (
    ALIGNMENT_BYTES,
    SHARD_ALIGNMENT_BYTES,
    Block,
    EvenShard,
    GradientSegment,
    PaddingBlock,
    RowParam,
    Segment,
    Span,
    aligned,
    ceil_div,
    cut_evenly,
    members_by_kind,
)


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
    def shard_size(self) -> int:
        """The length along ``dim`` of every rank's shard, padding included."""
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
        return self.outer * self.shard_size * self.inner

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def span_of(self, rank: int) -> Span:
        """What ``rank`` holds along ``dim``."""
        return cut_evenly(self.size, self.world, rank)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.span_of(rank).numel, *self.shape[self.dim + 1 :])


@dataclass(frozen=True)
class RowsLayout:
    """See ``planning.layout.Layout``."""

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
        # With one rank, whose row is laid out like the full buffer.
        return (
            self.world == 1
            and self.sent_starts_bytes == self.full_starts_bytes
            and self.sent_bytes == self.full_bytes
        )

    def shard_shape(self, index: int, rank: int) -> tuple[int, ...]:
        return self.cuts[index].shard_shape(rank)

    def shard_start_bytes(self, index: int, rank: int) -> int:
        return self.stored_starts_bytes[index]

    def copy_out_blocks(self) -> list[tuple[Segment, Block]]:
        found = []
        for segment in self.segments:
            size = segment.sent_itemsize
            blocks = plan_segment_blocks(
                [self.cuts[index] for index in segment.members],
                [self.sent_starts_bytes[index] // size for index in segment.members],
                [self.full_starts_bytes[index] // size for index in segment.members],
                self.sent_bytes // size,
            )
            found += [(segment, block) for block in blocks]
        return found

    def even_shards(self) -> list[EvenShard] | None:
        found = []
        for segment in self.segments:
            for index in segment.members:
                cut = self.cuts[index]
                if cut.dim != 0 or not cut.shape or cut.shape[0] % self.world or not cut.padded_numel:
                    return None
                shard_bytes = cut.padded_numel * segment.sent_itemsize
                found.append(
                    EvenShard(self.sent_starts_bytes[index], shard_bytes, self.full_starts_bytes[index])
                )
        return found


class RowsPacking:
    """Gradients placed in rows like their parameters, all in the reduce dtype."""

    def __init__(self, layout: RowsLayout) -> None:
        itemsize = layout.segments[0].sent_itemsize
        self.world = layout.world
        self.cuts = layout.cuts
        self.row_numel = layout.sent_bytes // itemsize
        self.starts = [start // itemsize for start in layout.sent_starts_bytes]
        self.segments = tuple(
            GradientSegment(segment.sent_start_bytes // itemsize, segment.numel, segment.members)
            for segment in layout.segments
        )
        self._starts_in_segment = {
            index: start
            for segment in layout.segments
            for index, start in zip(segment.members, segment.starts, strict=True)
        }

    def shard_shape(self, index: int, rank: int) -> tuple[int, ...]:
        return self.cuts[index].shard_shape(rank)

    def shard_start(self, index: int, rank: int) -> int:
        return self._starts_in_segment[index]

    def blocks(self, index: int) -> tuple[Block, ...]:
        return plan_blocks(self.cuts[index], self.starts[index], self.row_numel)

    def padding(self) -> tuple[PaddingBlock, ...]:
        return plan_padding(self.cuts, self.starts, self.row_numel)


def plan_rows(params: Sequence[RowParam], world: int) -> RowsLayout:
    """Lays out a unit's parameters: those of one kind together, and among them those of one size."""
    cuts = tuple(RowCut(param.shape, param.dim, world) for param in params)
    # With one rank the row is the full buffer, in which modules use the parameters.
    alignment_bytes = ALIGNMENT_BYTES if world == 1 else SHARD_ALIGNMENT_BYTES
    segments: list[Segment] = []
    stored_starts = [0] * len(params)
    sent_starts = [0] * len(params)
    stored_end = sent_end = 0
    for kind, members in members_by_kind(params).items():
        members.sort(key=lambda index: cuts[index].padded_numel)
        stored_itemsize = params[members[0]].stored_itemsize
        sent_itemsize = params[members[0]].sent_itemsize
        # The smallest element size needs the coarsest grid; then starts are aligned in all of them.
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
                kind, tuple(members), tuple(starts), end, stored_itemsize, sent_itemsize, stored_end, sent_end
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


def plan_blocks(cut: RowCut, start: int, row_numel: int) -> tuple[Block, ...]:
    """The blocks of one parameter: one for the ranks with a full shard, one for the rank that has the remainder.

    ``start`` is where the parameter lies in a row and ``row_numel`` a row's length, both in its own elements.
    """
    if cut.numel == 0:
        return ()
    width, outer_stride = cut.shard_size * cut.inner, cut.size * cut.inner
    full_ranks, rest = divmod(cut.size, cut.shard_size)
    blocks = []
    if full_ranks:
        strides = (width, outer_stride, 1)
        blocks.append(Block((full_ranks, cut.outer, width), 0, strides, start, (row_numel, width, 1)))
    if rest:
        shape, packed_start = (cut.outer, rest * cut.inner), full_ranks * row_numel + start
        packed_strides = (rest * cut.inner, 1)
        blocks.append(Block(shape, full_ranks * width, (outer_stride, 1), packed_start, packed_strides))
    return tuple(map(_without_unit_dims, blocks))


def plan_segment_blocks(
    cuts: Sequence[RowCut], starts: Sequence[int], full_starts: Sequence[int], row_numel: int
) -> list[Block]:
    """The blocks of a segment's parameters, with offsets from the start of the full buffer.

    Parameters of one size that divide evenly along dim 0 and lie at equal distances are merged into one block.
    """
    blocks: list[Block] = []
    index = 0
    while index < len(cuts):
        cut = cuts[index]
        count = _num_mergeable(cuts, starts, full_starts, index)
        if count > 1:
            step, full_step = starts[index + 1] - starts[index], full_starts[index + 1] - full_starts[index]
            numel = cut.padded_numel
            shape, full_strides = (cut.world, count, numel), (numel, full_step, 1)
            blocks.append(Block(shape, full_starts[index], full_strides, starts[index], (row_numel, step, 1)))
        else:
            blocks += [
                replace(block, full_start=block.full_start + full_starts[index])
                for block in plan_blocks(cut, starts[index], row_numel)
            ]
        index += count
    return blocks


def _num_mergeable(
    cuts: Sequence[RowCut], starts: Sequence[int], full_starts: Sequence[int], first: int
) -> int:
    """How many parameters from ``first`` on fit into one block."""
    cut = cuts[first]
    if cut.dim or cut.size % cut.world or not cut.numel:
        return 1
    count = 1
    for index in range(first + 1, len(cuts)):
        other = cuts[index]
        is_same_cut = (
            other.dim == 0 and other.size % other.world == 0 and other.padded_numel == cut.padded_numel
        )
        steps = (starts[index] - starts[index - 1], full_starts[index] - full_starts[index - 1])
        first_steps = (starts[first + 1] - starts[first], full_starts[first + 1] - full_starts[first])
        if not is_same_cut or steps != first_steps:
            break
        count += 1
    return count


def plan_padding(cuts: Sequence[RowCut], starts: Sequence[int], row_numel: int) -> tuple[PaddingBlock, ...]:
    """The blocks between and behind the parameters in the rows of all ranks; all parameters have one dtype."""
    padding: list[PaddingBlock] = []
    order = sorted(range(len(cuts)), key=lambda index: (starts[index], cuts[index].padded_numel))
    ends = [starts[index] for index in order[1:]] + [row_numel]
    if not order:
        return ()
    world = cuts[0].world
    for index, end in zip(order, ends, strict=True):
        cut, start = cuts[index], starts[index]
        gap = end - start - cut.padded_numel
        if gap:
            padding.append(PaddingBlock((world, gap), start + cut.padded_numel, (row_numel, 1)))
        if cut.padded_numel == 0:
            continue
        full_ranks, rest = divmod(cut.size, cut.shard_size)
        if rest:
            filled = cut.outer * rest * cut.inner
            padding.append(
                PaddingBlock((cut.padded_numel - filled,), full_ranks * row_numel + start + filled, (1,))
            )
        empty_from = full_ranks + bool(rest)
        if empty_from < world:
            padding.append(
                PaddingBlock(
                    (world - empty_from, cut.padded_numel), empty_from * row_numel + start, (row_numel, 1)
                )
            )
    return tuple(padding)


def _without_unit_dims(block: Block) -> Block:
    """Drops the block's dims of length one: fewer dims make faster copies."""
    keep = [i for i, length in enumerate(block.shape) if length != 1] or [len(block.shape) - 1]
    return Block(
        tuple(block.shape[i] for i in keep),
        block.full_start,
        tuple(block.full_strides[i] for i in keep),
        block.packed_start,
        tuple(block.packed_strides[i] for i in keep),
    )
