"""What the two layouts, ``rows`` and ``flat``, have in common: the words in which they tell where things are.

A *layout* places a unit's parameters: each rank's part in its row, each full parameter in the full buffer, and which
block of the gathered rows is which block of the full buffer. A *packing* places gradients in the rows that ranks
exchange in a reduce, and says where in its own row a rank then finds those of its shards.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

# A cache line, as torch aligns its own tensors. Matrix kernels sum in an order that depends on alignment: a parameter
# aligned differently from an unsharded one would give other last bits.
ALIGNMENT_BYTES = 64
# Of shards in a row: enough for vector loads. Nothing but element-wise kernels reads them there, and more would pad
# small parameters in every row that travels.
SHARD_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class RowParam:
    """One parameter as the plan sees it: its shape, the dim it is cut along (if it is), and its element sizes.

    ``grid_itemsize`` is the element size of another row that is to hold the same parameters at the same offsets.
    """

    shape: tuple[int, ...]
    dim: int
    kind: Hashable
    stored_itemsize: int
    sent_itemsize: int
    grid_itemsize: int = SHARD_ALIGNMENT_BYTES


@dataclass(frozen=True)
class Piece:
    """The same elements twice: as a strided block of the full parameter, and of the packed rows of all ranks."""

    shape: tuple[int, ...]
    full_start: int
    full_strides: tuple[int, ...]
    packed_start: int
    packed_strides: tuple[int, ...]


def pieces_by_rank(piece: Piece, row_numel: int) -> list[tuple[int, Piece]]:
    """A piece cut up by whose row it lies in; ``packed_start`` then counts from the start of that row."""
    rank, start = divmod(piece.packed_start, row_numel)
    if piece.packed_strides[0] != row_numel:
        return [(rank, replace(piece, packed_start=start))]
    shape, full_strides, packed_strides = piece.shape[1:], piece.full_strides[1:], piece.packed_strides[1:]
    return [
        (
            rank + index,
            Piece(
                shape, piece.full_start + index * piece.full_strides[0], full_strides, start, packed_strides
            ),
        )
        for index in range(piece.shape[0])
    ]


@dataclass(frozen=True)
class Pad:
    """A strided block of the packed rows that no parameter fills."""

    shape: tuple[int, ...]
    packed_start: int
    packed_strides: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """Neighbours of one kind in a row. ``starts`` are element offsets from the segment's own start."""

    kind: Hashable
    members: tuple[int, ...]
    starts: tuple[int, ...]
    numel: int
    stored_itemsize: int
    sent_itemsize: int
    stored_start_bytes: int
    sent_start_bytes: int


@dataclass(frozen=True)
class Share:
    """A parameter of which every rank has one block, all of one size: where it stands in rows as sent, and whole."""

    own_start_bytes: int
    own_bytes: int
    full_start_bytes: int


@dataclass(frozen=True)
class Section:
    """The gradients of one segment's parameters in a row, in elements; ``members`` are numbers of gradients."""

    start: int
    numel: int
    members: tuple[int, ...]


class Layout(Protocol):
    """Where every parameter of a unit stands: in a rank's row (stored and sent) and in the full buffer."""

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

    def own_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """The shape of a rank's part of a parameter."""

    def own_start_bytes(self, index: int, rank: int) -> int:
        """Where that part is stored in the rank's row."""

    def copy_out(self) -> list[tuple[Segment, Piece]]:
        """Which blocks of the gathered rows are which blocks of the full buffer, in elements of the segment."""

    def shares(self) -> list[Share] | None:
        """The parameters one by one, if each of them can be gathered right into its place."""


class Packing(Protocol):
    """Where gradients stand in the rows of a reduce, in elements."""

    @property
    def world(self) -> int: ...

    @property
    def row_numel(self) -> int: ...

    @property
    def sections(self) -> tuple[Section, ...]: ...

    def own_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """The shape of a rank's part of a gradient."""

    def own_start(self, index: int, rank: int) -> int:
        """Where that part stands in the rank's row, counted from its section's start."""

    def pieces(self, index: int) -> Sequence[Piece]:
        """Which blocks of a gradient are which blocks of the rows of all ranks."""

    def pads(self) -> Sequence[Pad]:
        """What no gradient fills."""
