"""``clip_grad_norm_`` for parameters on several meshes or on none.

    gradients ──local norms──▶ one value per mesh ──one all-reduce per mesh──▶ values of full gradients ──▶ total

torch's ``clip_grad_norm_`` needs all gradients on one mesh. Here each mesh has its own all-reduce, over the axes that
shard; a gradient that is replicated over an axis is counted once. Every rank computes the same total.

While all of a unit's gradients are views of the buffer they were reduced into, the buffer is summed and scaled as one
tensor. For a model with exact sums the norm is exact too (``exact_norm``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwise.comm.channels.channel import collective_code
from shardwise.comm.channels.registry import channel_of
from shardwise.comm.collectives.group import GroupCollectives
from shardwise.engine.buffers import GradientBuffer
from shardwise.engine.gather.full_tensors import flat_slots, is_flat, local_elements
from shardwise.engine.unit.membership import membership
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError, ConfigTypeError, StateError
from shardwise.torch_internals import local_of, local_part, multiply_all, norms_of, spec_of
from shardwise.training_step.exact_norm import check_order, largest_of, norm_from, words_of

_CALL = "clip_grad_norm_"
# Computes one value of all these tensors, on the given device.
Measure = Callable[[list[torch.Tensor], torch.device], torch.Tensor]
_CLIP = collective_code("sum up the norm of gradients")


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    stages: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scales gradients in place so that their total norm is at most ``max_norm``.

    For a model sharded with ``exact=True`` the norm has the same bits however the model is sharded; its order must then
    be 1, 2 or infinity.

    Args:
        parameters: plain tensors, shards of wrapped modules and DTensors on any meshes; those without a gradient are
            skipped. All ranks of a mesh must pass the same parameters; gradients may be missing on some ranks.
        max_norm: the largest norm allowed.
        norm_type: the order of the norm, ``float("inf")`` for the largest element.
        error_if_nonfinite: raise on every rank, before anything is scaled, if the total is nan or infinite.
        foreach: ``False`` computes tensor by tensor; otherwise all tensors of one device and dtype together.
        stages: the ranks of a pipeline, each of which passes its own stage's parameters; their gradients are clipped
            by their common norm.

    Returns:
        The norm of the unsharded model's gradients before clipping: a plain tensor, the same on every rank.
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
        raise ConfigError(f"max_norm is {max_norm}", where=_CALL, fix="pass a number of zero or more")
    if norm_type == 0 or math.isnan(norm_type):
        raise ConfigError(
            f"norm_type is {norm_type}, which is not the order of a norm",
            where=_CALL,
            fix="pass 1, 2, inf, ...",
        )
    together = foreach is not False
    params = list(dict.fromkeys(map(_sharded, params)))
    with torch.no_grad():
        found = _find_gradients(params, float(norm_type))
        dtype = torch.promote_types(torch.float32, dtype_of_gradients(params) or torch.float32)
        total = _total_norm(found, float(norm_type), together, stages).to(dtype)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise StateError(
                f"the total norm of order {norm_type} of the gradients is {total.item()}: they cannot be clipped",
                where=f"{_CALL}(error_if_nonfinite=True)",
                fix="skip this step and zero the gradients (none was scaled), or pass error_if_nonfinite=False",
            )
        # Always scales, mostly by one: a comparison would make the host wait for the norm.
        coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for (device, _), tensors in _by_device_and_dtype(found.to_scale).items():
            scale = coefficient.to(device)
            if together:
                multiply_all(tensors, scale)
            else:
                for tensor in tensors:
                    tensor.mul_(scale.to(tensor.dtype))
        increment_version(found.written)
    return total


def dtype_of_gradients(params: Iterable[torch.Tensor]) -> torch.dtype | None:
    """The real dtype to which the gradients of all these parameters promote; None if there are no gradients.

    Empty flat shards count as well, though they have no gradient: other ranks may have one, and all must agree.
    """
    dtype: torch.dtype | None = None
    for param in params:
        gradient = param.grad
        if gradient is not None:
            own = gradient.dtype
        elif param.requires_grad and param.numel() == 0 and not isinstance(param, DTensor):
            own = param.grad_dtype or param.dtype
        else:
            continue
        dtype = own if dtype is None else torch.promote_types(dtype, own)
    return None if dtype is None else dtype.to_real()


class _Placed(NamedTuple):
    """A gradient on a mesh: the axes that shard it, and its local tensor, None if this rank has no gradient."""

    axes: frozenset[int]
    local: torch.Tensor | None


class _Gradients:
    """The gradients to measure, by mesh or group, and the tensors to scale."""

    def __init__(self) -> None:
        self.plain: list[torch.Tensor] = []
        self.by_mesh: dict[DeviceMesh, list[_Placed]] = {}
        self.by_group: dict[GroupCollectives, list[torch.Tensor]] = {}
        self.to_scale: list[torch.Tensor] = []
        # Gradients whose versions do not rise when the above are scaled.
        self.written: list[torch.Tensor] = []
        # Whether the norm must not depend on how gradients are sharded.
        self.is_exact = False


def _find_gradients(params: list[torch.Tensor], order: float) -> _Gradients:
    found = _Gradients()
    units = [_unit_of(param) for param in params]
    _check_not_all_stashed(units)
    for unit in units:
        if unit is not None:
            unit.gradients.hide_stash()
    rows = _complete_buffers(params, units, order)
    found.is_exact = any(unit is not None and unit.gradients.sums.is_exact for unit in units)
    for param, unit in zip(params, units, strict=True):
        if unit in rows:
            buffer = rows[unit]
            if buffer is not None:
                placed = _Placed(_sharding_axes(param), buffer.row)
                found.by_mesh.setdefault(spec_of(param).mesh, []).append(placed)
                # Padding is not scaled: a scale of nan or inf would stay there.
                found.to_scale += [buffer.row] if buffer.is_full else buffer.locals
                if buffer.is_full:
                    # The row is another tensor over their memory.
                    found.written += buffer.locals
                rows[unit] = None
            continue
        gradient = param.grad
        if gradient is not None:
            found.to_scale.append(local_part(gradient))
            gradient = _without_partial(gradient)
        # A rank without a gradient goes by the parameter: it must take part in the same all-reduces as the others.
        like = param if gradient is None else gradient
        if isinstance(like, DTensor):
            local = None if gradient is None else local_of(gradient)
            found.by_mesh.setdefault(like.device_mesh, []).append(_Placed(_sharding_axes(like), local))
        elif unit is not None and is_flat(unit) and any(slot.tensor_parallel for slot in unit.slots):
            _place_flat(found, unit, param, gradient)
        elif unit is not None and is_flat(unit) and unit.mesh.shard.world > 1:
            parts = [] if gradient is None else _flat_parts(unit, param, gradient, order)
            found.by_group.setdefault(unit.mesh.shard, []).extend(parts)
        elif gradient is not None:
            found.plain.append(gradient)
    return found


def _check_not_all_stashed(units: list[Unit | None]) -> None:
    """Raises if the gradients of all units are stashed, so that there is nothing to clip. Some units may be."""
    trained = [unit for unit in dict.fromkeys(units) if unit is not None and unit.gradients.num_trainable]
    if trained and all(unit.gradients.has_stash for unit in trained):
        raise StateError(
            "the gradients to clip have not been reduced yet",
            where=f"{_CALL}, unit '{trained[0].name}', rank {trained[0].rank}",
            fix="run the last backward before clipping outside no_sync(), or with set_requires_gradient_sync(True)",
        )


def _place_flat(found: _Gradients, unit: Unit, param: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Adds the gradient of a flat shard with tensor parallelism: each parameter in it may be placed differently."""
    for slot in flat_slots(unit):
        if slot.sharded is not param:
            continue
        part = None if gradient is None else local_elements(slot, gradient)
        if slot.tensor_parallel is not None:
            placements = slot.spec.placements
            axes = frozenset(
                axis for axis, where in enumerate(placements) if not isinstance(where, Replicate)
            )
            found.by_mesh.setdefault(slot.spec.mesh, []).append(_Placed(axes, part))
        elif unit.mesh.shard.world > 1:
            found.by_group.setdefault(unit.mesh.shard, []).extend([] if part is None else [part])
        elif part is not None:
            found.plain.append(part)


