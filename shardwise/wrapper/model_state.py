"""State dicts of wrapped models, in the kind that is set: given whole, sharded or local; whole and sharded ones taken.

Keys are those of the model without wrappers. Giving whole or sharded values gathers one unit after another, so every
rank must take part. Taking whole values needs no communication: each rank cuts out its own elements. All of a state
dict is checked before any of it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import trace
from shardwise.engine.buffers import contiguous_strides
from shardwise.engine.checkpoint_span import CheckpointSpan
from shardwise.engine.gather.full_tensors import (
    flat_form,
    flat_slots,
    full_tensor_of,
    is_flat,
    own_elements,
    shown_part,
)
from shardwise.engine.unit.binding import WRAPPED_NAME, Place, clean_name, is_wrapper, units_of
from shardwise.engine.unit.flat_form import FlatSlot
from shardwise.engine.unit.unit import Unit
from shardwise.errors import CheckpointError
from shardwise.plan.spans import cut_evenly
from shardwise.torch_internals import (
    buffers_of,
    dtensor,
    dtensor_spec,
    loads_as_usual,
    parameters_of,
    state_entries,
)
from shardwise.wrapper.local_shards import local_shard_of
from shardwise.wrapper.mixed_precision import own_buffer_dtypes
from shardwise.wrapper.state_dict_types import FullStateDictConfig, StateDictType, settings_of
from shardwise.wrapper.summon_full_params import check_idle, is_shown_whole, one_shown_whole, show_flats

State = dict[str, Any]
LOCAL = StateDictType.LOCAL_STATE_DICT
SHARDED = StateDictType.SHARDED_STATE_DICT


# --- giving -------------------------------------------------------------------------------------------------------


def give_state(
    wrapper: nn.Module, give: Callable[..., State], args: tuple[Any, ...], options: State
) -> State:
    """What ``wrapper.state_dict()`` gives; ``give`` is what any module does, with whatever its parameters show."""
    (unit,) = units_of(wrapper)
    settings = settings_of(wrapper)
    prefix = options.get("prefix", args[1] if len(args) > 1 else "")
    check_idle(unit, "state_dict")
    whole_units: dict[int, Unit] = {}
    shards: dict[str, tuple[Unit, list[FlatSlot]]] = {}
    with ExitStack() as stack:
        if settings.state_dict_type is LOCAL:
            unit.reshard(trace.IDLE)
            state = give(*args, **options)
            shards = dict(_shards_by_key(wrapper, unit, prefix))
        else:
            for needed in dict.fromkeys((unit, *unit.needs)):
                if is_flat(needed) and not is_shown_whole(needed):
                    wholes = stack.enter_context(one_shown_whole(needed))
                    for whole in wholes.values():
                        whole_units[whole.untyped_storage().data_ptr()] = needed
            state = give(*args, **options)
        for key in _last_with(prefix, state):
            value = state.pop(key)
            if isinstance(value, torch.Tensor):
                value = _given(value.detach(), whole_units, settings.state_dict_type)
                if key in shards:
                    value = local_shard_of(*shards[key], value)
                if settings.state_dict_config.offload_to_cpu:
                    value = value.cpu()
            state[prefix + key[len(prefix) :].removeprefix(f"{WRAPPED_NAME}.")] = value
    _restore_buffers(wrapper, state, prefix)
    config = settings.state_dict_config
    if isinstance(config, FullStateDictConfig) and config.rank0_only and not unit.mesh.is_first:
        for key in _last_with(prefix, state):
            del state[key]
    return state


def _shards_by_key(
    wrapper: nn.Module, unit: Unit, prefix: str
) -> Iterator[tuple[str, tuple[Unit, list[FlatSlot]]]]:
    """Where this wrapper's part of a local state dict has shards, and of which parameters."""
    needed = [
        each for each in dict.fromkeys((unit, *unit.needs)) if is_flat(each) and not is_shown_whole(each)
    ]
    if unit in needed:
        for line in flat_form(unit).lines:
            if line.flat is not None:
                yield prefix + line.name, (unit, line.slots)
    unit_of = {slot: each for each in needed for slot in flat_slots(each)}
    for path, slot, place in own_places(wrapper, unit):
        if slot.is_shown and slot in unit_of:
            yield f"{prefix}{WRAPPED_NAME}.{path}{place.name}", (unit_of[slot], [slot])


