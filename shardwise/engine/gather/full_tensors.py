"""Gathers full tensors of flat units between steps, and writes them back to the shards.

For state dicts, ``summon_full_params`` and optimizer states: into new memory, in the stored dtype. The unit's own
unsharded parameters, in the compute dtype, are gathered by ``unit_gather``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import is_tensor_like

from shardwise.comm.channels.channel import UNNAMED
from shardwise.comm.channels.registry import channel_of
from shardwise.comm.collectives.agreement import gather_objects
from shardwise.engine.unit.flat_form import FlatForm, FlatSlot, Line
from shardwise.engine.unit.replaced import take_back_replaced
from shardwise.engine.unit.unit import Unit
from shardwise.errors import RankDisagreement
from shardwise.torch_internals import (
    ShardedTensor,
    dtensor,
    group_of_sharded_tensor,
    local_of,
    redistributed_local,
    unseen_by_modes,
)


def flat_form(unit: Unit) -> FlatForm:
    assert isinstance(unit.form, FlatForm)
    return unit.form


def is_flat(unit: Unit) -> bool:
    """Whether the unit was made by ``FullyShardedDataParallel``."""
    return isinstance(unit.form, FlatForm)


def flat_slots(unit: Unit) -> list[FlatSlot]:
    return [slot for slot in unit.slots if isinstance(slot, FlatSlot)]


def full_tensor_of(value: Any) -> Any:
    """The full tensor of a DTensor or ShardedTensor, on the device of its shards; any other value unchanged.

    Every rank of the group that it is sharded over must call it.
    """
    if isinstance(value, ShardedTensor):
        return _gather_sharded_tensor(value)
    if not isinstance(value, DTensor):
        return value
    # Shards on the host are gathered on the mesh's device: its group may support no other.
    on_device = value.to(value.device_mesh.device_type)
    assert isinstance(on_device, DTensor)
    return on_device.full_tensor().to(value.device)


def _gather_sharded_tensor(value: ShardedTensor) -> torch.Tensor:
    shards = value.local_shards()
    calls = channel_of(*group_of_sharded_tensor(value))
    blocks = gather_objects(
        [(shard.metadata.shard_offsets, list(shard.tensor.shape)) for shard in shards], calls
    )
    row_numel = max(sum(prod(sizes) for _, sizes in own) for own in blocks)
    row = torch.zeros(row_numel, dtype=value.dtype, device=calls.device)
    start = 0
    for shard in shards:
        row[start : start + shard.tensor.numel()] = shard.tensor.detach().reshape(-1)
        start += shard.tensor.numel()
    rows = torch.empty(calls.world, row_numel, dtype=value.dtype, device=calls.device)
    if row_numel:
        with unseen_by_modes():
            calls.issue_all_gather(rows.view(-1).view(torch.uint8), row.view(torch.uint8)).wait()
    full = torch.empty(value.size(), dtype=value.dtype, device=calls.device)
    for received, own in zip(rows, blocks, strict=True):
        start = 0
        for offsets, sizes in own:
            block = received[start : start + prod(sizes)].view(sizes)
            full[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))] = (
                block
            )
            start += prod(sizes)
    return full.to(shards[0].tensor.device) if shards else full


def loaded(value: Any) -> Any:
    """A tensor that a library reads from its file when it is first used, as a tensor; any other value unchanged."""
    if isinstance(value, torch.Tensor) or not is_tensor_like(value):
        return value
    return torch.detach(value)


def assemble_shard(
    line: Line,
    parts: Sequence[torch.Tensor | None],
    shard_numel: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Assembles a rank's shard of a flat segment from its elements of each parameter; zeros where it has none."""
    shard = torch.zeros(shard_numel, dtype=dtype, device=device)
    for slot, part in zip(line.slots, parts, strict=True):
        if part is not None:
            shard[slot.start : slot.start + slot.span.numel] = part.reshape(-1)
    return shard


