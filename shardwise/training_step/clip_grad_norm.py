"""The norm of gradients, and clipping by it, where parameters lie on several meshes or on none.

    gradients ──local norms──▶ one value a mesh ──one all-reduce a mesh──▶ values of whole gradients ──▶ total

torch's ``clip_grad_norm_`` needs all gradients on one mesh. Here each mesh is reduced by itself, over those of its
axes that shard; a gradient that an axis only repeats is counted once. Every rank computes the same total.

Where all of a unit's gradients still lie in the row they were reduced into, that row is summed up and scaled as one
tensor. Where a model sums its gradients exactly, so is their norm (``exact_norm``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwise.comm.channels.collective_log import collective_code
from shardwise.comm.collectives.group import GroupCollectives, channel_of
from shardwise.engine.gather.full_tensors import flat_slots, is_flat, shown_part
from shardwise.engine.reduce.gradient_buffer import GradientBuffer
from shardwise.engine.unit.binding import membership
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError, ConfigTypeError, StateError
from shardwise.torch_internals import local_of, multiply_all, norms_of, spec_of
from shardwise.training_step.exact_norm import check_order, largest_of, norm_from, words_of

_CALL = "clip_grad_norm_"
# Of some tensors, as a tensor on that device.
Measure = Callable[[list[torch.Tensor], torch.device], torch.Tensor]
_CLIP = collective_code("sum up the norm of gradients")


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales gradients down, in place, so that the norm of all of them together is at most ``max_norm``.

    Among parameters of a model that was sharded with ``exact=True`` the norm does not depend on how they are sharded,
    to the last bit; it must then be of order 1, 2 or infinity.

    Args:
        parameters: plain tensors, shards of wrapped modules and DTensors on any meshes; those without a gradient are
            passed over. Parameters on one mesh must be the same on all its ranks, their gradients may be missing on
            some.
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
    params = list(dict.fromkeys(map(_sharded, params)))
    with torch.no_grad():
        found = _find_gradients(params, float(norm_type))
        dtype = torch.promote_types(torch.float32, dtype_of_gradients(params) or torch.float32)
        total = _total_norm(found, float(norm_type), together).to(dtype)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise StateError(
                f"the total norm of order {norm_type} of the gradients is {total.item()}: they cannot be clipped",
                where=f"{_CALL}(error_if_nonfinite=True)",
                fix="skip this step and zero the gradients, or pass error_if_nonfinite=False; none was scaled",
            )
        # The host does not look at the norm, so it need not wait for it: gradients are always scaled, mostly by one.
        coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for (device, _), alike in _grouped(found.to_scale).items():
            scale = coefficient.to(device)
            if together:
                multiply_all(alike, scale)
            else:
                for tensor in alike:
                    tensor.mul_(scale.to(tensor.dtype))
    return total


def dtype_of_gradients(params: Iterable[torch.Tensor]) -> torch.dtype | None:
    """The real dtype that holds the gradients of all these parameters; None if there is none.

    A shard without elements has no gradient, but peers may have: all ranks must come to the same.
    """
    dtype: torch.dtype | None = None
    for param in params:
        gradient = param.grad
        if gradient is not None:
            own = gradient.dtype
        elif param.requires_grad and param.numel() == 0:
            own = param.grad_dtype or param.dtype
        else:
            continue
        dtype = own if dtype is None else torch.promote_types(dtype, own)
    return None if dtype is None else dtype.to_real()


class _Placed(NamedTuple):
    """Elements that lie on a mesh, and the axes over which they are sharded; none where a gradient is missing."""

    axes: frozenset[int]
    local: torch.Tensor | None


class _Gradients:
    """What there is to sum up, by mesh, and to scale."""

    def __init__(self) -> None:
        self.plain: list[torch.Tensor] = []
        self.by_mesh: dict[DeviceMesh, list[_Placed]] = {}
        self.by_group: dict[GroupCollectives, list[torch.Tensor]] = {}
        self.to_scale: list[torch.Tensor] = []
        # Whether the norm must not depend on how gradients are cut.
        self.is_exact = False


def _find_gradients(params: list[torch.Tensor], order: float) -> _Gradients:
    found = _Gradients()
    units = [_unit_of(param) for param in params]
    _check_not_all_held(units)
    rows = _whole_rows(params, units, order)
    found.is_exact = any(unit is not None and unit.sums.is_exact for unit in units)
    for param, unit in zip(params, units, strict=True):
        if unit in rows:
            buffer = rows[unit]
            if buffer is not None:
                placed = _Placed(_sharding_axes(param), buffer.row)
                found.by_mesh.setdefault(spec_of(param).mesh, []).append(placed)
                # What is not finite must not come to stand in the padding, from where nothing would remove it.
                found.to_scale += [buffer.row] if buffer.is_full else buffer.locals
                rows[unit] = None
            continue
        gradient = param.grad
        if gradient is not None:
            found.to_scale.append(local_of(gradient) if isinstance(gradient, DTensor) else gradient)
            gradient = _whole_or_sharded(gradient)
        # By the parameter where there is no gradient: a rank without one must take part in what its peers reduce.
        like = param if gradient is None else gradient
        if isinstance(like, DTensor):
            local = None if gradient is None else local_of(gradient)
            found.by_mesh.setdefault(like.device_mesh, []).append(_Placed(_sharding_axes(like), local))
        elif unit is not None and is_flat(unit) and unit.mesh.shard.world > 1:
            parts = [] if gradient is None else _flat_parts(unit, param, gradient, order)
            found.by_group.setdefault(unit.mesh.shard, []).extend(parts)
        elif gradient is not None:
            found.plain.append(gradient)
    return found


def _check_not_all_held(units: list[Unit | None]) -> None:
    """Some units may reduce more seldom than others; where all of them have yet to, the norm would be of nothing."""
    trained = [unit for unit in dict.fromkeys(units) if unit is not None and unit.gradients.num_trainable]
    if trained and all(unit.gradients.are_held for unit in trained):
        raise StateError(
            "the gradients to clip are kept back: no backward has reduced them yet",
            where=f"{_CALL}, unit '{trained[0].name}', rank {trained[0].rank}",
            fix="run the last backward before it outside of no_sync(), or with set_requires_gradient_sync(True)",
        )


def _flat_parts(unit: Unit, param: torch.Tensor, gradient: torch.Tensor, order: float) -> list[torch.Tensor]:
    """The gradient of a flat shard; for the smallest element without its padding, which is zero."""
    if order > 0:
        return [gradient]
    return [shown_part(slot, gradient) for slot in flat_slots(unit) if slot.sharded is param]


def _sharded(param: torch.Tensor) -> torch.Tensor:
    """The shard of a parameter, which has the gradient also while a module shows the parameter gathered."""
    taken = membership(param)
    return taken[1].sharded if taken is not None and param is taken[1].unsharded else param


def _unit_of(param: torch.Tensor) -> Unit | None:
    taken = membership(param)
    return taken[0] if taken is not None and taken[1].sharded is param else None


def _whole_rows(
    params: list[torch.Tensor], units: list[Unit | None], order: float
) -> dict[Unit | None, GradientBuffer | None]:
    """Units all of whose gradients are asked for, each once, and still are where the engine put them."""
    asked: dict[Unit | None, list[torch.Tensor]] = {}
    for param, unit in zip(params, units, strict=True):
        if param.grad is not None:
            asked.setdefault(unit, []).append(param)
    rows: dict[Unit | None, GradientBuffer | None] = {}
    for unit, with_gradient in asked.items():
        buffer = unit.gradients.lent() if unit is not None else None
        # Padding is zero: nothing to a sum or to the largest, but not to the smallest.
        if buffer is None or not (buffer.is_full or order > 0):
            continue
        if len(with_gradient) == len(buffer.locals) == len(set(with_gradient)):
            rows[unit] = buffer
    return rows


def _total_norm(found: _Gradients, order: float, together: bool) -> torch.Tensor:
    present = found.to_scale
    device = present[0].device if present else torch.device("cpu")
    if found.is_exact and not math.isinf(order):
        return _exact_norm(found, order, device)
    values = _measured(
        found, lambda tensors, at: _value(tensors, order, at, together), _operation(order), device
    )
    return _root(values[0] if len(values) == 1 else _sum(torch.stack(values), order), order)


def _exact_norm(found: _Gradients, order: float, device: torch.device) -> torch.Tensor:
    check_order(order, found.to_scale, _CALL)
    largest = torch.stack(_measured(found, largest_of, dist.ReduceOp.MAX, device)).amax(dim=0)
    words = _measured(
        found, lambda tensors, at: words_of(tensors, order, largest.to(at), at), dist.ReduceOp.SUM, device
    )
    return norm_from(torch.stack(words).sum(dim=0), order, largest)


def _measured(
    found: _Gradients, measure: Measure, operation: Any, device: torch.device
) -> list[torch.Tensor]:
    """The measure of all gradients that lie on one mesh, for each mesh, and of those on none."""
    is_placed = found.by_mesh or found.by_group
    values = [measure(found.plain, device)] if found.plain or not is_placed else []
    for mesh, placed in found.by_mesh.items():
        values.append(_measured_on(mesh, placed, measure, operation).to(device))
    for calls, shards in found.by_group.items():
        value = measure(shards, calls.device)
        calls.channel.before_backend_collective(_CLIP)
        dist.all_reduce(value, operation, group=calls.group)
        calls.channel.after_backend_collective()
        values.append(value.to(device))
    return values


def _measured_on(mesh: DeviceMesh, placed: list[_Placed], measure: Measure, operation: Any) -> torch.Tensor:
    axes = sorted(frozenset().union(*(each.axes for each in placed)))
    groups: list[dist.ProcessGroup] = [mesh.get_group(axis) for axis in axes]
    if len(axes) > 1 and mesh.size() == dist.get_world_size() and dist.group.WORLD is not None:
        axes, groups = list(range(mesh.ndim)), [dist.group.WORLD]
    own = mesh.get_coordinate() or [0] * mesh.ndim
    counted = []
    for sharded, local in placed:
        # What an axis repeats counts on its first rank alone.
        if local is not None and not any(own[axis] for axis in axes if axis not in sharded):
            counted.append(local)
    # Shards may live on the host while the mesh talks for a device.
    value = measure(counted, torch.device(mesh.device_type))
    for group in groups:
        channel = channel_of(group, value.device)
        channel.before_backend_collective(_CLIP)
        dist.all_reduce(value, operation, group=group)
        channel.after_backend_collective()
    return value


def _operation(order: float) -> Any:
    if math.isinf(order):
        return dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN
    return dist.ReduceOp.SUM


def _sharding_axes(tensor: torch.Tensor) -> frozenset[int]:
    assert isinstance(tensor, DTensor)
    return frozenset(axis for axis, where in enumerate(tensor.placements) if not isinstance(where, Replicate))


# A value is a sum of powers, and the total is its root; for an infinite order it is the largest (or smallest)
# element. In float64, so that powers neither overflow nor round.


def _value(tensors: list[torch.Tensor], order: float, device: torch.device, together: bool) -> torch.Tensor:
    norms = [
        torch.stack(norms_of(alike, order, together)).to(device, torch.float64)
        for alike in _grouped([piece for tensor in tensors for piece in _pieces(tensor)]).values()
    ]
    if not norms:
        return torch.full((), _nothing(order), dtype=torch.float64, device=device)
    values = norms[0] if len(norms) == 1 else torch.cat(norms)
    return _sum(values if math.isinf(order) else values.pow(order), order)


# On a CPU torch adds up a long tensor in float32 from end to end: after some millions of elements few digits are left.
_CPU_PIECE_NUMEL = 2**17


def _pieces(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensor in pieces that are short enough to be summed up well; none if it is empty."""
    numel = tensor.numel()
    if numel == 0:
        return ()
    if numel <= _CPU_PIECE_NUMEL or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return (tensor,)
    return torch.split(tensor.view(-1), _CPU_PIECE_NUMEL)


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


def _grouped(
    tensors: list[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups
