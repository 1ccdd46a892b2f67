"""How the parameters of a whole-matrix optimizer lie on the ranks, and the group over which their elements travel.

A parameter may be a DTensor of any mesh (``fully_shard``, with or without replicas and tensor parallelism), a span of
elements under its own name (``FullyShardedDataParallel``), or a plain tensor that every rank has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.comm.channels.channel import SingleRankChannel
from shardwise.comm.channels.registry import channel_of
from shardwise.comm.collectives.agreement import gather_objects
from shardwise.comm.collectives.group import GroupCollectives
from shardwise.comm.exchange import transport_device
from shardwise.engine.gather.full_tensors import local_elements
from shardwise.engine.unit.binding import Slot
from shardwise.engine.unit.flat_form import FlatSlot
from shardwise.engine.unit.membership import membership
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError, RankDisagreement
from shardwise.planning.layout import cut_evenly
from shardwise.planning.matrix_owners import Held, HeldBlock, is_complete
from shardwise.torch_internals import local_of

WHERE = "shardwise.optim.whole"

Version = tuple[int, int, int, int]
_version = attrgetter("_version")
# Five times as fast as a method looked up on each tensor.
_data_ptr = torch.Tensor.data_ptr


class HeldParameter:
    """One parameter: its full shape, and what this rank holds of it."""

    def __init__(self, param: torch.Tensor, index: int) -> None:
        self.param = param
        self.index = index
        self.unit: Unit | None = None
        self.slot: Slot | None = None
        if (found := membership(param)) is not None:
            self.unit, self.slot = found
        if isinstance(self.slot, FlatSlot) and not self.slot.is_shown:
            raise ConfigError(
                f"a flat parameter of {param.numel()} elements holds parts of many matrices",
                where=f"{WHERE}(...), {self.name}",
                fix="wrap the model with use_orig_params=True",
            )
        if isinstance(param, DTensor) and any(place.is_partial() for place in param.placements):
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} is placed {param.placements}: no rank has its values",
                where=f"{WHERE}(...), {self.name}",
                fix="redistribute it to Shard or Replicate",
            )
        self.shape: tuple[int, ...] = (
            self.slot.shape if isinstance(self.slot, FlatSlot) else tuple(param.shape)
        )
        self.block = self._own_block()
        self.has_elements = self.block.numel > 0

    @property
    def name(self) -> str:
        if self.unit is None or self.slot is None:
            return f"parameter {self.index}"
        return f"'{self.unit.name}.{self.slot.name}'" if self.unit.name else f"'{self.slot.name}'"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_flat(self) -> bool:
        return isinstance(self.slot, FlatSlot)

    def _own_block(self) -> HeldBlock:
        if isinstance(self.slot, FlatSlot):
            return HeldBlock((self.slot.span.start,), (self.slot.span.numel,), is_flat=True)
        if isinstance(self.param, DTensor):
            return block_of(self.param)
        return HeldBlock((0,) * self.param.dim(), tuple(self.param.shape))

    def block_on(self, rank: int) -> HeldBlock:
        """What another rank holds, as far as placements tell."""
        if not isinstance(self.param, DTensor):
            return self.block
        mesh = self.param.device_mesh
        coordinate = (mesh.mesh == rank).nonzero()[0].tolist()
        offsets, sizes = [0] * self.param.dim(), list(self.shape)
        for axis, place in enumerate(self.param.placements):
            if isinstance(place, Shard):
                span = cut_evenly(sizes[place.dim], mesh.size(axis), coordinate[axis])
                offsets[place.dim] += span.start
                sizes[place.dim] = span.numel
        return HeldBlock(tuple(offsets), tuple(sizes))

    def local(self) -> torch.Tensor:
        """This rank's elements, in the shape of its block."""
        return self.elements_of(self.param)

    def local_gradient(self) -> torch.Tensor | None:
        gradient = self.param.grad
        if gradient is None:
            return None
        if (
            isinstance(gradient, DTensor)
            and isinstance(self.param, DTensor)
            and gradient.placements != self.param.placements
        ):
            gradient = gradient.redistribute(placements=self.param.placements)
        return self.elements_of(gradient)

    def elements_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's elements, in a tensor like the parameter."""
        if isinstance(tensor, DTensor):
            # Not detached: a DTensor takes long for that.
            return local_of(tensor)
        if isinstance(self.slot, FlatSlot):
            return local_elements(self.slot, tensor.detach())
        return tensor.detach()

    def replacement(self) -> torch.Tensor | None:
        """The parameter that replaced this one in its unit, as ``load_state_dict(assign=True)`` does; mostly None."""
        slot = self.slot
        if slot is None or slot.sharded is self.param or type(slot.sharded) is not type(self.param):
            return None
        return slot.sharded