def _flat_parts(unit: Unit, param: torch.Tensor, gradient: torch.Tensor, order: float) -> list[torch.Tensor]:
    """The gradient of a flat shard, without its zero padding if the norm is of the smallest element."""
    if order > 0:
        return [gradient]
    return [local_elements(slot, gradient) for slot in flat_slots(unit) if slot.sharded is param]


def _sharded(param: torch.Tensor) -> torch.Tensor:
    """The shard of a parameter that may be unsharded at present: the shard has the gradient."""
    taken = membership(param)
    return taken[1].sharded if taken is not None and param is taken[1].unsharded else param


def _unit_of(param: torch.Tensor) -> Unit | None:
    taken = membership(param)
    return taken[0] if taken is not None and taken[1].sharded is param else None


def _complete_buffers(
    params: list[torch.Tensor], units: list[Unit | None], order: float
) -> dict[Unit | None, GradientBuffer | None]:
    """The gradient buffers of units all of whose gradients are to be clipped and are still views of the buffer."""
    to_clip: dict[Unit | None, list[torch.Tensor]] = {}
    for param, unit in zip(params, units, strict=True):
        if param.grad is not None:
            to_clip.setdefault(unit, []).append(param)
    rows: dict[Unit | None, GradientBuffer | None] = {}
    for unit, with_gradient in to_clip.items():
        buffer = unit.gradients.lent() if unit is not None else None
        # Zero padding does not change a sum or the largest element, but the smallest one.
        if buffer is None or not (buffer.is_full or order > 0):
            continue
        if len(with_gradient) == len(buffer.locals) == len(set(with_gradient)):
            rows[unit] = buffer
    return rows


