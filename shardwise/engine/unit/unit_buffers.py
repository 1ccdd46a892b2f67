"""The buffers of a unit: its shards, which stay, and its full parameters, which are allocated for each gather.

Laid out once for the slots; when users replace parameters, the unit makes new buffers.
"""

from __future__ import annotations

import torch
from torch import nn

from shardwise.comm.collectives.group import GroupCollectives
from shardwise.comm.mesh import DataMesh
from shardwise.engine.buffers import ElasticBuffer, PermanentBuffer, allocate_shards
from shardwise.engine.gather.tensor_extensions import TensorExtension, is_tensor_extension
from shardwise.engine.gather.unit_gather import UnitGather
from shardwise.engine.unit.binding import Slot
from shardwise.engine.unit.dtensor_form import ShardedForm
from shardwise.engine.unit.settings import ShardHome
from shardwise.planning.layout import Layout, RowParam
from shardwise.planning.memory import GATHERED
from shardwise.policies import MixedPrecisionPolicy
from shardwise.torch_internals import dtensor

# How much larger than the full parameters their memory may be, for padding.
_MOST_PADDED = 1.0625


class UnitBuffers:
    """A unit's buffers. Making them moves the slots' values into the shards and sets their unsharded parameters."""

    def __init__(
        self,
        slots: list[Slot],
        form: ShardedForm,
        mesh: DataMesh,
        precision: MixedPrecisionPolicy,
        home: ShardHome,
        gather_calls: GroupCollectives,
        part_calls: GroupCollectives | None,
    ) -> None:
        world = mesh.shard.world
        plain = [slot for slot in slots if not is_tensor_extension(slot.local)]
        self._extensions = [
            TensorExtension(slot, mesh.shard_axis, precision, world)
            for slot in slots
            if is_tensor_extension(slot.local)
        ]
        params = [_row_param(slot, precision) for slot in plain]
        stored = [slot.stored_dtype for slot in plain]
        sent = [slot.compute_dtype for slot in plain]
        for extension in self._extensions:
            params += extension.row_params()
            stored += extension.input_dtypes
            sent += extension.input_dtypes
        layout = form.plan(params, world)

        shards, parts = allocate_shards(layout, home.device, stored, mesh.shard.rank, home.pins)
        # Where each shard starts, in order: flat optimizers step neighbours as one tensor.
        starts = [layout.shard_start_bytes(index, mesh.shard.rank) for index in range(len(plain))]
        self.shards = shards
        self.starts_bytes = {
            plain[index]: starts[index] for index in sorted(range(len(plain)), key=starts.__getitem__)
        }
        for slot, part in zip(plain, parts, strict=False):
            slot.move_into(part)
        form.bind_shards(shards, layout)

        is_whole = (
            form.uses_whole_shards
            and world == 1
            and layout.is_in_place
            and stored == sent
            and shards.device == mesh.device
        )
        self._full = (
            PermanentBuffer(shards)
            if is_whole
            else ElasticBuffer(_with_room_for_rows(layout), mesh.device, GATHERED)
        )
        self.shares_memory = self._full.frees
        # All of the full parameters' memory: once they are freed, the rows of their reduce may lie in it.
        self.full_memory = self._full.tensor(torch.uint8, 0, (self._full.size_bytes,))
        # The memory that a gather allocates for the full parameters.
        self.full_bytes = self._full.size_bytes
        self.gather = UnitGather(
            layout, shards, stored, sent, self._full, mesh.device, gather_calls, part_calls, self._extensions
        )
        fulls = [
            self._full.tensor(dtype, start, param.shape)
            for param, dtype, start in zip(params, sent, layout.full_starts_bytes, strict=True)
        ]
        for slot, full in zip(plain, fulls, strict=False):
            slot.unsharded = _parameter(slot, full)
        self._allocate_extensions(parts[len(plain) :], fulls[len(plain) :])

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether rows of this size fit into the memory of the full parameters."""
        return 0 < num_bytes <= self.full_bytes and not self._extensions

    def free_full(self) -> None:
        self.gather.free()

    def are_for(self, slots: list[Slot]) -> bool:
        """Whether the same slots are tensor extensions as when the buffers were made; users may define more."""
        return [extension.slot for extension in self._extensions] == [
            slot for slot in slots if is_tensor_extension(slot.local)
        ]

    def _allocate_extensions(self, parts: list[torch.Tensor], fulls: list[torch.Tensor]) -> None:
        if not self._extensions:
            return
        self._full.grow()
        start = 0
        for extension in self._extensions:
            stop = start + len(extension.input_dtypes)
            extension.allocate(parts[start:stop], fulls[start:stop])
            start = stop
        self.gather.free()


def _with_room_for_rows(layout: Layout) -> int:
    """The size of the full parameters' memory: rows of gradients fit into it, too, if only their padding is larger."""
    rows = layout.world * layout.sent_bytes
    return rows if layout.full_bytes < rows <= layout.full_bytes * _MOST_PADDED else layout.full_bytes


def _row_param(slot: Slot, precision: MixedPrecisionPolicy) -> RowParam:
    stored, sent = slot.stored_dtype, slot.compute_dtype
    reduced = precision.reduce_dtype or sent
    return RowParam(
        slot.shape, slot.dim, slot.kind, stored.itemsize, sent.itemsize, grid_itemsize=reduced.itemsize
    )


def _parameter(slot: Slot, full: torch.Tensor) -> nn.Parameter:
    if slot.tensor_parallel is not None:
        full = dtensor(full, slot.tensor_parallel)
    return nn.Parameter(full, requires_grad=slot.sharded.requires_grad)
