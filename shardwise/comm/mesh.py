"""Which ranks share what: a device mesh read as data parallelism.

One axis shards; a second one, if there is one, replicates the shards. After forward a unit may stay sharded over
smaller groups of neighbours (*parts*): those groups are cut out of the shard axis here, once for a mesh.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardwise.comm.collectives.group import GroupCollectives, SingleRankCollectives
from shardwise.comm.exchange import all_gather_bytes
from shardwise.errors import ConfigError, StateError
from shardwise.policies import DataParallelMeshDims
from shardwise.torch_internals import concatenate_meshes, flatten_mesh


@dataclass(frozen=True, eq=False)
class DataMesh:
    """A mesh of one axis (shard) or two (replicate, shard), with the calls of its groups.

    ``whole`` is the mesh that its axes were named in (``dp_mesh_dims``), ``named`` the numbers that they have there.
    """

    mesh: DeviceMesh
    device: torch.device
    shard: GroupCollectives
    replicate: GroupCollectives | None
    whole: DeviceMesh | None = None
    named: tuple[int, ...] = ()
    _parts: dict[int, GroupCollectives] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """This process's rank in the whole job: what messages to users name."""
        return dist.get_rank()

    @property
    def axes(self) -> list[GroupCollectives]:
        """The groups this rank talks to others on, outermost first."""
        return [calls for calls in (self.replicate, self.shard) if calls is not None and calls.world > 1]

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the mesh's own ranks, which need not be the job's."""
        return all(calls.rank == 0 for calls in self.axes)

    def placements(self, dim: int) -> tuple[Placement, ...]:
        return (Shard(dim),) if self.replicate is None else (Replicate(), Shard(dim))

    def separate_shard_group(self) -> GroupCollectives:
        """A second group over the shard axis: its collectives do not queue up behind the first one's."""
        if 0 not in self._parts:
            self._parts[0] = self._group_of(dist.get_process_group_ranks(self.shard.group))
        return self._parts[0]

    def part(self, part_world: int) -> GroupCollectives:
        """The group of ``part_world`` neighbours on the shard axis to which this rank belongs."""
        if part_world not in self._parts:
            shard_ranks = dist.get_process_group_ranks(self.shard.group)
            start = self.shard.rank // part_world * part_world
            self._parts[part_world] = self._group_of(shard_ranks[start : start + part_world])
        return self._parts[part_world]

    def _group_of(self, ranks: list[int]) -> GroupCollectives:
        """A new group, made by its own ranks alone: the mesh may be one of several that together make up the job."""
        group = dist.new_group(ranks, use_local_synchronization=True)
        return GroupCollectives(group, self.device)


_READINGS_ATTRIBUTE = "_shardwise_readings"


class _Readings(dict[Hashable, DataMesh]):
    """How a mesh was read. It stays behind when the mesh is copied or saved, as it is with every DTensor."""

    def __deepcopy__(self, memo: dict[int, object]) -> OrderedDict[str, object]:
        return OrderedDict()

    def __reduce_ex__(self, protocol: Any) -> tuple[type[OrderedDict[str, object]], tuple[()]]:
        # What is saved must load without shardwise, and with torch.load(weights_only=True).
        return (OrderedDict, ())


def data_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims | None, where: str) -> DataMesh:
    """Reads ``mesh``; units that are given the same mesh share one reading, and so its groups."""
    readings = mesh.__dict__.get(_READINGS_ATTRIBUTE)
    if not isinstance(readings, _Readings):
        readings = mesh.__dict__[_READINGS_ATTRIBUTE] = _Readings()
    if dims not in readings:
        readings[dims] = _read(mesh, dims, where)
    return readings[dims]


def _read(mesh: DeviceMesh, dims: DataParallelMeshDims | None, where: str) -> DataMesh:
    whole: DeviceMesh | None = None
    named: tuple[int, ...] = ()
    if dims is not None:
        whole, mesh = mesh, _named_axes(mesh, dims, where)
        names = (*dims.replicate_names, *dims.shard_names)
        named = tuple((whole.mesh_dim_names or ()).index(name) for name in names)
    if mesh.ndim > 2:
        raise ConfigError(
            f"a mesh of {mesh.ndim} axes {tuple(mesh.mesh.shape)} does not say which of them shard",
            where=where,
            fix="name the axes: dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)",
        )
    device = _device_of(mesh)
    shard_axis = mesh.ndim - 1
    shard = GroupCollectives(mesh.get_group(shard_axis), device)
    replicate = GroupCollectives(mesh.get_group(0), device) if mesh.ndim == 2 else None
    return DataMesh(mesh, device, shard, replicate, whole, named)


def flat_mesh(mesh: DeviceMesh, device: torch.device, shards: bool) -> DataMesh:
    """Reads a mesh for parameters that need no placement; with ``shards`` False its one axis only replicates."""
    readings = mesh.__dict__.get(_READINGS_ATTRIBUTE)
    if not isinstance(readings, _Readings):
        readings = mesh.__dict__[_READINGS_ATTRIBUTE] = _Readings()
    key = (device, shards)
    if key not in readings:
        last = GroupCollectives(mesh.get_group(mesh.ndim - 1), device)
        if mesh.ndim == 2:
            readings[key] = DataMesh(mesh, device, last, GroupCollectives(mesh.get_group(0), device))
        elif shards:
            readings[key] = DataMesh(mesh, device, last, None)
        else:
            readings[key] = DataMesh(
                mesh, device, SingleRankCollectives(device, last.ordered_by_stream), last
            )
    return readings[key]


