"""Reducing a unit's gradients: from full gradients on every rank to averaged shards.

    full gradients ──pack (cast, pad)──▶ rows for all ranks ──one reduce-scatter──▶ own row ──▶ gradients of shards

Packing, summing and dividing run on the reduce lane. The own row, cast to the parameters' dtypes where that differs,
*is* the gradient buffer: the shards' gradients are views of it, and it goes when they go.

Which parameters take part is decided by ``requires_grad``, so a rank always sends the same sizes as its peers; a
parameter without a gradient this time sends zeros and receives nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardwise.comm.collectives import Work
from shardwise.comm.mesh import DataMesh
from shardwise.engine.binding import Slot
from shardwise.engine.pack import plan_pack
from shardwise.engine.storage import Elastic, contiguous_strides
from shardwise.plan.division import plan_division
from shardwise.plan.rows import RowParam, plan_rows
from shardwise.torch_internals import add_all, dtensor, local_of, post_accumulate_hooks


@dataclass(frozen=True)
class _Run:
    """Neighbours in the own row whose shards have one dtype."""

    dtype: torch.dtype
    start: int
    numel: int


class _Part(NamedTuple):
    """Where the gradient of one slot's shard lies in its run."""

    slot: Slot
    run: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class PackedReduce:
    """The reduce of one set of trainable slots, decided beforehand. At most one is under way at a time."""

    def __init__(
        self, slots: list[Slot], mesh: DataMesh, reduce_dtype: torch.dtype, shard_device: torch.device
    ) -> None:
        self.slots = slots
        self.params = [slot.unsharded for slot in slots]
        self._mesh = mesh
        self._dtype = reduce_dtype
        self._shard_device = shard_device
        itemsize = reduce_dtype.itemsize
        layout = plan_rows(
            [
                RowParam(slot.shape, slot.dim, slot.stored_dtype, slot.stored_dtype.itemsize, itemsize)
                for slot in slots
            ],
            mesh.shard.world,
        )
        self._row_numel = layout.sent_bytes // itemsize
        self._rows = Elastic(layout.world * layout.sent_bytes, mesh.device)
        self._all_rows = self._rows.tensor(reduce_dtype, 0, (layout.world * self._row_numel,))
        self._pack = plan_pack(
            layout, self._rows, reduce_dtype, [slot.compute_dtype for slot in slots], mesh.device
        )

        self._runs: list[_Run] = []
        parts: dict[int, _Part] = {}
        for number, segment in enumerate(layout.segments):
            dtype = slots[segment.members[0]].stored_dtype
            self._runs.append(_Run(dtype, segment.sent_start_bytes // itemsize, segment.numel))
            for index, start in zip(segment.members, segment.starts, strict=True):
                shape = layout.cuts[index].local_shape(mesh.shard.rank)
                parts[index] = _Part(slots[index], number, start, shape, contiguous_strides(shape))
        self._parts = [parts[index] for index in range(len(slots))]
        self._is_one_run = len(self._runs) == 1 and self._runs[0].dtype == reduce_dtype
        self._is_one_run = self._is_one_run and shard_device == mesh.device

        groups = [mesh.shard] if mesh.replicate is None else [mesh.shard, mesh.replicate]
        world = mesh.shard.world * (1 if mesh.replicate is None else mesh.replicate.world)
        self.division = plan_division(
            world, reduce_dtype == torch.float16, all(calls.averages for calls in groups)
        )

        self._work: Work | None = None
        self._own_row: torch.Tensor | None = None
        self._received: list[_Part] = []

    def issue(self, gradients: list[torch.Tensor | None]) -> None:
        """Packs the gradients and starts the reduce-scatter."""
        self._received = [
            part for part, gradient in zip(self._parts, gradients, strict=True) if gradient is not None
        ]
        if torch.is_grad_enabled():
            # backward(create_graph=True): the graph goes on from the gradients, not through their reduce.
            gradients = [None if gradient is None else gradient.detach() for gradient in gradients]
        self._rows.grow()
        self._pack.fill(gradients)
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
        runs = [own_row] if self._is_one_run else self._cast_runs(own_row)
        held: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        for slot, run, start, shape, strides in self._received:
            gradient = runs[run].as_strided(shape, strides, start)
            existing = slot.sharded.grad
            if existing is None:
                slot.sharded.grad = dtensor(gradient, slot.spec)
            else:
                held.append(local_of(existing) if isinstance(existing, DTensor) else existing)
                added.append(gradient)
        if held:
            add_all(held, added)
        return [part.slot for part in self._received]

    def _cast_runs(self, own_row: torch.Tensor) -> list[torch.Tensor]:
        """The own row in the dtypes of the shards and where they live, each run in memory of its own."""
        return [
            own_row[run.start : run.start + run.numel].to(self._shard_device, run.dtype, copy=True)
            for run in self._runs
        ]


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