def local_elements(slot: FlatSlot, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a slot, in a tensor shaped like the sharded parameter that the module shows."""
    flat = tensor.reshape(-1)
    return flat if slot.is_shown else flat[slot.start : slot.start + slot.span.numel]


def gather_segment(unit: Unit, shard: torch.Tensor) -> torch.Tensor:
    """Gathers every rank's shard of a flat segment, end to end, on the compute device."""
    calls, root = unit.mesh.shard, unit.root
    own = shard.detach().contiguous().to(unit.mesh.device)
    # order: writes to the shards before this gather, because it reads them on a side stream
    root.streams.gather.wait_compute()
    with unseen_by_modes(), root.streams.gather:
        full = torch.empty(calls.world * own.numel(), dtype=own.dtype, device=own.device)
        calls.issue_all_gather(full.view(torch.uint8), own.view(torch.uint8), UNNAMED).wait()
        arrival = root.streams.gather.record_event()
    # order: the gather before compute, because the caller reads what it received
    root.streams.compute_waits_for(arrival)
    return full


def full_tensors_of(unit: Unit, number: int, values: torch.Tensor) -> list[torch.Tensor]:
    """The parameters in gathered segment ``number``, as views of it in their own shapes."""
    layout = flat_form(unit).layout
    segment = layout.segments[number]
    return [
        values[start : start + layout.numels[index]].view(slot.shape)
        for index, start, slot in zip(
            segment.members, segment.starts, flat_form(unit).lines[number].slots, strict=True
        )
    ]


def gather_parameters(unit: Unit) -> dict[FlatSlot, torch.Tensor]:
    """Gathers every parameter of the unit, in its stored dtype. Every rank must call it."""
    take_back_replaced(unit)
    found: dict[FlatSlot, torch.Tensor] = {}
    for number, line in enumerate(flat_form(unit).lines):
        full = gather_segment(unit, line.share)
        found.update(zip(line.slots, full_tensors_of(unit, number, full), strict=True))
    return found


def gather_gradients(unit: Unit) -> dict[FlatSlot, torch.Tensor]:
    """Gathers the gradients of the shards. Every rank must call it, with gradients of the same parameters."""
    dtypes = _dtypes_of_gradients(unit)
    found: dict[FlatSlot, torch.Tensor] = {}
    for number, line in enumerate(flat_form(unit).lines):
        shard_numel = flat_form(unit).layout.segments[number].numel
        for dtype in dict.fromkeys(dtypes[slot] for slot in line.slots if slot in dtypes):
            chosen = [slot if dtypes.get(slot) is dtype else None for slot in line.slots]
            parts = [None if slot is None else _gradient_elements(slot) for slot in chosen]
            shard = assemble_shard(line, parts, shard_numel, dtype, unit.mesh.device)
            fulls = full_tensors_of(unit, number, gather_segment(unit, shard))
            found.update((slot, full) for slot, full in zip(chosen, fulls, strict=True) if slot is not None)
    return found


def _dtypes_of_gradients(unit: Unit) -> dict[FlatSlot, torch.dtype]:
    """The dtype of each slot's gradient; raises if ranks that hold elements of the slot disagree."""
    slots = flat_slots(unit)
    own = [None if (gradient := slot.sharded.grad) is None else gradient.dtype for slot in slots]
    by_rank = gather_objects(own, unit.mesh.shard)
    dtypes: dict[FlatSlot, torch.dtype] = {}
    for index, slot in enumerate(slots):
        reported = {rank: by_rank[rank][index] for rank in ranks_with_elements(unit, index)}
        if len(set(reported.values())) > 1:
            raise RankDisagreement(
                f"the gradient of parameter '{slot.name}' differs between ranks: "
                + ", ".join(
                    f"{dtype or 'none'} on rank {rank} of the group" for rank, dtype in reported.items()
                ),
                where=f"unit '{unit.name}', rank {unit.rank}, with_grads=True",
                fix="set or drop this gradient on all ranks, in one dtype",
            )
        if dtype := next(iter(reported.values()), None):
            dtypes[slot] = dtype
    return dtypes


def ranks_with_elements(unit: Unit, index: int) -> list[int]:
    """The ranks of the shard group that hold elements of a slot; all ranks if the slot has no elements."""
    layout, ranks = flat_form(unit).layout, range(unit.mesh.shard.world)
    return [rank for rank in ranks if layout.shard_span(index, rank).numel] or list(ranks)


def _gradient_elements(slot: FlatSlot) -> torch.Tensor | None:
    gradient = slot.sharded.grad
    return None if gradient is None else local_elements(slot, gradient)


def as_shown(slot: FlatSlot, part: torch.Tensor) -> torch.Tensor:
    """A gathered tensor as modules show it: with tensor parallelism a DTensor, of which ``part`` is this rank's."""
    spec = slot.placement(part.dtype)
    return part if spec is None else dtensor(part, spec)


def whole_tensor(slot: FlatSlot, part: torch.Tensor) -> torch.Tensor:
    """A gathered tensor in full: with tensor parallelism, all ranks' parts of it. Every rank must call it."""
    shown = as_shown(slot, part)
    return shown.full_tensor() if isinstance(shown, DTensor) else part


def own_part(slot: FlatSlot, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a full tensor or DTensor with tensor parallelism; without, the tensor."""
    spec = slot.placement(tensor.dtype)
    if spec is None:
        return tensor
    if isinstance(tensor, DTensor):
        return redistributed_local(tensor, spec)
    if tuple(tensor.shape) != slot.whole_shape or slot.shape == slot.whole_shape:
        return tensor
    # No communication: every rank has all of it.
    return local_of(distribute_tensor(tensor, spec.mesh, spec.placements, src_data_rank=None))


def shard_elements(slot: FlatSlot, full: torch.Tensor) -> torch.Tensor:
    """The elements of a full tensor that this rank holds."""
    return own_part(slot, full).reshape(-1)[slot.span.start : slot.span.stop]


def write_parameter(slot: FlatSlot, full: torch.Tensor) -> None:
    """Copies this rank's elements into the sharded parameter, so that a unit kept unsharded notices the change."""
    with torch.no_grad():
        local_elements(slot, slot.sharded).copy_(shard_elements(slot, full))
