"""Reduce plans: how a unit's full gradients become averaged gradients of its shards.

    full gradients ──pack (cast, pad)──▶ rows for all ranks ──one reduce-scatter──▶ own row ──▶ gradients of shards
                                                                                      │
                                            with replicas: ──all-reduce over them─────┘

Packing runs on the compute stream, so that backward can reuse the gradients' memory at once; summing and dividing run
on the reduce stream, the all-reduce over replicas on a stream of its own. Rows that fit take the memory of the unit's
full parameters, which backward has just passed, until the reduce has read them. Rows in memory of their own (they are
wider, say) go before the next unit's are allocated: compute waits for their reduce. The own row, cast to the shards'
dtypes where they differ, *is* the gradient buffer: the shards' gradients are views of it.

``requires_grad`` decides which parameters take part, so all ranks send rows of the same size; a parameter without a
gradient sends zeros and receives nothing. Very large rows are packed and reduced slice by slice, on the reduce stream,
through the memory of one slice. All of this is planned here, once per set of trainable parameters;
``reduce_in_flight`` carries it out.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch

from shardwise.comm.mesh import DataMesh
from shardwise.comm.streams import SideStreams
from shardwise.engine.buffers import (
    ElasticBuffer,
    GradientBuffer,
    GradientView,
    Presence,
    RelocatableBuffer,
)
from shardwise.engine.kernels import plan_pack_kernel
from shardwise.engine.reduce.reduce_in_flight import PartialSum, ReduceInFlight
from shardwise.engine.unit.binding import Slot, computed_dtype
from shardwise.engine.unit.dtensor_form import ShardedForm
from shardwise.engine.unit.settings import ReduceSettings, ShardHome
from shardwise.planning.column_blocks import (
    ColumnBlock,
    column_blocks_of_flat_packing,
    column_blocks_of_packing,
)
from shardwise.planning.flat import FlatPacking
from shardwise.planning.layout import Block, Packing, Span
from shardwise.planning.memory import ROWS
from shardwise.planning.rows import RowsPacking
from shardwise.planning.slices import RowsSlice, cut_into_slices
from shardwise.planning.sums import Division, plan_division
from shardwise.policies import MixedPrecisionPolicy
from shardwise.torch_internals import chunk_cat, copy_all, zero_all

# Larger rows are packed and reduced slice by slice, so that each slice fits into the memory of freed activations, which
# is fragmented.
_MOST_BYTES = 1 << 30


class Summation:
    """How a unit's gradients are summed; by default in whatever order the process group sums."""

    is_exact = False

    def settings(self, mesh: DataMesh) -> ReduceSettings:
        return ReduceSettings(mesh.shard)

    def plan(
        self,
        slots: list[Slot],
        form: ShardedForm,
        mesh: DataMesh,
        precision: MixedPrecisionPolicy,
        home: ShardHome,
    ) -> ReducePlan:
        """Plans the reduce of these slots in one dtype: the policy's, or one that holds all gradients without loss."""
        dtype = precision.reduce_dtype or computed_dtype(slots)
        return ReducePlan(slots, form, mesh, dtype, home)


DEFAULT_SUMMATION = Summation()


class _RowSegment(NamedTuple):
    """Neighbours in the own row whose gradients have one dtype."""

    dtype: torch.dtype
    start: int
    numel: int


def _split_sizes(views: list[GradientView], segments: list[_RowSegment]) -> list[int] | None:
    """The sizes that split the only segment into these views, and padding at its end; None if no split does."""
    end = 0
    numels = []
    for view in views:
        if view.is_segment or view.start != end or len(view.shape) != 1:
            return None
        numels.append(view.shape[0])
        end += view.shape[0]
    if len(segments) > 1:
        return None
    return numels if end == segments[0].numel else [*numels, segments[0].numel - end]


class ReduceNames(Protocol):
    """What names a unit's reduces: ``engine/unit/collective_names.CollectiveNames``."""

    def reduce(self, plan: ReducePlan, present: Presence, divide_factor: float | None) -> tuple[int, int]: ...