class _KnownMeshes(threading.local):
    """Meshes that were made here, for as long as the default group is there; one set a thread: ranks may be threads.

    Not for as long as a model uses them: making one takes communication, and ranks do not collect garbage alike.
    """

    def __init__(self) -> None:
        self.group: weakref.ref[dist.ProcessGroup] | None = None
        self.meshes: dict[Hashable, DeviceMesh] = {}


_known = _KnownMeshes()


def forget_meshes() -> None:
    """Lets go of the meshes made here, and so of their groups, when the default group has ended."""
    _known.group, _known.meshes = None, {}


def _shared(key: Hashable, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    group = dist.group.WORLD
    assert group is not None
    if _known.group is None or _known.group() is not group:
        _known.group, _known.meshes = weakref.ref(group), {}
    if key not in _known.meshes:
        _known.meshes[key] = make()
    return _known.meshes[key]


def mesh_of_group(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """One axis over a process group; units that are given the same group share one mesh."""
    if group is dist.group.WORLD:
        return default_mesh(device_type, "process_group")
    # A mesh keeps its group alive, so no other can come to have its id.
    return _shared((id(group), device_type), lambda: DeviceMesh.from_group(group, device_type))


def mesh_of_groups(shard: dist.ProcessGroup, replicate: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """Two axes, replicate and shard; ranks of the replicate group tell each other whom they share shards with."""

    def make() -> DeviceMesh:
        own = json.dumps(dist.get_process_group_ranks(shard)).encode()
        rows = [json.loads(row) for row in all_gather_bytes(own, replicate)]
        return DeviceMesh.from_group(
            [replicate, shard], device_type, mesh=torch.tensor(rows), mesh_dim_names=_HYBRID_AXES
        )

    return _shared((id(shard), id(replicate), device_type), make)


def mesh_of_hosts(device_type: str, shard_world: int) -> DeviceMesh:
    """Two axes over all ranks: neighbours shard between them, and their groups replicate one another."""
    world = dist.get_world_size()

    def make() -> DeviceMesh:
        return init_device_mesh(device_type, (world // shard_world, shard_world), mesh_dim_names=_HYBRID_AXES)

    return _shared((shard_world, device_type), make)


_HYBRID_AXES = ("replicate", "shard")


def _named_axes(mesh: DeviceMesh, dims: DataParallelMeshDims, where: str) -> DeviceMesh:
    known = mesh.mesh_dim_names or ()
    names = (*dims.replicate_names, *dims.shard_names)
    for name in names:
        if name not in known:
            raise ConfigError(
                f"dp_mesh_dims names the axis '{name}', which the mesh does not have: its axes are {known}",
                where=where,
                fix="use names given to init_device_mesh(..., mesh_dim_names=...)",
            )
        if names.count(name) > 1:
            raise ConfigError(
                f"dp_mesh_dims names the axis '{name}' twice",
                where=where,
                fix="let each axis either shard or replicate",
            )
    if not dims.shard_names:
        raise ConfigError(
            "dp_mesh_dims names no axis to shard over",
            where=where,
            fix="name one with DataParallelMeshDims(shard=...); to replicate only, use DistributedDataParallel",
        )
    shard = _as_one_axis(mesh, dims.shard_names)
    if not dims.replicate_names:
        return shard
    return concatenate_meshes([_as_one_axis(mesh, dims.replicate_names), shard])


def _as_one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else flatten_mesh(mesh[names], "_".join(names))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


# What torchrun tells every rank, and what a group is made of.
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_launched_ranks() -> None:
    """Makes the default group where there is none and a launcher has said who is in it, as a mesh would."""
    if not dist.is_initialized() and all(name in os.environ for name in _LAUNCHED):
        dist.init_process_group()


def default_device_type(params: Iterable[torch.Tensor]) -> str:
    """The device type to shard over when none is named: "cuda" with NCCL or for parameters there, else "cpu"."""
    if any(param.device.type == "cuda" for param in params):
        return "cuda"
    if torch.cuda.is_available() and dist.is_initialized():
        # A group that was given no backend serves each device with that device's own, and calls it "undefined".
        backend = dist.get_backend()
        if "nccl" in backend or backend == "undefined" or ("fake" in backend and torch.cuda.is_initialized()):
            return "cuda"
    return "cpu"


def default_mesh(device_type: str, where: str) -> DeviceMesh:
    """One axis over all ranks."""
    if not dist.is_initialized():
        raise StateError(
            "there is no process group to shard over",
            where=where,
            fix="call torch.distributed.init_process_group() first (torchrun sets what it needs), or pass mesh=",
        )
    return _shared(device_type, lambda: init_device_mesh(device_type, (dist.get_world_size(),)))