def _restore_buffers(wrapper: nn.Module, state: State, prefix: str) -> None:
    """Gives buffers the dtype they had before mixed precision cast them."""
    wrapped = wrapper.get_submodule(WRAPPED_NAME)
    for path, module in _outside_wrappers(wrapped):
        for name, dtype in own_buffer_dtypes(module).items():
            key = prefix + clean_name(f"{path}.{name}" if path else name)
            if key in state:
                state[key] = state[key].to(dtype)


def _last_with(prefix: str, state: State) -> list[str]:
    """The keys at the end of ``state`` that begin with ``prefix``, in order: those that were given just now."""
    found = []
    for key in reversed(state):
        if not key.startswith(prefix):
            break
        found.append(key)
    return found[::-1]


def _given(value: torch.Tensor, whole_units: Mapping[int, Unit], kind: StateDictType) -> torch.Tensor:
    if isinstance(value, DTensor):
        return value
    unit = whole_units.get(value.untyped_storage().data_ptr())
    if unit is None:
        return value
    if kind is SHARDED and unit.mesh.shard.world > 1:
        return rows_of(value, unit)
    # Out of the gathered line, which would be kept and saved as a whole.
    return value.clone()


def rows_of(whole: torch.Tensor, unit: Unit) -> torch.Tensor:
    """This rank's rows of a whole tensor, as the DTensor that ``fully_shard`` would make of it."""
    if whole.dim() == 0:
        return whole.clone()
    mesh = unit.mesh
    span = cut_evenly(whole.shape[0], mesh.shard.world, mesh.shard.rank)
    local = whole[span.start : span.stop].clone()
    strides = contiguous_strides(tuple(whole.shape))
    return dtensor(local, dtensor_spec(mesh.mesh, mesh.placements(0), whole.shape, strides, whole.dtype))


# --- taking -------------------------------------------------------------------------------------------------------


class LoadHooks:
    """What a wrapper does before and after its part of a state dict is loaded, whoever calls for it."""

    def __init__(self) -> None:
        # With what they showed before: a module that several wrappers hold is filled for one inside another.
        self._filled: list[tuple[Place, nn.Parameter | None, torch.Tensor | None]] = []

    def before(self, wrapper: nn.Module, state: State, prefix: str, *_: Any) -> None:
        (unit,) = units_of(wrapper)
        is_local = settings_of(wrapper).state_dict_type is LOCAL
        flats = {prefix + line.name: line.flat for line in flat_form(unit).lines if line.flat is not None}
        for key in [key for key in state if key.startswith(prefix)]:
            if key in flats and state[key] is flats[key]:
                del state[key]
            elif not (is_local and key in flats):
                state[f"{prefix}{WRAPPED_NAME}.{key[len(prefix) :]}"] = state.pop(key)
        for needed in dict.fromkeys((unit, *unit.needs)):
            check_idle(needed, "load_state_dict")
            if is_flat(needed):
                needed.reshard(trace.IDLE)
                needed.take_back_replaced()
        if is_local:
            for key, value in state.items():
                if isinstance(value, CheckpointSpan):
                    state[key] = value.elements
            return
        hide_flats(unit)
        for path, slot, place in own_places(wrapper, unit):
            key = f"{prefix}{WRAPPED_NAME}.{path}{place.name}"
            value = state.get(key)
            if not slot.is_shown:
                # In the place of the flat parameter: a view of its elements, for torch to copy into.
                part = shown_part(slot, slot.sharded.detach()).view(slot.shown_shape)
                self._filled.append((place, place.params[place.name], place.module.__dict__.get(place.name)))
                place.show_alone(nn.Parameter(part, slot.sharded.requires_grad))
            if isinstance(value, torch.Tensor):
                whole = full_tensor_of(value)
                if tuple(whole.shape) == slot.shape:
                    state[key] = own_elements(slot, whole).view(slot.shown_shape)

    def after(self, wrapper: nn.Module, incompatible: Any = None) -> None:
        (unit,) = units_of(wrapper)
        for place, before, stand_in in self._filled:
            place.params[place.name] = before
            if stand_in is not None:
                place.module.__dict__[place.name] = stand_in
        self._filled = []
        show_flats(unit)
        if incompatible is not None:
            for keys in incompatible:
                keys[:] = [clean_name(key) for key in keys]


