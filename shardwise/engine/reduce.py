"""Reducing a unit's gradients: from full gradients on every rank to averaged shards.

    full gradients ──pack (cast, pad)──▶ rows for all ranks ──one reduce-scatter──▶ own row ──▶ gradients of shards

Packing, summing and dividing run on the reduce lane. The own row, cast to the parameters' dtypes where that differs,
*is* the gradient buffer: the shards' gradients are views of it, and it goes when they go.

Which parameters take part is decided by ``requires_grad``, so a rank always sends the same sizes as its peers; a
parameter without a gradient this time sends zeros and receives nothing.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from shardwise.comm.collectives import Work
from shardwise.comm.mesh import DataMesh
from shardwise.engine.binding import Slot
from shardwise.engine.storage import Elastic, contiguous_strides
from shardwise.plan.division import Division, plan_division
from shardwise.plan.rows import Piece, RowParam, plan_pads, plan_pieces, plan_rows
from shardwise.torch_internals import add_all, copy_all, dtensor, local_of, post_accumulate_hooks, zero_all


class PackedReduce:
    """The reduce of one set of trainable slots, decided beforehand. At most one is under way at a time."""

    def __init__(
        self, slots: list[Slot], mesh: DataMesh, reduce_dtype: torch.dtype, shard_device: torch.device
    ) -> None:
        self._slots = slots
        self._mesh = mesh
        self._dtype = reduce_dtype
        self._shard_device = shard_device
        world, rank = mesh.shard.world, mesh.shard.rank
        layout = plan_rows(
            [
                RowParam(
                    slot.shape, slot.dim, slot.stored_dtype, slot.stored_dtype.itemsize, reduce_dtype.itemsize
                )
                for slot in slots
            ],
            world,
        )
        itemsize = reduce_dtype.itemsize
        starts = [start // itemsize for start in layout.sent_starts_bytes]
        row_numel = layout.sent_bytes // itemsize
        self._rows = Elastic(world * layout.sent_bytes, mesh.device)
        self._all_rows = self._rows.tensor(reduce_dtype, 0, (world * row_numel,))
        self._row_numel = row_numel
        self._pieces: list[list[tuple[Piece, torch.Tensor]]] = []
        for cut, start in zip(layout.cuts, starts, strict=True):
            pieces = plan_pieces(cut, start, row_numel)
            self._pieces.append([(piece, self._packed(piece)) for piece in pieces])
        self._pads = [
            self._rows.tensor(reduce_dtype, pad.packed_start * itemsize, pad.shape, pad.packed_strides)
            for pad in plan_pads(layout.cuts, starts, row_numel)
        ]
        # (stored dtype, span of the own row) for each run of one dtype, and where each slot's part lies in its run
        self._runs: list[tuple[torch.dtype, int, int]] = []
        self._parts: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = [(0, 0, (), ())] * len(slots)
        for number, segment in enumerate(layout.segments):
            first = segment.sent_start_bytes // itemsize
            self._runs.append((slots[segment.members[0]].stored_dtype, first, segment.numel))
            for index, start in zip(segment.members, segment.starts, strict=True):
                shape = layout.cuts[index].local_shape(rank)
                self._parts[index] = (number, start, shape, contiguous_strides(shape))

        averages = mesh.shard.averages and (mesh.replicate is None or mesh.replicate.averages)
        total = world * (1 if mesh.replicate is None else mesh.replicate.world)
        self.division: Division = plan_division(total, reduce_dtype == torch.float16, averages)

        self._work: Work | None = None
        self._own_row: torch.Tensor | None = None
        self._received: list[int] = []

    def _packed(self, piece: Piece) -> torch.Tensor:
        itemsize = self._dtype.itemsize
        return self._rows.tensor(
            self._dtype, piece.packed_start * itemsize, piece.shape, piece.packed_strides
        )

    def issue(self, gradients: list[torch.Tensor | None]) -> None:
        """Packs the gradients and starts the reduce-scatter."""
        self._rows.grow()
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        blanks = self._pads
        self._received = []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                blanks = blanks + [packed for _, packed in self._pieces[index]]
                continue
            self._received.append(index)
            gradient = _dense(gradient)
            for piece, packed in self._pieces[index]:
                targets.append(packed)
                start = gradient.storage_offset() + piece.full_start
                sources.append(gradient.as_strided(piece.shape, piece.full_strides, start))
        if blanks:
            zero_all(blanks)
        copy_all(targets, sources)
        if self.division.before != 1.0:
            self._all_rows.div_(self.division.before)
        self._own_row = torch.empty(self._row_numel, dtype=self._dtype, device=self._mesh.device)
        self._work = self._mesh.shard.issue_reduce_scatter(
            self._own_row, self._all_rows, self.division.group_averages
        )

    def abandon(self) -> None:
        """Lets the collective land and drops what it brought."""
        assert self._work is not None
        self._work.wait()
        self._work = self._own_row = None
        self._rows.shrink()

    def finish(self) -> list[Slot]:
        """Waits, divides, and gives the slots that had a gradient their reduced one; returns those slots."""
        assert self._work is not None
        assert self._own_row is not None
        self._work.wait()
        own_row, self._work, self._own_row = self._own_row, None, None
        self._rows.shrink()
        if self._mesh.replicate is not None:
            self._mesh.replicate.issue_all_reduce(own_row, self.division.group_averages).wait()
        if self.division.after != 1.0:
            own_row.div_(self.division.after)
        runs = [
            own_row[first : first + numel].to(self._shard_device, dtype) for dtype, first, numel in self._runs
        ]

        held: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        received = [self._slots[index] for index in self._received]
        for index, slot in zip(self._received, received, strict=True):
            run, start, shape, strides = self._parts[index]
            part = runs[run].as_strided(shape, strides, runs[run].storage_offset() + start)
            existing = slot.sharded.grad
            if existing is None:
                slot.sharded.grad = dtensor(part, slot.spec)
            else:
                held.append(local_of(existing) if isinstance(existing, DTensor) else existing)
                added.append(part)
        if held:
            add_all(held, added)
        return received


def run_user_hooks(slots: list[Slot]) -> bool:
    """Runs the post-accumulate hooks that users registered on sharded parameters, now that gradients are in place."""
    any_ran = False
    for slot in slots:
        hooks = post_accumulate_hooks(slot.sharded)
        if hooks:
            any_ran = True
            for hook in tuple(hooks.values()):
                hook(slot.sharded)
    return any_ran


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    return gradient if gradient.is_contiguous() else gradient.contiguous()
