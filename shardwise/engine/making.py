"""Making a unit out of a module's parameters: everything is checked before anything is changed."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwise.comm.mesh import DataMesh
from shardwise.engine.binding import UNITS_ATTRIBUTE, Place, Slot, show_sharded, units_of
from shardwise.engine.hooks import Hooks
from shardwise.engine.root import Root
from shardwise.engine.unit import Unit
from shardwise.errors import ConfigError
from shardwise.plan.schedule import AfterForward
from shardwise.plan.spans import cut_evenly
from shardwise.policies import MixedPrecisionPolicy, OffloadPolicy
from shardwise.torch_internals import buffers_of, dtensor, dtensor_spec, parameters_of

PlacementFn = Callable[[nn.Parameter], "Shard | None"]

MEMBERSHIP_ATTRIBUTE = "_shardwise_membership"


class Membership:
    """Set on a parameter, full or sharded: a module sharded later that shows the same parameter finds its unit here.

    It stays behind when the parameter is copied or saved: a copy belongs to no unit.
    """

    def __init__(self, unit: Unit | None = None, slot: Slot | None = None) -> None:
        self.unit = weakref.ref(unit) if unit is not None else None
        self.slot = slot

    def __deepcopy__(self, memo: dict[int, object]) -> Membership:
        return Membership()

    def __reduce__(self) -> tuple[type[OrderedDict[str, object]], tuple[()]]:
        # What is saved must load without shardwise, and with torch.load(weights_only=True).
        return (OrderedDict, ())


def membership(param: torch.Tensor) -> tuple[Unit, Slot] | None:
    tag = param.__dict__.get(MEMBERSHIP_ATTRIBUTE)
    if not isinstance(tag, Membership) or tag.unit is None or tag.slot is None:
        return None
    unit = tag.unit()
    return None if unit is None else (unit, tag.slot)


@dataclass
class Found:
    """A parameter with every place that shows it."""

    name: str
    param: nn.Parameter
    places: list[Place]


def find_parameters(modules: Iterable[nn.Module], ignored: set[nn.Parameter]) -> list[Found]:
    """The parameters below ``modules`` that no earlier unit took; a shared one is found once, with all its places."""
    found: dict[int, Found] = {}
    seen: set[nn.Module] = set()
    tops = list(modules)
    for top in tops:
        _find_below(top, "", tops, ignored, seen, found)
    return list(found.values())


def _find_below(
    module: nn.Module,
    prefix: str,
    tops: list[nn.Module],
    ignored: set[nn.Parameter],
    seen: set[nn.Module],
    found: dict[int, Found],
) -> None:
    if module in seen or (units_of(module) and module not in tops):
        return
    seen.add(module)
    for name, param in parameters_of(module).items():
        if param is None or param in ignored:
            continue
        entry = found.setdefault(id(param), Found(prefix + name, param, []))
        entry.places.append(Place(module, name))
    for name, child in module.named_children():
        _find_below(child, f"{prefix}{name}.", tops, ignored, seen, found)


def check_parameter(found: Found, dim: int, where: str) -> None:
    param = found.param
    where = f"parameter '{found.name}', {where}"
    if isinstance(param, DTensor):
        raise ConfigError(
            f"parameter '{found.name}' is a DTensor already, placed {tuple(param.placements)}",
            where=where,
            fix="shard plain parameters; put parameters that another library manages into ignored_params",
        )
    if param.layout is not torch.strided:
        raise ConfigError(
            f"parameter '{found.name}' is sparse ({param.layout}), and shards are dense",
            where=where,
            fix="make it dense with .to_dense(), or put it into ignored_params",
        )
    if param.requires_grad and not (param.is_floating_point() or param.is_complex()):
        raise ConfigError(
            f"parameter '{found.name}' is of {param.dtype} and needs grad, which only floating point can have",
            where=where,
            fix="set requires_grad=False, or make it a buffer",
        )
    if param.dim() == 0:
        raise ConfigError(
            f"parameter '{found.name}' is a scalar, which cannot be cut into shards",
            where=where,
            fix="give it one dim, e.g. nn.Parameter(value.reshape(1)), or put it into ignored_params",
        )
    if not -param.dim() <= dim < param.dim():
        raise ConfigError(
            f"parameter '{found.name}' of shape {tuple(param.shape)} has no dim {dim} to shard on",
            where=where,
            fix=f"return Shard(0) to Shard({param.dim() - 1}) from shard_placement_fn",
        )


def chosen_dim(found: Found, placement_fn: PlacementFn | None, where: str) -> int:
    param = found.param
    placement = placement_fn(param) if placement_fn is not None else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ConfigError(
            f"shard_placement_fn returned {placement!r} for a parameter of shape {tuple(param.shape)}",
            where=f"parameter '{found.name}', {where}",
            fix="return a torch.distributed.tensor.Shard(dim), or None for Shard(0)",
        )
    return placement.dim


def check_unit(
    modules: tuple[nn.Module, ...], ignored: set[nn.Parameter], placement_fn: PlacementFn | None, where: str
) -> None:
    """Raises if any parameter of ``modules`` cannot be sharded; changes nothing."""
    for found in find_parameters(modules, ignored):
        if membership(found.param) is None:
            check_parameter(found, chosen_dim(found, placement_fn, where), where)


def make_unit(
    name: str,
    modules: tuple[nn.Module, ...],
    mesh: DataMesh,
    after_forward: AfterForward,
    placement_fn: PlacementFn | None,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    ignored: set[nn.Parameter],
) -> Unit:
    """Makes the parameters of ``modules`` that belong to no unit yet into one, in place."""
    own: list[tuple[Found, int]] = []
    tied: list[tuple[Found, Unit, Slot]] = []
    for found in find_parameters(modules, ignored):
        taken = membership(found.param)
        if taken is not None:
            tied.append((found, *taken))
        else:
            own.append((found, chosen_dim(found, placement_fn, name) % found.param.dim()))

    slots = [_make_slot(found, dim, mesh, precision) for found, dim in own]
    unit = Unit(name, modules, slots, mesh, after_forward, precision, offload)
    unit.hooks = Hooks(unit)
    Root(unit)
    for (found, _), slot in zip(own, slots, strict=True):
        tag = Membership(unit, slot)
        found.param.__dict__[MEMBERSHIP_ATTRIBUTE] = slot.sharded.__dict__[MEMBERSHIP_ATTRIBUTE] = tag
    for found, owner, slot in tied:
        known = {(place.module, place.name) for place in slot.places}
        slot.places.extend(place for place in found.places if (place.module, place.name) not in known)
        if owner not in unit.needs:
            unit.needs = (*unit.needs, owner)
    for owner in {*unit.needs, unit}:
        show_sharded(owner.slots)
    for module in modules:
        module.__dict__[UNITS_ATTRIBUTE] = (*units_of(module), unit)
        _move_buffers(module, mesh.device)
    return unit


def _make_slot(found: Found, dim: int, mesh: DataMesh, precision: MixedPrecisionPolicy) -> Slot:
    param = found.param
    span = cut_evenly(param.shape[dim], mesh.shard.world, mesh.shard.rank)
    full = param.detach()
    stride = torch.empty(param.shape, device="meta").stride()
    spec = dtensor_spec(mesh.mesh, mesh.placements(dim), param.shape, stride, param.dtype)
    # A copy on the mesh's device type is needed for the DTensor to say the right device; the unit's buffer takes the
    # values over and this one goes.
    local = full.narrow(dim, span.start, span.numel)
    if local.device.type != "meta":
        local = local.to(mesh.device)
    sharded = nn.Parameter(dtensor(local.contiguous(), spec), requires_grad=param.requires_grad)
    for key, value in param.__dict__.items():
        sharded.__dict__.setdefault(key, value)
    casts = precision.param_dtype is not None and param.is_floating_point()
    compute_dtype = precision.param_dtype if casts else param.dtype
    assert compute_dtype is not None
    return Slot(found.name, found.places, dim, compute_dtype, spec, sharded)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for child in module.modules():
        for name, buffer in buffers_of(child).items():
            if buffer is not None and buffer.device != device and buffer.device.type != "meta":
                buffers_of(child)[name] = buffer.to(device)
