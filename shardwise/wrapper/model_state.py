"""State dicts of wrapped models: full, sharded or local, as ``set_state_dict_type`` says.

Keys are those of the model without wrappers. Reading a full or sharded state dict gathers one unit after another, so
every rank must take part. Loading full tensors needs no communication: each rank takes its own elements. The whole
state dict is checked before any of it is loaded.

A local state dict has this rank's elements, with their position in the parameter. ``torch.save`` writes them as plain
tensors, one file per rank; ``torch.distributed.checkpoint`` saves all ranks' elements under one name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine.buffers import contiguous_strides
from shardwise.engine.checkpoint_span import CheckpointSpan
from shardwise.engine.gather.full_tensors import (
    flat_slots,
    full_tensor_of,
    is_flat,
    loaded,
    local_elements,
    shard_elements,
    whole_tensor,
)
from shardwise.engine.state_dict_check import check_state_dict, size_mismatch
from shardwise.engine.unit.binding import WRAPPED_NAME, Place, clean_name, is_wrapper
from shardwise.engine.unit.flat_form import FlatSlot
from shardwise.engine.unit.membership import units_of
from shardwise.engine.unit.unit import Unit
from shardwise.errors import CheckpointError, UnsupportedError
from shardwise.planning.layout import cut_evenly
from shardwise.torch_internals import (
    buffers_of,
    children_of,
    dtensor,
    dtensor_spec,
    loads_as_usual,
    loads_elementwise,
    local_part,
    parameters_of,
    state_entries,
)
from shardwise.wrapper.mixed_precision import original_buffer_dtypes
from shardwise.wrapper.state_dict_types import FullStateDictConfig, StateDictType, settings_of
from shardwise.wrapper.summon_full_params import (
    LOADING_ATTRIBUTE,
    flat_lines,
    hide_flat_parameters,
    idle_units,
    is_summoned,
    show_flat_parameters,
    summoned_unit,
)

State = dict[str, Any]
LOCAL = StateDictType.LOCAL_STATE_DICT
SHARDED = StateDictType.SHARDED_STATE_DICT


# --- reading ------------------------------------------------------------------------------------------------------


def read_state(
    wrapper: nn.Module, read_module: Callable[..., State], args: tuple[Any, ...], options: State
) -> State:
    """Returns ``wrapper.state_dict()``, read by ``read_module``, which is ``nn.Module.state_dict``."""
    (unit,) = units_of(wrapper)
    settings, kind = settings_of(wrapper), _kind_of(unit)
    _warn_of_full_tensors(unit, settings.state_dict_type)
    prefix = options.get("prefix", args[1] if len(args) > 1 else "")
    idle_units(wrapper.modules(), "state_dict")
    # The units of full tensors, by the address of the storage.
    unit_of_storage: dict[int, Unit] = {}
    # Slots with tensor parallelism, by the address of this rank's part.
    parallel: dict[int, FlatSlot] = {}
    local_slots: dict[str, tuple[Unit, list[FlatSlot]]] = {}
    with ExitStack() as stack:
        if kind is LOCAL:
            _check_not_tensor_parallel(unit)
            state = read_module(*args, **options)
            local_slots = dict(_slots_by_local_key(wrapper, unit, prefix))
        else:
            for needed in _units_to_summon(unit):
                for slot, full in stack.enter_context(summoned_unit(needed)).items():
                    unit_of_storage[full.untyped_storage().data_ptr()] = needed
                    if slot.tensor_parallel is not None:
                        parallel[full.data_ptr()] = slot
            state = read_module(*args, **options)
        for key in _last_with(prefix, state):
            value = state.pop(key)
            if isinstance(value, torch.Tensor):
                value = _value_to_save(value.detach(), unit_of_storage, parallel, kind)
                if key in local_slots:
                    value = local_shard_of(*local_slots[key], value)
                if settings.state_dict_config.offload_to_cpu:
                    value = value.cpu()
            state[prefix + key[len(prefix) :].removeprefix(f"{WRAPPED_NAME}.")] = value
    _restore_buffer_dtypes(wrapper, state, prefix)
    config = settings.state_dict_config
    if isinstance(config, FullStateDictConfig) and config.rank0_only and not unit.mesh.is_first:
        for key in _last_with(prefix, state):
            del state[key]
    return state


def _check_not_tensor_parallel(unit: Unit) -> None:
    for slot in flat_slots(unit):
        if slot.tensor_parallel is not None:
            raise UnsupportedError(
                f"a local state dict has no place for tensor parallelism, which parameter '{slot.name}' has",
                where=f"state_dict() with LOCAL_STATE_DICT, unit '{unit.name}', rank {unit.rank}",
                fix="use SHARDED_STATE_DICT or FULL_STATE_DICT",
            )


def _kind_of(unit: Unit) -> StateDictType:
    """The kind of state dict of a unit's wrapper: full where every rank has all parameters."""
    kind = settings_of(unit.modules[0]).state_dict_type
    return StateDictType.FULL_STATE_DICT if kind is LOCAL and unit.mesh.shard.world == 1 else kind