def _total_norm(
    found: _Gradients, order: float, together: bool, stages: dist.ProcessGroup | None
) -> torch.Tensor:
    present = found.to_scale
    device = present[0].device if present else torch.device("cpu")
    if found.is_exact and not math.isinf(order):
        if stages is not None:
            raise ConfigError(
                "a norm cannot be exact over the stages of a pipeline",
                where=f"{_CALL}(stages=...)",
                fix="shard with exact=False, or clip by an infinite norm",
            )
        return _exact_norm(found, order, device)
    values = _measured(
        found, lambda tensors, at: _value(tensors, order, at, together), _operation(order), device
    )
    value = values[0] if len(values) == 1 else _sum(torch.stack(values), order)
    if stages is not None:
        value = value.clone()
        dist.all_reduce(value, _operation(order), group=stages)
    return _root(value, order)


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
    """One reduced value for the gradients of each mesh and group, and one for those on no mesh."""
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
        # A gradient that is replicated over an axis counts on the axis's first rank only.
        if local is not None and not any(own[axis] for axis in axes if axis not in sharded):
            counted.append(local)
    # On the mesh's device, for the all-reduce: offloaded shards are on the host.
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


# A value is a sum of powers, and the norm is its root; for an infinite order it is the largest (or smallest) element.
# Values are float64, so that powers neither overflow nor round.


def _value(tensors: list[torch.Tensor], order: float, device: torch.device, together: bool) -> torch.Tensor:
    norms = [
        torch.stack(norms_of(pieces, order, together)).to(device, torch.float64)
        for pieces in _by_device_and_dtype(
            [piece for tensor in tensors for piece in _pieces(tensor)]
        ).values()
    ]
    if not norms:
        empty = math.inf if order == -math.inf else 0.0
        return torch.full((), empty, dtype=torch.float64, device=device)
    values = norms[0] if len(norms) == 1 else torch.cat(norms)
    return _sum(values if math.isinf(order) else values.pow(order), order)


# On the CPU, torch accumulates a long tensor sequentially in float32 and loses digits after some millions of elements.
_CPU_PIECE_NUMEL = 2**17


def _pieces(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Splits a tensor into pieces short enough for an accurate sum; none if it is empty."""
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


def _without_partial(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Sums a gradient with ``Partial`` placements over ranks: its norm is defined only then."""
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        summed: torch.Tensor = gradient.redistribute(
            placements=[
                Replicate() if placement.is_partial() else placement for placement in gradient.placements
            ]
        )
        return summed
    return gradient


def _by_device_and_dtype(
    tensors: list[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups
