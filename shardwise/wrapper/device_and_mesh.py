"""The device and mesh of a wrapped model, and how its tensors get there before they are sharded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.dry_run import is_dry
from shardwise.comm.mesh import (
    DataMesh,
    default_device_type,
    default_mesh,
    flat_mesh,
    mesh_of_group,
    mesh_of_groups,
    mesh_of_hosts,
)
from shardwise.errors import ConfigError, ConfigTypeError
from shardwise.torch_internals import buffers_of, parameters_of, unseen_by_modes
from shardwise.wrapper.options import Strategy


def chosen_device(
    device_id: Any, params: Iterable[torch.Tensor], mesh: DeviceMesh | None, where: str
) -> torch.device:
    """The device to compute on: ``device_id``, the mesh's, the parameters' or the process group's, in this order."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ConfigTypeError(
            f"device_mesh is a {type(mesh).__name__}", where=where, fix="create it with init_device_mesh"
        )
    if device_id is not None:
        device = torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)
    else:
        device = torch.device(mesh.device_type if mesh is not None else default_device_type(params))
    if str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "meta" and (mesh is None or not is_dry(torch.device(mesh.device_type))):
        raise ConfigError("device_id is the meta device", where=where, fix="pass a device with memory")
    return device


def chosen_mesh(
    process_group: Any, device_mesh: DeviceMesh | None, strategy: Strategy, device: torch.device, where: str
) -> DataMesh:
    """The mesh for a strategy: from ``device_mesh``, from one or two process groups, or of all ranks."""
    if process_group is not None and device_mesh is not None:
        raise ConfigError(
            "both process_group and device_mesh were given", where=where, fix="pass one of the two"
        )
    mesh = device_mesh
    if mesh is None and strategy.num_axes == 2:
        mesh = _two_axes(process_group, device, where)
    elif mesh is None and process_group is None:
        mesh = default_mesh(device.type, where)
    elif mesh is None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise ConfigTypeError(
                f"process_group is a {type(process_group).__name__}",
                where=where,
                fix="pass a process group; only hybrid strategies need a pair of groups",
            )
        mesh = mesh_of_group(process_group, device.type)
    if mesh.ndim == 2 and strategy.num_axes == 1:
        warnings.warn(
            f"the device mesh has 2 axes: parameters are sharded over the first one, of {mesh.size(0)} ranks, and the "
            f"other one is not used; HYBRID_SHARD uses both",
            stacklevel=6,
        )
        mesh = mesh_of_group(mesh.get_group(0), device.type)
    if mesh.ndim != strategy.num_axes:
        raise ConfigError(
            f"the device mesh has {mesh.ndim} axes, but the sharding strategy needs {strategy.num_axes}",
            where=where,
            fix="use HYBRID_SHARD on two axes (replicate, shard) and the other strategies on one",
        )
    return flat_mesh(mesh, device, strategy.shards)


def _two_axes(groups: Any, device: torch.device, where: str) -> DeviceMesh:
    """The mesh of a hybrid strategy: from two process groups; by default each host shards, and hosts replicate."""
    if groups is None:
        world = dist.get_world_size()
        on_host = torch.cuda.device_count() if device.type == "cuda" else world
        shard_world = min(int(os.environ.get("LOCAL_WORLD_SIZE", on_host)), world)
        if world % shard_world:
            raise ConfigError(
                f"{world} ranks cannot be divided into hosts of {shard_world}",
                where=where,
                fix="pass the groups: device_mesh=init_device_mesh(..., (replicas, shards))",
            )
        return mesh_of_hosts(device.type, shard_world)
    is_pair = isinstance(groups, tuple) and len(groups) == 2
    if not is_pair or not all(isinstance(group, dist.ProcessGroup) for group in groups):
        raise ConfigTypeError(
            f"process_group is {groups!r}, but a hybrid strategy needs two groups",
            where=where,
            fix="pass (shard group, replicate group), or device_mesh= with two axes, or neither",
        )
    return mesh_of_groups(groups[0], groups[1], device.type)


def materialize(
    modules: list[nn.Module],
    init_fn: Callable[[nn.Module], Any] | None,
    device: torch.device,
    ignored: set[nn.Parameter],
    where: str,
) -> None:
    """Allocates and initializes a wrapper's modules if any of them has tensors on the meta device.

    ``init_fn`` is called for all of them: it may initialize a module's tensors through a module around it.
    """
    if is_dry(device):
        return
    on_meta = [module for module in modules if _has_meta_tensors(module, ignored)]
    for module in modules if on_meta and init_fn is not None else on_meta:
        if init_fn is not None:
            init_fn(module)
            continue
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            raise ConfigError(
                f"{type(module).__name__} has tensors on the meta device and no reset_parameters()",
                where=where,
                fix="pass param_init_fn=, a function that allocates and initializes a module",
            )
        module.to_empty(device=device, recurse=False)
        with torch.no_grad():
            reset()
    for module in on_meta:
        if still_meta := [
            name for name, param in parameters_of(module).items() if param is not None and param.is_meta
        ]:
            raise ConfigError(
                f"parameters {still_meta} of {type(module).__name__} are still on the meta device after param_init_fn",
                where=where,
                fix="in param_init_fn, call module.to_empty(device=..., recurse=False) and set the values",
            )


def _has_meta_tensors(module: nn.Module, ignored: set[nn.Parameter]) -> bool:
    own = (
        *(param for param in parameters_of(module).values() if param not in ignored),
        *buffers_of(module).values(),
    )
    return any(tensor is not None and tensor.is_meta for tensor in own)


def move(modules: Iterable[nn.Module], device: torch.device, ignored: set[nn.Parameter]) -> None:
    """Moves parameters and buffers to the device, in place: parameters stay the same objects."""
    for module in modules:
        for param in parameters_of(module).values():
            if param is not None and param not in ignored and param.device != device:
                param.data = param.data.to(device)
        for name, buffer in buffers_of(module).items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                buffers_of(module)[name] = buffer.to(device)


def send_from_first_rank(tensors: list[torch.Tensor], mesh: DataMesh) -> None:
    """Broadcasts the first rank's values to all ranks; host tensors are copied to the mesh's device for that."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    with unseen_by_modes(), torch.no_grad():
        for same_dtype in by_dtype.values():
            for batch in _in_batches(same_dtype):
                flat = torch.cat([tensor.reshape(-1).to(mesh.device) for tensor in batch])
                for calls in mesh.axes:
                    dist.broadcast(flat, group=calls.group, group_src=0)
                start = 0
                for tensor in batch:
                    tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
                    start += tensor.numel()


_BATCH_NUMEL = 1 << 24


def _in_batches(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    numel = 0
    for tensor in tensors:
        if batch and numel + tensor.numel() > _BATCH_NUMEL:
            yield batch
            batch, numel = [], 0
        batch.append(tensor)
        numel += tensor.numel()
    if batch:
        yield batch