def _warn_of_full_tensors(unit: Unit, kind: StateDictType) -> None:
    if kind is not StateDictType.FULL_STATE_DICT and unit.mesh.shard.world == 1:
        warnings.warn(
            f"{kind.name} is set, but with NO_SHARD, or on one rank, nothing is sharded: "
            "full tensors will be returned",
            stacklevel=4,
        )


def _units_to_summon(unit: Unit) -> list[Unit]:
    """``unit`` and the units that it shares parameters with, without those that are summoned already."""
    return [each for each in dict.fromkeys((unit, *unit.needs)) if is_flat(each) and not is_summoned(each)]


def _slots_by_local_key(
    wrapper: nn.Module, unit: Unit, prefix: str
) -> Iterator[tuple[str, tuple[Unit, list[FlatSlot]]]]:
    """The keys of shards in this wrapper's local state dict, each with its unit and slots."""
    needed = _units_to_summon(unit)
    if unit in needed:
        for line in flat_lines(unit):
            yield f"{prefix}{WRAPPED_NAME}.{line.name}", (unit, line.slots)
    unit_of = {slot: each for each in needed for slot in flat_slots(each)}
    for path, slot, place in own_places(wrapper, unit):
        if slot.is_shown and slot in unit_of:
            yield f"{prefix}{WRAPPED_NAME}.{path}{place.name}", (unit_of[slot], [slot])


def _restore_buffer_dtypes(wrapper: nn.Module, state: State, prefix: str) -> None:
    """Casts buffers back to the dtype they had before mixed precision."""
    wrapped = wrapper.get_submodule(WRAPPED_NAME)
    for path, module in _outside_wrappers(wrapped):
        for name, dtype in original_buffer_dtypes(module).items():
            key = prefix + clean_name(f"{path}.{name}" if path else name)
            if key in state:
                state[key] = state[key].to(dtype)


def _last_with(prefix: str, state: State) -> list[str]:
    """The last keys of ``state`` that begin with ``prefix``, in order: the ones that this wrapper has added."""
    found = []
    for key in reversed(state):
        if not key.startswith(prefix):
            break
        found.append(key)
    return found[::-1]


def _value_to_save(
    value: torch.Tensor,
    unit_of_storage: Mapping[int, Unit],
    parallel: Mapping[int, FlatSlot],
    kind: StateDictType,
) -> torch.Tensor:
    local = local_part(value)
    unit = unit_of_storage.get(local.untyped_storage().data_ptr())
    if unit is None:
        return value
    if local.data_ptr() in parallel:
        return gathered_value(parallel[local.data_ptr()], local, unit, kind is SHARDED)
    if kind is SHARDED and unit.mesh.shard.world > 1:
        return sharded_rows(value, unit)
    # A view of the gathered buffer would keep all of the buffer in memory and in the file.
    return value.clone()


