"""The geometry that the ``rows`` and ``flat`` layouts share: spans, blocks, segments, and what a layout answers.

    span      a half-open range of elements
    shard     one rank's part of a parameter
    row       all shards of a unit on one rank, end to end, padded to the same length on every rank
    segment   neighbours in a row that have one dtype
    block     a strided rectangle of elements, in a full tensor and in the packed rows of all ranks
    slice     the same columns of all rows (``planning/slices``)

A *layout* places the parameters of a unit, for its gather; a *packing* places their gradients, for a reduce.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

# Of full parameters: a cache line, as torch aligns its own tensors. Matrix kernels sum in an order that depends on
# alignment, so a parameter aligned differently from an unsharded one would give other last bits.
ALIGNMENT_BYTES = 64
# Of shards in a row: enough for vector loads. Only element-wise kernels read them there, and more would pad small
# parameters in every row that is sent.
SHARD_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Span:
    """The elements ``start <= i < stop``."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def aligned(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return ceil_div(value, multiple) * multiple


def cut_evenly(size: int, world: int, rank: int) -> Span:
    """The span of ``size`` elements that ``rank`` holds, as DTensor's ``Shard`` cuts: 5 over 4 ranks is 2, 2, 1, 0."""
    shard_size = ceil_div(size, world)
    start = min(rank * shard_size, size)
    return Span(start, min(start + shard_size, size))


@dataclass(frozen=True)
class RowParam:
    """One parameter as the plan sees it: its shape, the dim it is cut along (if any), and its element sizes.

    ``grid_itemsize`` is the element size of another row that must hold the same parameters at the same offsets.
    """

    shape: tuple[int, ...]
    dim: int
    kind: Hashable
    stored_itemsize: int
    sent_itemsize: int
    grid_itemsize: int = SHARD_ALIGNMENT_BYTES


def members_by_kind(params: Sequence[RowParam]) -> dict[Hashable, list[int]]:
    """The indices of the parameters of each kind, which form a segment."""
    members: dict[Hashable, list[int]] = {}
    for index, param in enumerate(params):
        members.setdefault(param.kind, []).append(index)
    return members


@dataclass(frozen=True)
class Block:
    """The same elements twice: as a strided block of the full parameter, and of the packed rows of all ranks."""

    shape: tuple[int, ...]
    full_start: int
    full_strides: tuple[int, ...]
    packed_start: int
    packed_strides: tuple[int, ...]


def blocks_by_rank(block: Block, row_numel: int) -> list[tuple[int, Block]]:
    """Splits a block by the rank whose row it lies in; ``packed_start`` then counts from the start of that row."""
    rank, start = divmod(block.packed_start, row_numel)
    if block.packed_strides[0] != row_numel:
        return [(rank, replace(block, packed_start=start))]
    shape, (step, *strides), packed_strides = block.shape[1:], block.full_strides, block.packed_strides[1:]
    return [
        (rank + index, Block(shape, block.full_start + index * step, tuple(strides), start, packed_strides))
        for index in range(block.shape[0])
    ]


@dataclass(frozen=True)
class PaddingBlock:
    """A strided block of the packed rows that belongs to no parameter."""

    shape: tuple[int, ...]
    packed_start: int
    packed_strides: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """Parameters of one kind that are neighbours in a row. ``starts`` are element offsets from the segment's start."""

    kind: Hashable
    members: tuple[int, ...]
    starts: tuple[int, ...]
    numel: int
    stored_itemsize: int
    sent_itemsize: int
    stored_start_bytes: int
    sent_start_bytes: int


@dataclass(frozen=True)
class EvenShard:
    """A parameter cut into equal shards: where its shard lies in a row as sent, and where its full tensor begins."""

    shard_start_bytes: int
    shard_bytes: int
    full_start_bytes: int


@dataclass(frozen=True)
class GradientSegment:
    """The gradients of one segment in a row of a reduce, in elements; ``members`` are indices of gradients."""

    start: int
    numel: int
    members: tuple[int, ...]


class Layout(Protocol):
    """Where every parameter of a unit lies: in a rank's row (stored and sent) and in the full buffer."""

    @property
    def world(self) -> int: ...

    @property
    def segments(self) -> tuple[Segment, ...]: ...

    @property
    def stored_bytes(self) -> int: ...

    @property
    def sent_bytes(self) -> int: ...

    @property
    def full_starts_bytes(self) -> tuple[int, ...]: ...

    @property
    def full_bytes(self) -> int: ...

    @property
    def is_in_place(self) -> bool:
        """Whether the rows of all ranks, end to end, are the full buffer."""

    def shard_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard of a parameter."""

    def shard_start_bytes(self, index: int, rank: int) -> int:
        """Where that shard is stored in the rank's row."""

    def copy_out_blocks(self) -> list[tuple[Segment, Block]]:
        """The blocks that copy the gathered rows into the full buffer, in elements of the segment."""

    def even_shards(self) -> list[EvenShard] | None:
        """The parameters one by one, if all are cut evenly: each can be gathered straight into its full tensor."""


class Packing(Protocol):
    """Where gradients lie in the rows of a reduce, in elements."""

    @property
    def world(self) -> int: ...

    @property
    def row_numel(self) -> int: ...

    @property
    def segments(self) -> tuple[GradientSegment, ...]: ...

    def shard_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard of a gradient."""

    def shard_start(self, index: int, rank: int) -> int:
        """Where that shard lies in the rank's row, counted from its segment's start."""

    def blocks(self, index: int) -> Sequence[Block]:
        """The blocks that copy a gradient into the rows of all ranks."""

    def padding(self) -> Sequence[PaddingBlock]:
        """The blocks that no gradient fills."""
