"""``planned_memory``: the peak memory of a sharded model's step, known before the step.

planned = planned_memory(model)
planned.backward.total     # bytes on this rank's device
planned.backward.by_kind   # what holds them
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from shardwise.engine.unit.membership import units_in, units_of
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError, StateError
from shardwise.planning.lifecycle import KEEP
from shardwise.planning.memory import StepMemory, UnitBytes, step_memory


def planned_memory(
    model: nn.Module, *, holds_gradients: bool = False, syncs: bool = True, holds_stash: bool = False
) -> StepMemory:
    """Returns how much memory the library itself holds on this rank's device in a step, and what holds it.

    Shards, gathered parameters, gradients and what communication needs are counted to the byte, for a device with a
    process group such as NCCL's; an allocator rounds each of them up. Activations, optimizer state, and the workspaces
    of kernels and of the process group come on top. Units are taken to run in the order in which they are registered.

    Args:
        model: the whole sharded model, with memory (not on the meta device).
        holds_gradients: plan a backward that adds to gradients of an earlier one.
        syncs: ``False`` plans a backward without gradient sync (``set_requires_gradient_sync(False)``).
        holds_stash: plan a backward that adds to gradients of an earlier one without sync.
    """
    units = units_in(model.modules())
    if not units or units[0] not in units_of(model):
        raise ConfigError(
            "the model is not sharded as a whole",
            where="planned_memory",
            fix="shard it first: fully_shard(model), or FullyShardedDataParallel(model)",
        )
    root, *others = units
    for unit in units:
        if not unit.has_memory:
            raise StateError(
                f"unit '{unit.name}' is still on the meta device",
                where="planned_memory",
                fix="give it memory first: model.to_empty(device=...)",
            )
    _check_not_nested(others)
    in_root = _unit_bytes(root)
    return step_memory(in_root, [_unit_bytes(unit) for unit in others], holds_gradients, syncs, holds_stash)


def _check_not_nested(units: list[Unit]) -> None:
    """Raises if a unit lies inside another one: the outer one would be gathered while the inner one runs."""
    for unit in units:
        inside = {inner for module in unit.modules for below in module.modules() for inner in units_of(below)}
        if inside != {unit}:
            raise ConfigError(
                f"unit '{unit.name}' has other units inside, for which no memory is planned",
                where="planned_memory",
                fix="shard blocks and the whole model, and nothing in between",
            )


def _unit_bytes(unit: Unit) -> UnitBytes:
    buffers, settings = unit.buffers, unit.settings
    full = buffers.full_bytes
    found = UnitBytes(
        unit.name,
        shards=0 if unit.home.is_offloaded else buffers.shards.nbytes,
        full=full,
        gathering=buffers.gather.temporary_bytes,
        gradients=0,
        rows=0,
        own_row=0,
        shard_gradients=0,
        is_kept=settings.after_forward is KEEP,
        part=buffers.gather.part_bytes,
        gathering_from_part=buffers.gather.rows_bytes,
    )
    plan = unit.gradients.plan
    if plan is None:
        return found
    is_exact = unit.gradients.sums.is_exact
    segments = () if plan.home.is_offloaded else plan.segments
    shard_gradients = sum(segment.numel * segment.dtype.itemsize for segment in segments)
    reduce_dtype = settings.precision.reduce_dtype
    rows_in_full = unit.settings.frees_after_backward and unit.gradients.rows_fit(plan)
    return replace(
        found,
        gradients=sum(slot.unsharded.nbytes for slot in plan.slots),
        rows=0 if rows_in_full else plan.rows.size_bytes,
        own_row=plan.row_numel * plan.sum_dtype.itemsize,
        shard_gradients=shard_gradients,
        summing=plan.rows.size_bytes if is_exact and plan.mesh.shard.world > 1 else 0,
        summing_to_existing=shard_gradients if is_exact else 0,
        stash=sum(
            slot.unsharded.numel()
            * max(reduce_dtype.itemsize if reduce_dtype else 0, slot.gradient_dtype.itemsize)
            for slot in plan.slots
        ),
        is_sliced=len(plan.slices) > 1,
        rows_in_full=rows_in_full,
    )
