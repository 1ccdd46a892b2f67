"""A device mesh as data parallelism: which axis shards, which replicates, and the groups of both.

One axis shards; an optional second one replicates the shards. After forward a unit may stay sharded over smaller groups
of consecutive ranks (*parts*) of the shard axis, which are created here, once per mesh.
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

from shardwise.comm.channels.channel import GroupChannel, SingleRankChannel
from shardwise.comm.channels.registry import channel_of
from shardwise.comm.collectives.group import GroupCollectives
from shardwise.comm.exchange import all_gather_bytes
from shardwise.errors import ConfigError, StateError
from shardwise.policies import DataParallelMeshDims, as_record
from shardwise.torch_internals import concatenate_meshes, flatten_mesh


@dataclass(frozen=True, eq=False)
class DataMesh:
    """A mesh of one axis (shard) or two (replicate, shard), with the collectives of its groups.

    One axis may also replicate only: then each rank is a shard group of its own. With ``dp_mesh_dims``, ``whole`` is
    the mesh in which the axes were named, and ``named`` their indices there.
    """

    mesh: DeviceMesh
    device: torch.device
    shard: GroupCollectives
    replicate: GroupCollectives | None
    whole: DeviceMesh | None = None
    named: tuple[int, ...] = ()
    _parts: dict[int, GroupCollectives] = field(default_factory=dict)
    # alive: channels hold their groups weakly
    _groups: list[dist.ProcessGroup] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._groups.extend(
            calls.group for calls in (self.shard, self.replicate) if isinstance(calls, GroupChannel)
        )

    @property
    def rank(self) -> int:
        """This process's world rank, for messages to users."""
        return dist.get_rank()

    @property
    def axes(self) -> list[GroupCollectives]:
        """The groups with more than one rank, outermost first."""
        return [calls for calls in (self.replicate, self.shard) if calls is not None and calls.world > 1]

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the mesh, which need not be the first of the job."""
        return all(calls.rank == 0 for calls in self.axes)

    @property
    def shard_axis(self) -> DeviceMesh:
        """The mesh of the shard axis alone."""
        if self.mesh.ndim == 1:
            return self.mesh
        if self.mesh.mesh_dim_names is None:
            return mesh_of_group(self.shard.group, self.mesh.device_type)
        return self.mesh[self.mesh.mesh_dim_names[-1]]

    def placements(self, dim: int) -> tuple[Placement, ...]:
        if self.replicate is None:
            return (Shard(dim),)
        return (Replicate(), Shard(dim)) if self.mesh.ndim == 2 else (Replicate(),)

    def separate_shard_group(self) -> GroupCollectives:
        """Returns a second group over the shard axis, whose collectives do not queue behind the first one's."""
        if 0 not in self._parts:
            self._parts[0] = self._group_of(dist.get_process_group_ranks(self.shard.group))
        return self._parts[0]

    def part(self, part_world: int) -> GroupCollectives:
        """Returns this rank's group of ``part_world`` consecutive ranks of the shard axis."""
        if part_world not in self._parts:
            shard_ranks = dist.get_process_group_ranks(self.shard.group)
            start = self.shard.rank // part_world * part_world
            self._parts[part_world] = self._group_of(shard_ranks[start : start + part_world])
        return self._parts[part_world]

    def _group_of(self, ranks: list[int]) -> GroupCollectives:
        """Creates a group, called by its own ranks only: the mesh may be one of several in the job."""
        group = dist.new_group(ranks, use_local_synchronization=True)
        self._groups.append(group)
        return channel_of(group, self.device)


_READINGS_ATTRIBUTE = "_shardwise_readings"


class _Readings(dict[Hashable, DataMesh]):
    """Interpretations of a mesh. Not copied or saved along with the mesh, as happens with every DTensor."""

    def __deepcopy__(self, memo: dict[int, object]) -> OrderedDict[str, object]:
        return OrderedDict()

    def __reduce_ex__(self, protocol: Any) -> tuple[type[OrderedDict[str, object]], tuple[()]]:
        # A saved file must load without shardwise, and with torch.load(weights_only=True).
        return (OrderedDict, ())


def _readings_of(mesh: DeviceMesh) -> _Readings:
    readings = mesh.__dict__.get(_READINGS_ATTRIBUTE)
    if not isinstance(readings, _Readings):
        readings = mesh.__dict__[_READINGS_ATTRIBUTE] = _Readings()
    return readings


def give_reading(mesh: DeviceMesh, reading: DataMesh) -> None:
    """Sets how ``mesh`` is interpreted by both APIs, for a mesh that has no process groups."""
    readings = _readings_of(mesh)
    readings[None] = readings[reading.device, True] = reading


def data_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims | None, where: str) -> DataMesh:
    """Interprets ``mesh``; units with the same mesh share the result, and so its groups."""
    readings = _readings_of(mesh)
    if dims not in readings:
        readings[dims] = _read_axes(mesh, dims, where)
    return readings[dims]