def versions_of(held: Iterable[HeldParameter]) -> list[Version]:
    """For each parameter, what differs after any write to it, or after it was replaced."""
    params = [each.param for each in held]
    locals_ = [local_of(param) if isinstance(param, DTensor) else param for param in params]
    return list(
        zip(
            map(id, params),
            map(_version, params),
            map(_data_ptr, locals_),
            map(_version, locals_),
            strict=True,
        )
    )


def block_of(tensor: DTensor) -> HeldBlock:
    """This rank's block of a DTensor."""
    local = local_of(tensor)
    if not local.numel():
        return HeldBlock((0,) * tensor.dim(), (0,) * tensor.dim())
    (chunk,) = tensor.__create_chunk_list__()
    return HeldBlock(tuple(chunk.offsets), tuple(chunk.sizes))


# --- the group --------------------------------------------------------------------------------------------------------


def find_group(params: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> GroupCollectives:
    """Returns the collectives of all ranks that hold elements of the parameters; called by all of them."""
    device = params[0].device
    if not dist.is_initialized():
        return SingleRankChannel(device, ordered_by_stream=device.type == "cuda")
    group = group or _group_of({mesh for param in params if (mesh := _mesh_of(param)) is not None})
    if group.size() == 1:
        return SingleRankChannel(device, ordered_by_stream=device.type == "cuda")
    return channel_of(group, transport_device(group, device))


def _mesh_of(param: torch.Tensor) -> DeviceMesh | None:
    if isinstance(param, DTensor):
        return param.device_mesh
    found = membership(param)
    return None if found is None else found[0].mesh.mesh


def _mesh_ranks(param: torch.Tensor) -> tuple[int, ...] | None:
    mesh = _mesh_of(param)
    return None if mesh is None else tuple(mesh.mesh.flatten().tolist())


def _group_of(meshes: set[DeviceMesh]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    for mesh in meshes:
        if mesh.ndim == 1 and len(ranks) == mesh.size():
            return mesh.get_group()
    if not ranks or len(ranks) == dist.get_world_size():
        return world
    made: dist.ProcessGroup = dist.new_group(sorted(ranks), use_local_synchronization=True)
    return made


def ranks_of(calls: GroupCollectives) -> list[int]:
    """The world ranks of a group."""
    if isinstance(calls, SingleRankChannel):
        return [dist.get_rank() if dist.is_initialized() else 0]
    return dist.get_process_group_ranks(calls.group)


# --- all ranks --------------------------------------------------------------------------------------------------------


class _Described(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool
    # The ranks of its mesh; None if all ranks have it.
    ranks: tuple[int, ...] | None


def gather_held(
    own: Sequence[HeldParameter], options: str, calls: GroupCollectives
) -> tuple[list[Held], list[bool]]:
    """Returns what every rank holds of each parameter, and which parameters are trained.

    Raises on every rank unless all pass the same parameters and options.
    """
    described = [
        _Described(held.shape, held.param.dtype, held.param.requires_grad, _mesh_ranks(held.param))
        for held in own
    ]
    if calls.backend == "fake":
        # Its ranks do not answer.
        by_rank: list[Any] = [
            (options, described, [held.block_on(rank) for held in own]) for rank in ranks_of(calls)
        ]
    else:
        by_rank = gather_objects((options, described, [held.block for held in own]), calls)
    for rank, (theirs, shapes, _) in enumerate(by_rank):
        if theirs != by_rank[0][0] or len(shapes) != len(by_rank[0][1]):
            _disagree(
                f"{theirs}, {len(shapes)} parameters", rank, f"{by_rank[0][0]}, {len(by_rank[0][1])}", calls
            )
        for index, (first, shape) in enumerate(zip(by_rank[0][1], shapes, strict=True)):
            if first.ranks != shape.ranks:
                raise ConfigError(
                    f"{own[index].name} is another tensor on ranks {shape.ranks} than on ranks {first.ranks}",
                    where=f"{WHERE}(...), rank {calls.rank} of {calls.world}",
                    fix="make one optimizer for the parameters of each mesh, and join them with mixed([...])",
                )
            if first != shape:
                _disagree(f"{tuple(shape)} as {own[index].name}", rank, f"{tuple(first)}", calls)
    held: list[Held] = [[blocks[index] for _, _, blocks in by_rank] for index in range(len(own))]
    for parameter, blocks in zip(own, held, strict=True):
        if not is_complete(parameter.shape, blocks):
            raise ConfigError(
                f"{parameter.name} of shape {parameter.shape} is not whole on the ranks of the group",
                where=f"{WHERE}(...), rank {calls.rank} of {calls.world}",
                fix="pass process_group=, a group of all ranks that hold the parameters",
            )
    return held, [description.trains for description in described]


def _disagree(theirs: str, rank: int, first: str, calls: GroupCollectives) -> None:
    raise RankDisagreement(
        f"rank {rank} of the group passed {theirs}; rank 0 {first}",
        where=f"{WHERE}(...), rank {calls.rank} of {calls.world}",
        fix="pass the same parameters, in the same order, and the same options on every rank",
    )
