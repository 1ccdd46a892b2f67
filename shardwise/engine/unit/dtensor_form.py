"""Sharded forms: how a unit's parameters are cut over ranks, and what modules show while they are sharded.

The API that makes a unit chooses its form. ``DTensorForm`` is ``fully_shard``'s: each parameter is cut along a dim and
shown as a DTensor. ``flat_form`` has the wrapper's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from shardwise.comm.dry_run import is_dry
from shardwise.comm.mesh import DataMesh
from shardwise.engine.buffers import GradientView, contiguous_strides
from shardwise.engine.gather.tensor_extensions import cut_extension, is_tensor_extension
from shardwise.engine.unit.binding import FoundParameter, ShownEntry, Slot
from shardwise.errors import ConfigError
from shardwise.planning.layout import Layout, Packing, RowParam, cut_evenly
from shardwise.planning.rows import RowsPacking, plan_rows
from shardwise.policies import MixedPrecisionPolicy, ShardPlacementResult, is_record_named
from shardwise.torch_internals import (
    all_show,
    concatenate_meshes,
    dtensor_parameter,
    dtensor_spec,
    local_of,
    strided_shard,
)

PlacementFn = Callable[[nn.Parameter], "Shard | ShardPlacementResult | None"]


class ShardedForm(Protocol):
    """Everything in the engine that depends on how parameters are cut."""

    # Whether gradients of shards may share one buffer that every backward reuses.
    lends_gradients: bool
    # Whether parameters sharded over one rank, and computed in their stored dtype, are used without a copy.
    uses_whole_shards: bool
    # Whether the versions of shards tell of every write. Those of plain tensors do not tell of ``param.data.copy_()``.
    sees_all_writes: bool
    # Whether a write to one trained parameter counts as a write to all of them: an optimizer skips a parameter on ranks
    # that have no elements of it, but ranks are to notice its step alike.
    are_written_together: bool
    # Whether modules show shards between forward and backward where parameters stay gathered for backward's sake alone.
    hides_kept: bool

    def make_slots(
        self,
        found: list[FoundParameter],
        mesh: DataMesh,
        precision: MixedPrecisionPolicy,
        device: torch.device,
        where: str,
    ) -> list[Slot]:
        """Makes the slots of a unit whose shards will live on ``device``."""

    def plan(self, params: list[RowParam], world: int) -> Layout: ...

    def bind_shards(self, shards: torch.Tensor, layout: Layout) -> None:
        """Called when the slots have moved into a new buffer of shards."""

    def packing(self, slots: list[Slot], world: int, itemsize: int) -> Packing:
        """Lays out the gradients of these slots for a reduce, in a dtype of that size."""

    def gradient_views(self, slots: list[Slot], packing: Packing, rank: int) -> list[GradientView]:
        """Returns where the gradients of the shards are in a reduced row."""

    def gradient_dtype(self, slot: Slot, reduce_dtype: torch.dtype) -> torch.dtype:
        """The dtype of a sharded parameter's gradient."""

    def flat_entries(self) -> Sequence[ShownEntry]:
        """What modules show only while the unit is sharded: its flat parameters."""

    def snapshot(self, slots: list[Slot]) -> Sequence[Any]:
        """Records what modules show, for ``all_show``."""

    def all_show(self, snapshot: Any) -> bool:
        """Whether modules still show the parameters of ``snapshot``: none replaced, frozen or thawed."""

    def named(self, slots: list[Slot], shown: Container[int]) -> list[Slot]:
        """Returns the slots that stay in the unit when some have lost all their names to ties.

        ``shown`` has the ids of the parameters that modules show under names of other units.
        """

    def found(self, slots: list[Slot], where: str) -> list[nn.Parameter | None]:
        """Returns what modules show where the sharded parameters were: users may have replaced them."""

    def own_part(self, slot: Slot, whole: torch.Tensor, mesh: DataMesh) -> torch.Tensor | None:
        """Returns this rank's shard of a full parameter; None where the shard is not a part of it."""


