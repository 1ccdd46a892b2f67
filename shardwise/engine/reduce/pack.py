"""Packs full gradients into the rows of a reduce: casts, cuts and pads them, in as few kernels as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from shardwise.engine.buffers import ElasticBuffer, RelocatableBuffer
from shardwise.engine.kernels import plan_pack_kernel
from shardwise.planning.column_blocks import (
    ColumnBlock,
    column_blocks_of_flat_packing,
    column_blocks_of_packing,
)
from shardwise.planning.flat import FlatPacking
from shardwise.planning.layout import Block, Packing, PaddingBlock, Span
from shardwise.planning.memory import ROWS
from shardwise.planning.rows import RowsPacking
from shardwise.planning.slices import RowsSlice, cut_into_slices
from shardwise.torch_internals import chunk_cat, copy_all, zero_all

# Larger rows are packed and reduced slice by slice, so that each slice fits into the memory of freed activations, which
# is fragmented.
_MOST_BYTES = 1 << 30


class Pack(Protocol):
    def fill(self, gradients: list[torch.Tensor | None], is_complete: bool) -> None:
        """Fills the rows: with the gradients, and with zeros for missing gradients and padding."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What is packed and reduced at once: the whole rows, or some columns of them.

    Complex numbers are reduced as pairs of real numbers, which every backend can sum.
    """

    pack: Pack
    rows: torch.Tensor
    # None: the whole rows.
    columns: Span | None
    is_complex: bool

    def own_span(self, own_row: torch.Tensor) -> torch.Tensor:
        """The slice's elements of this rank's own row."""
        own = own_row if self.columns is None else own_row[self.columns.start : self.columns.stop]
        return torch.view_as_real(own).view(-1) if self.is_complex else own


def plan_slices(
    packing: Packing,
    dtype: torch.dtype,
    device: torch.device,
    shapes: list[tuple[int, ...]],
    gradient_dtypes: list[torch.dtype],
) -> tuple[RelocatableBuffer, list[Slice]]:
    """Plans the memory of the rows, and the slices that use it one after another."""
    world, row_numel = packing.world, packing.row_numel
    row_slices: list[RowsSlice] = []
    if (
        isinstance(packing, RowsPacking)
        and world * row_numel * dtype.itemsize > _MOST_BYTES
        and all(cut.dim == 0 for cut in packing.cuts)
    ):
        row_slices = cut_into_slices(packing, _MOST_BYTES // dtype.itemsize)
    widest = max((each.row_numel for each in row_slices), default=row_numel)
    rows = RelocatableBuffer(world * widest * dtype.itemsize, device, ROWS)
    if not row_slices:
        pack = plan_pack(packing, rows, dtype, shapes, gradient_dtypes)
        return rows, [Slice(pack, _rows_tensor(rows, dtype, world * row_numel), None, dtype.is_complex)]
    slices = []
    for each in row_slices:
        kernel = _plan_kernel(packing, each.columns, rows, dtype, shapes, gradient_dtypes)
        pack = kernel or BlockwisePack(each, rows, dtype, len(shapes))
        tensor = _rows_tensor(rows, dtype, world * each.row_numel)
        slices.append(Slice(pack, tensor, each.columns, dtype.is_complex))
    return rows, slices


def _rows_tensor(rows: RelocatableBuffer, dtype: torch.dtype, numel: int) -> torch.Tensor:
    return rows.tensor(dtype.to_real(), 0, (2 * numel if dtype.is_complex else numel,))


def plan_pack(
    packing: Packing,
    rows: ElasticBuffer,
    dtype: torch.dtype,
    shapes: list[tuple[int, ...]],
    gradient_dtypes: list[torch.dtype],
) -> Pack:
    """Chooses the pack with the fewest kernels that the packing and the gradients' dtypes allow."""
    if not packing.row_numel:
        # No parameter has elements.
        return BlockwisePack(packing, rows, dtype, len(shapes))
    kernel = _plan_kernel(packing, Span(0, packing.row_numel), rows, dtype, shapes, gradient_dtypes)
    if kernel is not None:
        return kernel
    if isinstance(packing, FlatPacking) and packing.is_contiguous:
        return ContiguousPack(packing, rows, dtype, shapes)
    if (
        isinstance(packing, RowsPacking)
        and all(cut.dim == 0 for cut in packing.cuts)
        and len(set(gradient_dtypes)) == 1
    ):
        return FusedPack(packing, rows, dtype)
    return BlockwisePack(packing, rows, dtype, len(shapes))


def _plan_kernel(
    packing: Packing,
    columns: Span,
    rows: ElasticBuffer,
    dtype: torch.dtype,
    shapes: list[tuple[int, ...]],
    gradient_dtypes: list[torch.dtype],
) -> Pack | None:
    """Our CUDA kernel for these columns of the rows, if it can pack them."""
    if len(set(gradient_dtypes)) != 1:
        return None
    world, row_numel = packing.world, columns.numel
    blocks: list[ColumnBlock] | None = None
    if isinstance(packing, RowsPacking):
        blocks = column_blocks_of_packing(packing, columns)
    elif isinstance(packing, FlatPacking) and packing.is_contiguous:
        blocks = column_blocks_of_flat_packing(packing, [prod(shape) for shape in shapes])
        world, row_numel = 1, world * row_numel
    return plan_pack_kernel(blocks, world, row_numel, rows, dtype, gradient_dtypes[0]) if blocks else None