def _read_axes(mesh: DeviceMesh, dims: DataParallelMeshDims | None, where: str) -> DataMesh:
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
    shard = channel_of(mesh.get_group(shard_axis), device)
    if dims is not None and not dims.shard_names:
        return DataMesh(mesh, device, SingleRankChannel(device, shard.ordered_by_stream), shard, whole, named)
    replicate = channel_of(mesh.get_group(0), device) if mesh.ndim == 2 else None
    return DataMesh(mesh, device, shard, replicate, whole, named)


def mesh_of_info(info: Any, where: str) -> DataMesh:
    """Interprets what describes the mesh of one parameter: a ``DeviceMesh``, or torch's ``FSDPMeshInfo``."""
    mesh, dims = info, None
    if not isinstance(info, DeviceMesh):
        mesh, dims = getattr(info, "mesh", None), getattr(info, "dp_mesh_dims", None)
        if dims is not None:
            mesh, dims = info.spmd_mesh, as_record(DataParallelMeshDims, dims, where)
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"shard_placement_fn returned {info!r} as the mesh of a parameter",
            where=where,
            fix="return ShardPlacementResult(placement, mesh) with a DeviceMesh of one axis or two",
        )
    return data_mesh(mesh, dims, where)


def flat_mesh(mesh: DeviceMesh, device: torch.device, shards: bool) -> DataMesh:
    """Interprets a mesh for parameters without placements; with ``shards`` False its one axis only replicates."""
    readings = _readings_of(mesh)
    key = (device, shards)
    if key not in readings:
        last = channel_of(mesh.get_group(mesh.ndim - 1), device)
        if mesh.ndim == 2:
            readings[key] = DataMesh(mesh, device, last, channel_of(mesh.get_group(0), device))
        elif shards:
            readings[key] = DataMesh(mesh, device, last, None)
        else:
            readings[key] = DataMesh(mesh, device, SingleRankChannel(device, last.ordered_by_stream), last)
    return readings[key]


class _KnownMeshes(threading.local):
    """Meshes created here, kept as long as the default group exists; per thread, because ranks may be threads.

    They are not kept by models alone: creating one takes communication, and ranks do not collect garbage in step.
    """

    def __init__(self) -> None:
        self.group: weakref.ref[dist.ProcessGroup] | None = None
        self.meshes: dict[Hashable, DeviceMesh] = {}


_known = _KnownMeshes()


def forget_meshes() -> None:
    """Drops the meshes created here, and so their groups, once the default group has been destroyed."""
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
    """Returns a mesh of one axis over a process group; units with the same group share it."""
    if group is dist.group.WORLD:
        return default_mesh(device_type, "process_group")
    # A mesh keeps its group alive, so the id is not reused.
    return _shared((id(group), device_type), lambda: DeviceMesh.from_group(group, device_type))


def mesh_of_groups(shard: dist.ProcessGroup, replicate: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """Returns a mesh of two axes, replicate and shard; ranks of the replicate group exchange their shard groups."""

    def make() -> DeviceMesh:
        own = json.dumps(dist.get_process_group_ranks(shard)).encode()
        rows = [json.loads(row) for row in all_gather_bytes(own, replicate)]
        return DeviceMesh.from_group(
            [replicate, shard],
            device_type,
            mesh=torch.tensor(rows, device="cpu"),
            mesh_dim_names=_HYBRID_AXES,
        )

    return _shared((id(shard), id(replicate), device_type), make)


def mesh_of_hosts(device_type: str, shard_world: int) -> DeviceMesh:
    """Returns a mesh of two axes over all ranks: ``shard_world`` consecutive ranks shard, and the rest replicates."""
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
        return _as_one_axis(mesh, dims.replicate_names)
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


# Set by torchrun for every rank, and needed to create a group.
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_launched_ranks() -> None:
    """Creates the default group if there is none and a launcher has set its variables, as ``DeviceMesh`` would."""
    if not dist.is_initialized() and all(name in os.environ for name in _LAUNCHED):
        dist.init_process_group()


def default_device_type(params: Iterable[torch.Tensor]) -> str:
    """Returns the default device type: "cuda" with NCCL or for parameters there, else "cpu"."""
    if any(param.device.type == "cuda" for param in params):
        return "cuda"
    if torch.cuda.is_available() and dist.is_initialized():
        # A group without an explicit backend uses each device's default one, and reports "undefined".
        backend = dist.get_backend()
        if "nccl" in backend or backend == "undefined" or ("fake" in backend and torch.cuda.is_initialized()):
            return "cuda"
    return "cpu"


def default_mesh(device_type: str, where: str) -> DeviceMesh:
    """Returns a mesh of one axis over all ranks."""
    if not dist.is_initialized():
        raise StateError(
            "there is no process group to shard over",
            where=where,
            fix="call torch.distributed.init_process_group() first (torchrun sets its variables), or pass mesh=",
        )
    return _shared(device_type, lambda: init_device_mesh(device_type, (dist.get_world_size(),)))