class LocalShard(CheckpointSpan):
    """One rank's elements of a parameter or of its optimizer state."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The file must load without shardwise, and with torch.load(weights_only=True).
        return self.elements.__reduce_ex__(protocol)


def local_shard_of(unit: Unit, slots: list[FlatSlot], value: torch.Tensor) -> torch.Tensor:
    """``value``, sharded like these slots, as a ``LocalShard``; unchanged if this rank has all of it."""
    shard = unit.mesh.shard
    if shard.world == 1:
        return value
    slot = slots[0]
    if not slot.is_shown:
        return LocalShard.of(value, shard.rank * value.numel(), shard.world * value.numel())
    return LocalShard.of(value, slot.span.start, prod(slot.shape))


def gathered_value(slot: FlatSlot, part: torch.Tensor, unit: Unit, as_dtensor: bool) -> torch.Tensor:
    """A gathered tensor of a slot as it is saved: as a DTensor, or full. Every rank must call it."""
    as_dtensor = as_dtensor and unit.mesh.shard.world > 1
    if slot.tensor_parallel is None:
        return sharded_rows(part, unit) if as_dtensor else part.clone()
    if not as_dtensor:
        return whole_tensor(slot, part)
    shard, spec = unit.mesh.shard, slot.spec
    span = cut_evenly(part.shape[0], shard.world, shard.rank)
    spec = dtensor_spec(spec.mesh, spec.placements, spec.shape, spec.stride, part.dtype)
    return dtensor(part[span.start : span.stop].clone(), spec)


def sharded_rows(full: torch.Tensor, unit: Unit) -> torch.Tensor:
    """A full tensor as a DTensor sharded along dim 0, as ``fully_shard`` would shard it."""
    if full.dim() == 0:
        return full.clone()
    mesh = unit.mesh
    span = cut_evenly(full.shape[0], mesh.shard.world, mesh.shard.rank)
    local = full[span.start : span.stop].clone()
    strides = contiguous_strides(tuple(full.shape))
    return dtensor(local, dtensor_spec(mesh.mesh, mesh.placements(0), full.shape, strides, full.dtype))


# --- loading ------------------------------------------------------------------------------------------------------


class LoadHooks:
    """The hooks of one wrapper around ``load_state_dict``: they let torch load full tensors into shards.

    Modules that load in a way of their own see full parameters instead, as without wrappers; every rank gathers them.
    """

    def __init__(self) -> None:
        # Units whose modules show full parameters while they load.
        self._summoned = ExitStack()
        # Places that hold a temporary parameter, with what to put back. Loading may nest: wrappers may share a module.
        self._temporary: list[tuple[Place, nn.Parameter | None, torch.Tensor | None]] = []

    def before(self, wrapper: nn.Module, state: State, prefix: str, *_: Any) -> None:
        (unit,) = units_of(wrapper)
        is_local = _kind_of(unit) is LOCAL
        own_shards = own_shard_ids([unit])
        for key in [key for key in state if key.startswith(prefix)]:
            if id(state[key]) in own_shards:
                del state[key]
            else:
                state[f"{prefix}{WRAPPED_NAME}.{key[len(prefix) :]}"] = state.pop(key)
        idle_units(wrapper.modules(), "load_state_dict")
        wrapper.__dict__[LOADING_ATTRIBUTE] = True
        if is_local:
            for key, value in state.items():
                if isinstance(value, CheckpointSpan):
                    state[key] = value.elements
            return
        own_modules = [module for _, module in _outside_wrappers(wrapper.get_submodule(WRAPPED_NAME))]
        if is_summoned(unit) or not all(map(loads_elementwise, own_modules)):
            for needed in _units_to_summon(unit):
                self._summoned.enter_context(summoned_unit(needed, writeback=True))
            _gather_own_values(wrapper, state, f"{prefix}{WRAPPED_NAME}.")
            return
        hide_flat_parameters(unit)
        seen: set[Place] = set()
        for path, slot, place in own_places(wrapper, unit):
            key = f"{prefix}{WRAPPED_NAME}.{path}{place.name}"
            value = loaded(state.get(key))
            is_seen = place in seen
            seen.add(place)
            if not slot.is_shown and not is_seen:
                # Instead of the flat parameter: a view of its elements for torch to copy into.
                part = local_elements(slot, slot.sharded.detach()).view(slot.shown_shape)
                self._temporary.append(
                    (place, place.params[place.name], place.module.__dict__.get(place.name))
                )
                place.show_alone(nn.Parameter(part, slot.sharded.requires_grad))
            if isinstance(value, torch.Tensor):
                full = full_tensor_of(value)
                if tuple(full.shape) == slot.whole_shape:
                    state[key] = shard_elements(slot, full).view(slot.shown_shape)

    def after(self, wrapper: nn.Module, incompatible: Any = None) -> None:
        (unit,) = units_of(wrapper)
        for place, before, placeholder in self._temporary:
            place.params[place.name] = before
            if placeholder is not None:
                place.module.__dict__[place.name] = placeholder
        self._temporary = []
        if not is_summoned(unit):
            show_flat_parameters(unit)
        wrapper.__dict__.pop(LOADING_ATTRIBUTE, None)
        # Last, and once: it may raise.
        finished, self._summoned = self._summoned, ExitStack()
        finished.close()
        if incompatible is not None:
            for keys in incompatible:
                keys[:] = [clean_name(key) for key in keys]


def _gather_own_values(wrapper: nn.Module, state: State, prefix: str) -> None:
    """Replaces the sharded values of modules inside a wrapper and no inner one by full tensors.

    Those of parameters that are DTensors themselves stay.
    """
    inner: list[str] = []
    stay: set[str] = set()
    for path, module in _outside_wrappers(wrapper.get_submodule(WRAPPED_NAME)):
        names = [name for name, param in parameters_of(module).items() if isinstance(param, DTensor)]
        stay.update(prefix + clean_name(f"{path}.{name}" if path else name) for name in names)
        names = [
            name for name, child in children_of(module).items() if child is not None and is_wrapper(child)
        ]
        inner += [f"{prefix}{clean_name(f'{path}.{name}' if path else name)}." for name in names]
    for key in [key for key in state if key.startswith(prefix) and key not in stay]:
        if not key.startswith(tuple(inner)):
            state[key] = full_tensor_of(loaded(state[key]))


def own_places(wrapper: nn.Module, unit: Unit) -> Iterator[tuple[str, FlatSlot, Place]]:
    """The places of parameters inside a wrapper and no inner one, with their module's path and slot.

    A module that the model has under several names comes under each of them.
    """
    paths: dict[int, list[str]] = {}
    for name, module in _outside_wrappers(wrapper.get_submodule(WRAPPED_NAME)):
        path = clean_name(name)
        paths.setdefault(id(parameters_of(module)), []).append(f"{path}." if path else "")
    for needed in dict.fromkeys((unit, *unit.needs)):
        for slot in flat_slots(needed):
            for place in slot.places:
                for path in paths.get(id(place.params), ()):
                    yield path, slot, place


def _outside_wrappers(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """``module`` and the modules below it that are inside no inner wrapper, with all of their paths."""
    if is_wrapper(module):
        return
    yield name, module
    for child_name, child in children_of(module).items():
        if child is not None:
            yield from _outside_wrappers(child, f"{name}.{child_name}" if name else child_name)


def check_fits(wrapper: nn.Module, state: Any, strict: bool) -> None:
    """Raises ``CheckpointError`` if ``state`` cannot be loaded into ``wrapper``; changes no value.

    Does not check keys if a submodule customizes how it loads: only loading shows which ones it needs.
    """
    arguments = f"strict={strict}"
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"a {type(state).__name__} is not a state dict",
            where=f"{type(wrapper).__name__}.load_state_dict({arguments})",
            fix="pass the result of state_dict()",
        )
    plainly = all(is_wrapper(member) or loads_as_usual(member, LoadHooks) for member in wrapper.modules())
    units = idle_units(wrapper.modules(), "load_state_dict")
    own_shards = own_shard_ids(units)
    given = {key: value for key, value in state.items() if id(value) not in own_shards}
    expected = dict(_expected_entries(wrapper, units))
    check_state_dict(wrapper, given, expected, _problem_with, strict and plainly, arguments)


def own_shard_ids(units: Iterable[Unit]) -> set[int]:
    """The ids of the units' own shards. In a state dict they stand for missing values.

    torch's ``set_model_state_dict`` puts them there.
    """
    return {
        id(slot.sharded)
        for unit in units
        if unit.mesh.shard.world > 1 and _kind_of(unit) is not LOCAL
        for slot in unit.slots
    }


def _problem_with(key: str, shape: tuple[int, ...] | None, value: Any) -> str | None:
    if shape is None or not isinstance(value, torch.Tensor):
        return None
    return size_mismatch(key, value, shape)


def _expected_entries(
    wrapper: nn.Module, units: Iterable[Unit]
) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """The keys of a state dict of the kind that is set, with shapes; None for values that are not tensors."""
    # Each with whether its unit's state dict is local.
    slots: dict[tuple[int, str], tuple[FlatSlot, bool]] = {}
    flats: dict[tuple[int, str], bool] = {}
    for unit in units:
        is_local = _kind_of(unit) is LOCAL
        for slot in flat_slots(unit):
            for place in slot.places:
                slots[id(place.params), place.name] = slot, is_local
        flats.update(((id(line.params), line.name), is_local) for line in flat_lines(unit))
    for path, member in wrapper.named_modules(remove_duplicate=False):
        prefix = f"{clean_name(path)}." if clean_name(path) else ""
        params = parameters_of(member)
        for name, param in params.items():
            if (id(params), name) in slots:
                slot, is_local = slots[id(params), name]
                if not is_local or slot.is_shown:
                    yield prefix + name, slot.shown_shape if is_local else slot.whole_shape
            elif param is not None and flats.get((id(params), name), True):
                yield prefix + name, tuple(param.shape)
        for name, value in state_entries(member):
            if value is None or name in buffers_of(member):
                yield prefix + name, None if value is None else tuple(value.shape)