def hide_flats(unit: Unit) -> None:
    for line in flat_form(unit).lines:
        if line.flat is not None:
            line.params.pop(line.name, None)


def own_places(wrapper: nn.Module, unit: Unit) -> Iterator[tuple[str, FlatSlot, Place]]:
    """Every place below a wrapper, but below no inner one, that shows a flat parameter: with its module's path."""
    paths: dict[int, str] = {}
    for name, module in _outside_wrappers(wrapper.get_submodule(WRAPPED_NAME)):
        path = clean_name(name)
        paths.setdefault(id(parameters_of(module)), f"{path}." if path else "")
    for needed in dict.fromkeys((unit, *unit.needs)):
        for slot in flat_slots(needed):
            for place in slot.places:
                if id(place.params) in paths:
                    yield paths[id(place.params)], slot, place


def _outside_wrappers(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    if is_wrapper(module):
        return
    yield name, module
    for child_name, child in module.named_children():
        yield from _outside_wrappers(child, f"{name}.{child_name}" if name else child_name)


def check_state(wrapper: nn.Module, state: Any, strict: bool) -> None:
    """Raises unless ``state`` can be loaded into ``wrapper``; changes nothing.

    Where a module has a way of its own to load, what is missing or too much only loading itself can tell.
    """
    where = f"{type(wrapper).__name__}.load_state_dict(strict={strict})"
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"a {type(state).__name__} is no state dict", where=where, fix="pass what state_dict() gave"
        )
    expected = dict(_expected_entries(wrapper))
    problems = []
    plainly = all(is_wrapper(member) or loads_as_usual(member, LoadHooks) for member in wrapper.modules())
    if strict and plainly:
        if missing := [key for key in expected if key not in state]:
            problems.append(f"missing keys: {missing}")
        own = {
            id(line.flat)
            for member in wrapper.modules()
            for unit in units_of(member)
            if is_flat(unit)
            for line in flat_form(unit).lines
            if line.flat is not None
        }
        # torch's own functions put what a model shows beside what is to be loaded.
        if unexpected := [key for key in state if key not in expected and id(state[key]) not in own]:
            problems.append(f"unexpected keys: {unexpected}")
    for key, shape in expected.items():
        value = state.get(key)
        if shape is not None and isinstance(value, torch.Tensor) and tuple(value.shape) != shape:
            problems.append(
                f"size mismatch for {key}: {tuple(value.shape)} in the state dict, {shape} in the model"
            )
    if problems:
        raise CheckpointError(
            "the state dict does not fit, and none of it was loaded:\n    " + "\n    ".join(problems),
            where=where,
            fix="load a state dict of the same model and kind; strict=False passes over missing and unexpected keys",
        )


def _expected_entries(wrapper: nn.Module) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    slots: dict[tuple[int, str], FlatSlot] = {}
    flats: dict[tuple[int, str], bool] = {}
    slot: FlatSlot | None
    for unit in dict.fromkeys(unit for member in wrapper.modules() for unit in units_of(member)):
        for slot in flat_slots(unit):
            for place in slot.places:
                slots[id(place.params), place.name] = slot
        if is_flat(unit):
            is_local = settings_of(unit.modules[0]).state_dict_type is LOCAL
            flats.update(
                ((id(line.params), line.name), is_local)
                for line in flat_form(unit).lines
                if line.flat is not None
            )
    is_local = settings_of(wrapper).state_dict_type is LOCAL
    for path, member in wrapper.named_modules(remove_duplicate=False):
        prefix = f"{clean_name(path)}." if clean_name(path) else ""
        params = parameters_of(member)
        for name, param in params.items():
            slot = slots.get((id(params), name))
            if slot is not None:
                if not is_local or slot.is_shown:
                    yield prefix + name, slot.shown_shape if is_local else slot.shape
            elif param is not None and flats.get((id(params), name), True):
                yield prefix + name, tuple(param.shape)
        for name, value in state_entries(member):
            if value is None or name in buffers_of(member):
                yield prefix + name, None if value is None else tuple(value.shape)