class ReducePlan:
    """The reduce of one set of trainable slots, planned once."""

    # Whether the memory of gradients may be reused in the next backward.
    _reuses_gradients = True

    # Whether all rows fit into the memory of the unit's full parameters; the unit knows.
    fits_in_full = False

    def __init__(
        self,
        slots: list[Slot],
        form: ShardedForm,
        mesh: DataMesh,
        reduce_dtype: torch.dtype,
        home: ShardHome,
        sum_dtype: torch.dtype | None = None,
    ) -> None:
        self.slots = slots
        self.params = [slot.unsharded for slot in slots]
        self.mesh = mesh
        # The dtype in which rows are sent, and the one in which they are summed.
        self.dtype = reduce_dtype
        self.sum_dtype = sum_dtype or reduce_dtype
        # Whether this backward has reduced gradients of the unit before: they may arrive in several groups.
        self.is_again = False
        self.home = home
        packing = form.packing(slots, mesh.shard.world, reduce_dtype.itemsize)
        self.row_numel = packing.row_numel
        self.rows, self.slices = plan_slices(
            packing,
            reduce_dtype,
            mesh.device,
            [slot.shape for slot in slots],
            [slot.gradient_dtype for slot in slots],
        )
        self._plan_own_row(form, packing)
        # Set while the all-reduce over replicas is deferred.
        self.partial: PartialSum | None = None
        self._buffer: GradientBuffer | None = None
        # The collective codes of this reduce, for each set of gradients that were present.
        self._codes: dict[object, tuple[int, int]] = {}
        self._divisions: dict[tuple[float | None, bool], Division] = {}

    def _plan_own_row(self, form: ShardedForm, packing: Packing) -> None:
        """Plans how the own row becomes the gradients of the shards."""
        self.segments = [
            _RowSegment(
                form.gradient_dtype(self.slots[segment.members[0]], self.dtype), segment.start, segment.numel
            )
            for segment in packing.segments
        ]
        self.views = form.gradient_views(self.slots, packing, self.mesh.shard.rank)
        assigned = [view for view in self.views if not view.is_none]
        self.num_assigned = len(assigned)
        self.split_sizes = _split_sizes(assigned, self.segments)
        # Whether the own row is the gradient buffer, without a cast or a transfer.
        self.needs_no_cast = (
            len(self.segments) == 1
            and self.segments[0].dtype == self.sum_dtype
            and not self.home.is_offloaded
        )
        self._lends = self._reuses_gradients and self.needs_no_cast and form.lends_gradients

    def codes(self, names: ReduceNames, settings: ReduceSettings, present: Presence) -> tuple[int, int]:
        """The codes of a reduce, over the shard axis and over replicas; named once for each set of gradients."""
        if settings.includes_unused:
            present = None
        key = (names, present, settings.divide_factor)
        codes = self._codes.get(key)
        if codes is None:
            codes = self._codes[key] = names.reduce(self, present, settings.divide_factor)
        return codes

    def begin(self, settings: ReduceSettings, streams: SideStreams, codes: tuple[int, int]) -> ReduceInFlight:
        return ReduceInFlight(self, settings, streams, codes)

    def buffer_to_fill(self) -> GradientBuffer | None:
        """The gradient buffer that a reduce writes to; None while its gradients are in use, or if there is none."""
        if not self._lends:
            return None
        if self._buffer is not None and self._buffer.is_lent:
            return None
        if self._buffer is None or not self._buffer.is_own():
            self._buffer = GradientBuffer(self.views, self.row_numel, self.dtype, self.mesh.device)
        return self._buffer

    @property
    def lent(self) -> GradientBuffer | None:
        """The gradient buffer, if it holds the current gradients of all parameters."""
        buffer = self._buffer
        return buffer if buffer is not None and buffer.is_all_lent else None

    def zero_partial(self, shards: Container[torch.Tensor], set_to_none: bool) -> None:
        """As ``zero_grad`` for these shards, of the sum that waits for its all-reduce over replicas."""
        assert self.partial is not None
        self.partial = self.partial.zeroed(shards, set_to_none, [segment.start for segment in self.segments])

    def division(self, settings: ReduceSettings) -> Division:
        key = (settings.divide_factor, settings.sums_only)
        if key not in self._divisions:
            replicate = self.mesh.replicate
            groups = [settings.calls] if replicate is None else [settings.calls, replicate]
            world = self.mesh.shard.world * (1 if replicate is None else replicate.world)
            averages = not settings.sums_only and all(calls.averages for calls in groups)
            self._divisions[key] = plan_division(
                world, self.sum_dtype == torch.float16, averages, settings.divide_factor
            )
        return self._divisions[key]


# --- packing: full gradients are cast, cut and padded into the rows, in as few kernels as possible --------------------


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


class BlockwisePack:
    """Packs each block of each gradient with a strided copy."""

    def __init__(
        self, packing: Packing | RowsSlice, rows: ElasticBuffer, dtype: torch.dtype, num_gradients: int
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