class ContiguousPack:
    """Packs rows that are the gradients end to end: one copy per gradient, and of zeros per gap, all in one call."""

    def __init__(
        self, packing: FlatPacking, rows: ElasticBuffer, dtype: torch.dtype, shapes: list[tuple[int, ...]]
    ) -> None:
        self._targets = [
            rows.tensor(dtype, packing.start(index) * dtype.itemsize, shape)
            for index, shape in enumerate(shapes)
        ]
        self._padding = [
            rows.tensor(dtype, pad.packed_start * dtype.itemsize, pad.shape) for pad in packing.padding()
        ]
        self._all = [*self._targets, *self._padding]
        self._fillers: dict[torch.dtype, list[torch.Tensor]] = {}

    def fill(self, gradients: list[torch.Tensor | None], is_complete: bool) -> None:
        if is_complete:
            complete: list[torch.Tensor] = gradients  # type: ignore[assignment]
            copy_all(self._all, complete + self._zeros(complete[0].dtype) if self._padding else complete)
            return
        pairs = list(zip(self._targets, gradients, strict=True))
        present = [(target, gradient) for target, gradient in pairs if gradient is not None]
        blanks = self._padding + [target for target, gradient in pairs if gradient is None]
        if blanks:
            zero_all(blanks)
        if present:
            copy_all([target for target, _ in present], [gradient for _, gradient in present])

    def _zeros(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Zeros for the gaps, in the gradients' dtype, so that one kernel makes all copies."""
        if dtype not in self._fillers:
            self._fillers[dtype] = [pad.new_zeros(pad.shape, dtype=dtype) for pad in self._padding]
        return self._fillers[dtype]


class FusedPack:
    """Packs all gradients in one kernel; gaps between them are filled from tensors of zeros."""

    def __init__(self, packing: RowsPacking, rows: ElasticBuffer, dtype: torch.dtype) -> None:
        row_numel, cuts, starts = packing.row_numel, packing.cuts, packing.starts
        self._rows = rows.tensor(dtype, 0, (packing.world, row_numel))
        self._world = packing.world
        self._shapes = [cut.shape for cut in cuts]
        # The contents of a row, left to right: (index of a gradient, 0), or (None, length of a gap).
        self._order: list[tuple[int | None, int]] = []
        end = 0
        for index in sorted(range(len(cuts)), key=lambda index: starts[index]):
            if not cuts[index].padded_numel:
                continue
            if starts[index] > end:
                self._order.append((None, starts[index] - end))
            self._order.append((index, 0))
            end = starts[index] + cuts[index].padded_numel
        if row_numel > end:
            self._order.append((None, row_numel - end))
        self._is_plain = self._order == [(index, 0) for index in range(len(cuts))]
        self._fillers: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def fill(self, gradients: list[torch.Tensor | None], is_complete: bool) -> None:
        present: list[torch.Tensor] = gradients  # type: ignore[assignment]
        if not is_complete:
            any_present = next((gradient for gradient in gradients if gradient is not None), self._rows)
            present = [
                any_present.new_zeros(shape) if gradient is None else gradient
                for gradient, shape in zip(gradients, self._shapes, strict=True)
            ]
        if not self._is_plain:
            dtype = present[0].dtype
            present = [
                self._filler(gap, dtype) if index is None else present[index] for index, gap in self._order
            ]
        chunk_cat(present, self._world, self._rows)

    def _filler(self, gap: int, dtype: torch.dtype) -> torch.Tensor:
        if (gap, dtype) not in self._fillers:
            self._fillers[gap, dtype] = self._rows.new_zeros(gap * self._world, dtype=dtype)
        return self._fillers[gap, dtype]


class _BlockSource(Protocol):
    def blocks(self, index: int) -> Sequence[Block]: ...

    def padding(self) -> Sequence[PaddingBlock]: ...


class BlockwisePack:
    """Packs each block of each gradient with a strided copy."""

    def __init__(
        self, packing: _BlockSource, rows: ElasticBuffer, dtype: torch.dtype, num_gradients: int
    ) -> None:
        itemsize = dtype.itemsize
        self._blocks: list[list[tuple[Block, torch.Tensor]]] = []
        for index in range(num_gradients):
            blocks = packing.blocks(index)
            packed = [
                rows.tensor(dtype, block.packed_start * itemsize, block.shape, block.packed_strides)
                for block in blocks
            ]
            self._blocks.append(list(zip(blocks, packed, strict=True)))
        self._padding = [
            rows.tensor(dtype, pad.packed_start * itemsize, pad.shape, pad.packed_strides)
            for pad in packing.padding()
        ]

    def fill(self, gradients: list[torch.Tensor | None], is_complete: bool) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        blanks = list(self._padding)
        for gradient, blocks in zip(gradients, self._blocks, strict=True):
            if gradient is None:
                blanks.extend(packed for _, packed in blocks)
            if gradient is None or not blocks:
                continue
            gradient = gradient.contiguous()
            for block, packed in blocks:
                start = gradient.storage_offset() + block.full_start
                targets.append(packed)
                sources.append(gradient.as_strided(block.shape, block.full_strides, start))
        if blanks:
            zero_all(blanks)
        if targets:
            copy_all(targets, sources)
