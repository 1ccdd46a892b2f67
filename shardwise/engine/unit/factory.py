"""Makes a unit out of a module's parameters. Everything is checked before anything is changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardwise.comm.mesh import DataMesh
from shardwise.engine.reduce.reduce_plan import DEFAULT_SUMMATION, Summation
from shardwise.engine.step.agreement import OPTIMIZER_HOOKS
from shardwise.engine.step.root import Root
from shardwise.engine.unit.binding import FoundParameter, Place, Slot, clean_name
from shardwise.engine.unit.dtensor_form import PlacementFn, ShardedForm, chosen_placement
from shardwise.engine.unit.hooks import UnitHooks
from shardwise.engine.unit.membership import (
    UNITS_ATTRIBUTE,
    hidden,
    membership,
    share_tag,
    tag,
    tag_hidden,
    units_of,
)
from shardwise.engine.unit.settings import UnitSettings, shard_home
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigAssertionError, ConfigError
from shardwise.planning.layout import ceil_div
from shardwise.planning.lifecycle import AfterForward
from shardwise.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.torch_internals import (
    are_other_axes,
    buffers_of,
    is_replicated,
    local_part,
    parameters_of,
    refuse_torchs_fsdp,
)


def find_parameters(modules: Iterable[nn.Module], ignored: set[nn.Parameter]) -> list[FoundParameter]:
    """Finds the parameters below ``modules``, except in modules that have units of their own or are replicated.

    A shared parameter is found once, with all its places; one that belongs to a unit already comes with that unit.
    """
    found: dict[int, FoundParameter] = {}
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
    found: dict[int, FoundParameter],
) -> None:
    if module in seen or is_replicated(module) or (units_of(module) and module not in tops):
        return
    seen.add(module)
    for name, param in parameters_of(module).items():
        taken = hidden(module, name) if param is None else membership(param)
        if param is None and taken is not None:
            param = taken[1].sharded
        if param is None or param in ignored:
            continue
        # One flat parameter may hold several slots.
        entry = found.setdefault(
            id(param if taken is None else taken[1]),
            FoundParameter(clean_name(prefix + name), param, [], taken),
        )
        entry.places.append(Place(module, name))
    for name, child in module.named_children():
        _find_below(child, f"{prefix}{name}.", tops, ignored, seen, found)


def check_fits_shards(found: FoundParameter, ignoring: str, where: str) -> None:
    """Raises unless a parameter has a shape, and dense elements and gradients.

    Warns if its module writes to it in forward: such a write is lost with the full parameter. ``ignoring`` is the
    argument that excludes parameters, for the error's fix.
    """
    param = found.param
    where = f"parameter '{found.name}', {where}"
    if is_lazy(param):
        raise ConfigError(
            f"parameter '{found.name}' has no shape yet: its module sets it from the first input",
            where=where,
            fix="run one forward of the model before it is sharded",
        )
    if param.layout is not torch.strided:
        raise ConfigError(
            f"parameter '{found.name}' is sparse ({param.layout}), and shards are dense",
            where=where,
            fix=f"make it dense with .to_dense(), or put it into {ignoring}",
        )
    for place in found.places:
        if not isinstance(place.module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        kind = type(place.module).__name__
        if place.module.sparse:
            raise ConfigError(
                f"parameter '{found.name}' gets sparse gradients, but gradients of shards are dense",
                where=where,
                fix=f"make the {kind} with sparse=False, or put it into {ignoring}",
            )
        if place.module.max_norm is not None:
            warnings.warn(
                f"the {kind} of parameter '{found.name}' has max_norm: it scales rows of the full parameter in each "
                f"forward, and the shards, which the optimizer steps, are not scaled. Scale them yourself after a "
                f"step, or put the parameter into {ignoring}",
                stacklevel=2,
            )


def check_parameter(found: FoundParameter, dim: int, mesh: DataMesh, where: str) -> None:
    param = found.param
    where = f"parameter '{found.name}', {where}"
    if isinstance(param, DTensor):
        check_tensor_parallel(found, param, mesh, where)
    if param.requires_grad and not (param.is_floating_point() or param.is_complex()):
        raise ConfigError(
            f"parameter '{found.name}' of {param.dtype} has requires_grad=True, which only floating point can have",
            where=where,
            fix="set requires_grad=False, or make it a buffer",
        )
    if param.dim() == 0:
        raise ConfigError(
            f"parameter '{found.name}' is a scalar, which cannot be cut into shards",
            where=where,
            fix="give it one dim, e.g. nn.Parameter(value.reshape(1)); or put it into ignored_params, and average its "
            "gradient over ranks yourself",
        )
    if not -param.dim() <= dim < param.dim():
        raise ConfigAssertionError(
            f"parameter '{found.name}' of shape {tuple(param.shape)} has no dim {dim} to shard on",
            where=where,
            fix=f"return Shard(0) to Shard({param.dim() - 1}) from shard_placement_fn",
        )


def check_tensor_parallel(found: FoundParameter, param: DTensor, mesh: DataMesh, where: str) -> None:
    """Raises unless the mesh of a tensor-parallel parameter belongs to the same mesh as that of data parallelism."""
    if mesh.whole is not None and param.device_mesh == mesh.whole:
        if not all(param.placements[axis].is_replicate() for axis in mesh.named):
            raise ConfigError(
                f"parameter '{found.name}' is placed {tuple(param.placements)} on {mesh.whole}: it is not replicated "
                "on the axes that dp_mesh_dims names",
                where=where,
                fix="place it with Replicate() on the axes of data parallelism: fully_shard shards it there",
            )
        return
    if not are_other_axes(mesh.mesh, param.device_mesh):
        raise ConfigAssertionError(
            f"parameter '{found.name}' is a DTensor on the mesh {param.device_mesh}, which is not another axis of the "
            f"mesh that {mesh.mesh} belongs to",
            where=where,
            fix="slice both from one mesh: mesh = init_device_mesh(..., mesh_dim_names=('dp', 'tp')), parallelize with "
            "mesh['tp'] and shard with mesh['dp']",
        )


def check_unit(
    modules: tuple[nn.Module, ...],
    ignored: set[nn.Parameter],
    placement_fn: PlacementFn | None,
    mesh: DataMesh,
    where: str,
) -> None:
    """Raises if any parameter of ``modules`` cannot be sharded; changes nothing."""
    for found in find_parameters(modules, ignored):
        if found.taken is None:
            check_fits_shards(found, "ignored_params", where)
            check_parameter(found, chosen_placement(found, placement_fn, where)[0], mesh, where)


def make_unit(
    name: str,
    modules: tuple[nn.Module, ...],
    mesh: DataMesh,
    after_forward: AfterForward,
    form: ShardedForm,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    ignored: set[nn.Parameter],
    sums: Summation = DEFAULT_SUMMATION,
    companions: tuple[Unit, ...] = (),
) -> Unit:
    """Makes a unit of the parameters of ``modules`` that belong to no unit yet, in place, and returns it."""
    own: list[FoundParameter] = []
    tied: list[tuple[FoundParameter, Unit, Slot]] = []
    for found in find_parameters(modules, ignored):
        if found.taken is not None:
            tied.append((found, *found.taken))
        else:
            own.append(found)

    offload = _within_budget(offload, own, mesh)
    slots = form.make_slots(own, mesh, precision, shard_home(mesh, offload).device, name)
    settings = UnitSettings(precision, offload, after_forward, gather_calls=mesh.shard)
    unit = Unit(
        name, modules, slots, form, mesh, settings, sums, partial(UnitHooks, companions=companions), Root
    )
    OPTIMIZER_HOOKS.install()
    for found, slot in zip(own, slots, strict=True):
        tag(found.param, unit, slot)
        share_tag(found.param, slot.sharded)
        tag_hidden(unit, slot)
    for found, owner, slot in tied:
        known = {(place.module, place.name) for place in slot.places}
        slot.places.extend(place for place in found.places if (place.module, place.name) not in known)
        tag_hidden(owner, slot)
        unit.need(owner)
    for owner in {*unit.needs, unit}:
        owner.show_in_all_places()
    _keep_weights_in_place(slots)
    _refuse_a_second_sharding(unit)
    for module in modules:
        module.__dict__[UNITS_ATTRIBUTE] = (*units_of(module), unit)
        _move_buffers(module, mesh.device)
    return unit


def _refuse_a_second_sharding(unit: Unit) -> None:
    for slot in unit.slots:
        refusal = ConfigError(
            f"parameter '{slot.name}' is sharded by shardwise already, and torch's FSDP would shard the shards",
            where=f"torch's FSDP on a model with unit '{unit.name}', rank {unit.rank}",
            fix="shard the rest of the model with shardwise too; if a library does it, call shardwise.install() first",
        )
        for module in (*(place.module for place in slot.places), *unit.modules):
            refuse_torchs_fsdp(module, refusal)


def _keep_weights_in_place(slots: list[Slot]) -> None:
    """Keeps recurrent modules from moving their weights to memory of their own, which gathers do not fill."""
    for slot in slots:
        for place in slot.places:
            if isinstance(place.module, nn.RNNBase):
                place.module.flatten_parameters = _do_nothing  # type: ignore[method-assign]


def _do_nothing() -> None:
    pass


def _within_budget(offload: OffloadPolicy, own: list[FoundParameter], mesh: DataMesh) -> OffloadPolicy:
    """Returns the unit's offload policy: none while the budget for shards on the device lasts. Same on all ranks."""
    if not isinstance(offload, CPUOffloadPolicy) or mesh.device.type == "cpu":
        return offload
    shard_bytes = 0
    for found in own:
        part = local_part(found.param)
        shard_bytes += ceil_div(part.numel(), mesh.shard.world) * part.itemsize
    return OffloadPolicy() if offload.keeps_on_device(mesh.rank, shard_bytes) else offload


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for child in module.modules():
        for name, buffer in buffers_of(child).items():
            if buffer is not None and buffer.device != device and buffer.device.type != "meta":
                buffers_of(child)[name] = buffer.to(device)