class DTensorForm:
    """Each parameter is cut along one dim, and shown as a DTensor."""

    lends_gradients = True
    uses_whole_shards = False
    sees_all_writes = True
    are_written_together = False
    hides_kept = False

    def __init__(self, placement_fn: PlacementFn | None) -> None:
        self.placement_fn = placement_fn
        self.all_show = all_show

    def make_slots(
        self,
        found: list[FoundParameter],
        mesh: DataMesh,
        precision: MixedPrecisionPolicy,
        device: torch.device,
        where: str,
    ) -> list[Slot]:
        dims = [chosen_placement(each, self.placement_fn, where)[0] % each.param.dim() for each in found]
        return [_make_slot(each, dim, mesh, precision, device) for each, dim in zip(found, dims, strict=True)]

    def plan(self, params: list[RowParam], world: int) -> Layout:
        return plan_rows(params, world)

    def bind_shards(self, shards: torch.Tensor, layout: Layout) -> None:
        pass

    def packing(self, slots: list[Slot], world: int, itemsize: int) -> Packing:
        params = [
            RowParam(
                slot.shape,
                slot.dim,
                slot.stored_dtype,
                slot.stored_dtype.itemsize,
                itemsize,
                # As for the shards, so that neighbours there are neighbours here.
                grid_itemsize=slot.compute_dtype.itemsize,
            )
            for slot in slots
        ]
        return RowsPacking(plan_rows(params, world))

    def gradient_views(self, slots: list[Slot], packing: Packing, rank: int) -> list[GradientView]:
        return gradient_views_by_slot(slots, packing, rank)

    def gradient_dtype(self, slot: Slot, reduce_dtype: torch.dtype) -> torch.dtype:
        return slot.stored_dtype

    def flat_entries(self) -> Sequence[ShownEntry]:
        return ()

    def snapshot(self, slots: list[Slot]) -> list[Any]:
        return [
            (place.params, place.name, slot.sharded, slot.local, slot.sharded.requires_grad)
            for slot in slots
            for place in slot.places
        ]

    def named(self, slots: list[Slot], shown: Container[int]) -> list[Slot]:
        return [slot for slot in slots if slot.places or id(slot.sharded) in shown]

    def found(self, slots: list[Slot], where: str) -> list[nn.Parameter | None]:
        return [slot.found() for slot in slots]

    def own_part(self, slot: Slot, whole: torch.Tensor, mesh: DataMesh) -> torch.Tensor | None:
        if slot.tensor_parallel is not None or is_tensor_extension(slot.local):
            return None
        span = cut_evenly(slot.shape[slot.dim], mesh.shard.world, mesh.shard.rank)
        return whole.detach().narrow(slot.dim, span.start, span.numel)


def gradient_views_by_slot(slots: list[Slot], packing: Packing, rank: int) -> list[GradientView]:
    """Returns one gradient view for each slot."""
    runs = {index: run for run, section in enumerate(packing.segments) for index in section.members}
    parts = []
    for index, slot in enumerate(slots):
        shape = packing.shard_shape(index, rank)
        start = packing.shard_start(index, rank)
        parts.append(GradientView(slot, runs[index], start, shape, contiguous_strides(shape), (index,)))
    return parts


def chosen_placement(found: FoundParameter, placement_fn: PlacementFn | None, where: str) -> tuple[int, Any]:
    """Returns the dim to shard a parameter along, and what describes its mesh; None: the unit's mesh."""
    param = found.param
    placement: Any = placement_fn(param) if placement_fn is not None else None
    mesh_info = None
    if is_record_named(ShardPlacementResult.__name__, placement):
        placement, mesh_info = placement.placement, placement.mesh_info
    if placement is None:
        return 0, mesh_info
    if not isinstance(placement, Shard):
        raise ConfigError(
            f"shard_placement_fn returned {placement!r} for a parameter of shape {tuple(param.shape)}",
            where=f"parameter '{found.name}', {where}",
            fix="return a torch.distributed.tensor.Shard(dim), or None for Shard(0)",
        )
    return placement.dim, mesh_info


