"""DTensors and device meshes: creates DTensors and replaces their local tensors without torch's per-call checks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from operator import attrgetter, is_
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

T = TypeVar("T", bound=torch.Tensor)


# As in torch, parameters that are DTensors are typed as plain tensors or parameters.

Spec = DTensorSpec


def dtensor_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def dtensor(local: torch.Tensor, spec: DTensorSpec, outline: torch.Tensor | None = None) -> DTensor:
    """Wraps a local tensor as a DTensor, without the checks and communication of ``from_local``: 20 times as fast.

    Only ``__new__``: ``__init__`` does nothing but pass through several wrappers. ``outline`` is a tensor like
    ``local`` without a storage offset: torch fails to copy a DTensor created with one.
    """
    made = DTensor.__new__(DTensor, local if outline is None else outline, spec, requires_grad=False)
    if outline is not None:
        made._local_tensor = local
    return made


def dtensor_parameter(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> nn.Parameter:
    """Returns a new DTensor as a parameter. ``nn.Parameter`` would detach it first, for which DTensor propagates
    shardings: milliseconds for each new shape."""
    made: Any = dtensor(local, spec).requires_grad_(requires_grad)
    made._is_param = True
    return cast(nn.Parameter, made)


def spec_of(tensor: torch.Tensor) -> DTensorSpec:
    spec: DTensorSpec = tensor._spec  # type: ignore[attr-defined]
    return spec


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor itself; ``to_local()`` would create a new one each time."""
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


_local = attrgetter("_local_tensor")
_requires_grad = attrgetter("requires_grad")


def all_show(columns: Sequence[Sequence[Any]]) -> bool:
    """Returns whether each module still has, under that name, the same parameter with the same local tensor and the
    same ``requires_grad``. The columns are dicts of parameters, names, parameters, local tensors, ``requires_grad``.

    One call for all parameters of a unit, because every step makes it.
    """
    holders, names, params, locals_, trainable = columns
    with without_torch_function():
        return (
            all(map(is_, map(dict.get, holders, names), params))
            and all(map(is_, map(_local, params), locals_))
            and all(map(is_, map(_requires_grad, params), trainable))
        )


# A context in which reading attributes of DTensors is as fast as of plain tensors: without ``__torch_function__``.
without_torch_function = torch._C.DisableTorchFunctionSubclass


# A context inside it for users' code, in which ``__torch_function__`` works as usual.
with_torch_function = torch._C._EnableTorchFunction


def have_local_tensors(tensors: Collection[torch.Tensor], locals_: Collection[torch.Tensor]) -> bool:
    """Returns whether the DTensors have exactly these local tensors, in order, and require no gradient."""
    return all(map(is_, map(_local, tensors), locals_)) and not any(map(_requires_grad, tensors))


def replace_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Points a DTensor at another local tensor of the same shape, keeping the object that optimizers hold."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def redistributed_local(gradient: torch.Tensor, spec: Spec, left: tuple[int, ...] = ()) -> torch.Tensor:
    """Redistributes a DTensor gradient, which may be partial sums, as ``spec`` says; returns its local tensor.

    On the axes ``left`` its placements stay as they are.
    """
    assert isinstance(gradient, DTensor)
    wanted = spec.placements
    if left:
        wanted = tuple(
            gradient.placements[axis] if axis in left else wanted[axis] for axis in range(len(wanted))
        )
    if gradient.placements != wanted:
        gradient = gradient.redistribute(placements=wanted)
    local = gradient._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


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
