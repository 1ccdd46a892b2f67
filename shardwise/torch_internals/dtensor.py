"""Sharded tensors and device meshes at set-up: specs, parameters, and slices of meshes."""

from __future__ import annotations

from math import prod
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardwise.torch_internals.step import dtensor

T = TypeVar("T", bound=torch.Tensor)


Spec = DTensorSpec


def dtensor_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def dtensor_parameter(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> nn.Parameter:
    """Returns a new DTensor as a parameter. ``nn.Parameter`` would detach it first, for which DTensor propagates
    shardings: milliseconds for each new shape."""
    made: Any = dtensor(local, spec).requires_grad_(requires_grad)
    made._is_param = True
    return cast(nn.Parameter, made)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Returns a placement that shards ``dim`` after another mesh axis has split it into ``split_factor`` parts."""
    return _StridedShard(dim, split_factor=split_factor)


def mesh_without_groups(device_type: str, shape: tuple[int, ...]) -> DeviceMesh:
    """Returns a mesh of ranks without a process group, for rank 0; its axes are named replicate and shard."""
    ranks = torch.arange(prod(shape), device="cpu").view(shape)
    names = ("replicate", "shard")[-len(shape) :]
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def are_other_axes(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Returns whether both are slices of one mesh, along different axes.

    DTensor keeps the first of equal slices, which may come from an earlier mesh of the same ranks: this is the same.
    """
    if mesh == other:
        return False
    if mesh._get_root_mesh() == other._get_root_mesh():
        return True
    if mesh.mesh_dim_names is None or other.mesh_dim_names is None:
        return False
    try:
        concatenate_meshes([mesh, other])
    except RuntimeError:
        return False
    return True


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    return mesh._flatten(name)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    return DeviceMesh._concatenate(meshes)


def forget_meshes() -> None:
    """Clears DTensor's caches: they hold meshes, and an equal mesh of the next default group would get the groups of
    the last one."""
    from torch.distributed.tensor import _redistribute

    try:
        from torch.distributed.tensor import debug
    except ImportError:
        # That module needs numpy, which torch itself does not; it clears these two caches.
        propagate: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        getattr(propagate, "cache", propagate).cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()
    else:
        debug._clear_sharding_prop_cache()
    clear_plans = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if clear_plans is not None:
        clear_plans()


def without_memory_like(cls: type[T], param: torch.Tensor) -> T:
    """Returns a tensor of class ``cls`` with the shape, dtype and device of ``param``, without memory."""
    made: T = torch.Tensor._make_wrapper_subclass(
        cls, param.shape, dtype=param.dtype, device=param.device, requires_grad=param.requires_grad
    )
    return made


def group_of_sharded_tensor(value: ShardedTensor) -> tuple[dist.ProcessGroup, torch.device]:
    """Returns the process group of a sharded tensor, and a device on which the group communicates.

    ``ShardedTensor`` is the older kind, without a mesh, in which torch's FSDP saves shards.
    """
    group = value._process_group
    kind = dist.distributed_c10d._get_object_coll_device(group)
    if kind == "cpu":
        return group, torch.device(kind)
    return group, torch.device(kind, torch.get_device_module(kind).current_device())