def _make_slot(
    found: FoundParameter, dim: int, mesh: DataMesh, precision: MixedPrecisionPolicy, device: torch.device
) -> Slot:
    param = found.param
    casts = precision.param_dtype is not None and param.is_floating_point()
    compute_dtype = precision.param_dtype if casts else param.dtype
    assert compute_dtype is not None
    full, tensor_parallel = param.detach(), None
    data_axes: tuple[int, ...] = ()
    data_mesh, placements = mesh.mesh, mesh.placements(dim)
    if isinstance(param, DTensor):
        tensor_parallel = dtensor_spec(
            param.device_mesh, param.placements, param.shape, param.stride(), compute_dtype
        )
        data_axes = mesh.named if param.device_mesh == mesh.whole else ()
        data_mesh, placements = placed_on_both(param, dim, mesh, data_axes)
        full = local_of(full)
    spec = dtensor_spec(
        data_mesh, placements, param.shape, contiguous_strides(tuple(param.shape)), param.dtype
    )
    # The DTensor must have the right device from the start. Its values move to the unit's buffer and this copy is
    # freed; but a tensor extension keeps its own storage.
    if is_tensor_extension(full):
        local = cut_extension(full, dim, mesh.shard.world, mesh.shard.rank, device)
    else:
        span = cut_evenly(full.shape[dim], mesh.shard.world, mesh.shard.rank)
        local = full.narrow(dim, span.start, span.numel)
        if is_dry(mesh.device) and device.type == "cpu":
            local = torch.empty_like(local, device=device)
        local = local if local.device.type == "meta" else local.to(device)
        # A copy where it has a storage offset: torch fails to copy a DTensor that was made with one.
        local = local.clone() if local.storage_offset() else local
        local = local.contiguous()
    sharded = dtensor_parameter(local, spec, param.requires_grad)
    for key, value in _attributes_of_users(param, full):
        sharded.__dict__.setdefault(key, value)
    return Slot(
        found.name,
        found.places,
        dim,
        tuple(full.shape),
        compute_dtype,
        spec,
        sharded,
        tensor_parallel,
        data_axes,
        casts,
    )


def _attributes_of_users(param: nn.Parameter, full: torch.Tensor) -> list[tuple[str, object]]:
    """Returns what users have set on a parameter, not the inner tensors of a tensor subclass.

    A subclass of ``nn.Parameter`` describes itself with its attributes (bitsandbytes: how it was quantized), and the
    shard is not of that class.
    """
    # Not isinstance: parameters of every tensor class claim to be instances of nn.Parameter.
    if type(param) is not nn.Parameter and nn.Parameter in type(param).__mro__:
        return []
    return [(key, value) for key, value in param.__dict__.items() if key not in full.__dict__]


def placed_on_both(
    param: DTensor, dim: int, mesh: DataMesh, data_axes: tuple[int, ...]
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Returns the mesh of data and tensor parallelism together, and a tensor-parallel parameter's placements on it."""
    *replicate, shard = mesh.placements(dim)
    others = [axis for axis in range(param.device_mesh.ndim) if axis not in data_axes]
    if len(others) + mesh.mesh.ndim == param.device_mesh.ndim:
        # Its mesh has both kinds of axes; the last named one shards it.
        placements = list(param.placements)
        axis = mesh.named[-1]
        placements[axis] = _cut_after(param, dim, [other for other in others if other > axis], shard)
        return param.device_mesh, tuple(placements)
    meshes = [mesh.mesh]
    if len(others) == param.device_mesh.ndim:
        meshes.append(param.device_mesh)
    else:
        names = param.device_mesh.mesh_dim_names or ()
        meshes.extend(param.device_mesh[names[axis]] for axis in others)
    placed = [param.placements[axis] for axis in others]
    return concatenate_meshes(meshes), (*replicate, _cut_after(param, dim, others, shard), *placed)


def _cut_after(param: DTensor, dim: int, axes: list[int], shard: Placement) -> Placement:
    """Returns ``shard``, or a strided one where tensor parallelism on ``axes`` has already cut ``dim``."""
    cuts_of_dim = 1
    for axis in axes:
        placement = param.placements[axis]
        if isinstance(placement, Shard) and placement.dim == dim:
            cuts_of_dim *= param.device_mesh.size(axis)
    return strided_shard(dim, cuts_of_dim) if cuts_of_dim > 1 and isinstance(shard, Shard) else shard
