"""The norm of gradients, and clipping by it, where parameters lie on several meshes or on none.

    gradients ──local norms──▶ one value a mesh ──one all-reduce a mesh──▶ values of whole gradients ──▶ total

torch's ``clip_grad_norm_`` needs all gradients on one mesh. Here each mesh is reduced by itself, over those of its
axes that shard; a gradient that an axis only repeats is counted once. Every rank computes the same total.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwise.errors import ConfigError, ConfigTypeError, StateError
from shardwise.torch_internals import local_of, multiply_all, norms_of

_CALL = "clip_grad_norm_"


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales gradients down, in place, so that the norm of all of them together is at most ``max_norm``.

    Args:
        parameters: plain tensors and DTensors on any meshes; those without a gradient are passed over. Parameters on
            one mesh must be the same on all its ranks, their gradients may be missing on some.
        max_norm: the largest norm to leave.
        norm_type: the order of the norm, ``float("inf")`` for the largest element.
        error_if_nonfinite: raises on every rank, before anything is scaled, if the total is nan or infinite.
        foreach: ``False`` computes tensor by tensor; otherwise all tensors of a device and dtype together.

    Returns:
        The norm before clipping, as of the unsharded model: a plain tensor, the same on every rank.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for param in params:
        if not isinstance(param, torch.Tensor):
            raise ConfigTypeError(
                f"{_CALL} was given a {type(param).__name__} among the parameters",
                where=_CALL,
                fix="pass parameters, e.g. model.parameters()",
            )
    if math.isnan(max_norm) or max_norm < 0:
        raise ConfigError(f"max_norm is {max_norm}", where=_CALL, fix="pass a number that is not negative")
    if norm_type == 0 or math.isnan(norm_type):
        raise ConfigError(
            f"norm_type is {norm_type}, which is the order of no norm", where=_CALL, fix="pass 1, 2, inf, ..."
        )
    together = foreach is not False
    with torch.no_grad():
        total = _total_norm(params, float(norm_type), together)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise StateError(
                f"the total norm of order {norm_type} of the gradients is {total.item()}: they cannot be clipped",
                where=f"{_CALL}(error_if_nonfinite=True)",
                fix="skip this step and zero the gradients, or pass error_if_nonfinite=False; none was scaled",
            )
        # The host does not look at the norm, so it need not wait for it: gradients are always scaled, mostly by one.
        coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
        locals_ = [_local(param.grad) for param in params if param.grad is not None]
        for (device, _), alike in _grouped(locals_).items():
            scale = coefficient.to(device)
            if together:
                multiply_all(alike, scale)
            else:
                for tensor in alike:
                    tensor.mul_(scale.to(tensor.dtype))
    return total


def _total_norm(params: list[torch.Tensor], order: float, together: bool) -> torch.Tensor:
    gradients = [_whole_or_sharded(param.grad) for param in params]
    plain: list[torch.Tensor] = []
    meshes: dict[DeviceMesh, list[tuple[torch.Tensor, bool]]] = {}
    for param, gradient in zip(params, gradients, strict=True):
        # By the parameter where there is no gradient: a rank without one must take part in what its peers reduce.
        placed = param if gradient is None else gradient
        if isinstance(placed, DTensor):
            meshes.setdefault(placed.device_mesh, []).append((placed, gradient is not None))
        elif gradient is not None:
            plain.append(gradient)

    present = [gradient for gradient in gradients if gradient is not None]
    device = present[0].device if present else torch.device("cpu")
    dtype = torch.float32
    for gradient in present:
        dtype = torch.promote_types(dtype, gradient.dtype)
    values = [_value(plain, order, device, together)]
    for mesh, placed_on_mesh in meshes.items():
        values.append(_value_of_mesh(mesh, placed_on_mesh, order, together).to(device))
    return _root(_sum(torch.stack(values), order), order).to(dtype.to_real())


def _value_of_mesh(
    mesh: DeviceMesh, placed: list[tuple[torch.Tensor, bool]], order: float, together: bool
) -> torch.Tensor:
    """The value of all gradients on a mesh; the second of each pair says whether there is one."""
    axes = sorted(set().union(*(_sharding_axes(tensor) for tensor, _ in placed)))
    groups: list[dist.ProcessGroup] = [mesh.get_group(axis) for axis in axes]
    if len(axes) > 1 and mesh.size() == dist.get_world_size() and dist.group.WORLD is not None:
        axes, groups = list(range(mesh.ndim)), [dist.group.WORLD]
    own = mesh.get_coordinate() or [0] * mesh.ndim
    counted = []
    for tensor, is_gradient in placed:
        # What an axis repeats counts on its first rank alone.
        if is_gradient and not any(own[axis] for axis in axes if axis not in _sharding_axes(tensor)):
            counted.append(local_of(tensor))
    # Shards may live on the host while the mesh talks for a device.
    value = _value(counted, order, torch.device(mesh.device_type), together)
    operation = dist.ReduceOp.SUM
    if math.isinf(order):
        operation = dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN
    for group in groups:
        dist.all_reduce(value, operation, group=group)
    return value


def _sharding_axes(tensor: torch.Tensor) -> set[int]:
    assert isinstance(tensor, DTensor)
    return {axis for axis, where in enumerate(tensor.placements) if not isinstance(where, Replicate)}


# A value is a sum of powers, and the total is its root; for an infinite order it is the largest (or smallest)
# element. In float64, so that powers neither overflow nor round.


def _value(tensors: list[torch.Tensor], order: float, device: torch.device, together: bool) -> torch.Tensor:
    values = [torch.full((1,), _nothing(order), dtype=torch.float64, device=device)]
    with_elements = [tensor for tensor in tensors if tensor.numel()]
    for alike in _grouped(with_elements).values():
        norms = torch.stack(norms_of(alike, order, together)).to(device, torch.float64)
        values.append(norms if math.isinf(order) else norms.pow(order))
    return _sum(torch.cat(values), order)


def _sum(values: torch.Tensor, order: float) -> torch.Tensor:
    if math.isinf(order):
        return values.max() if order > 0 else values.min()
    return values.sum()


def _root(value: torch.Tensor, order: float) -> torch.Tensor:
    return value if math.isinf(order) else value.pow(1.0 / order)


def _nothing(order: float) -> float:
    """The value of no element at all."""
    return math.inf if order == -math.inf else 0.0


def _whole_or_sharded(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient that is still spread over ranks as terms of a sum has no norm before it is summed."""
    if isinstance(gradient, DTensor) and any(where.is_partial() for where in gradient.placements):
        whole: torch.Tensor = gradient.redistribute(
            placements=[Replicate() if where.is_partial() else where for where in gradient.placements]
        )
        return whole
    return gradient


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _grouped(
    tensors: list[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups
