"""Optimizer states of wrapped models: by name and whole (or in DTensors), and back into this rank's shards.

    optimizer's state of shards ──gather──▶ whole, by parameter name ──cut──▶ shards, of any world and either face

A state tensor shaped like its parameter is cut like it. Everything else (a step count, say) is the same for all of a
parameter, and copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.mesh import DataMesh
from shardwise.engine.binding import clean_name, units_of
from shardwise.engine.flat_form import FlatSlot, Line
from shardwise.engine.unit import Unit
from shardwise.engine.whole import (
    flat_form,
    gather_line,
    is_flat,
    own_elements,
    share_of,
    shown_part,
    whole_of,
    wholes_of,
)
from shardwise.errors import CheckpointError, ConfigError
from shardwise.frontends.state_types import FullOptimStateDictConfig, StateDictSettings, StateDictType
from shardwise.frontends.wrapper_state import rows_of
from shardwise.torch_internals import parameters_of

State = dict[str, Any]


class OptimStateKeyType(Enum):
    """What the states in an optimizer's state dict are found by."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass
class _Held:
    """One parameter that an optimizer steps: whose elements it holds, or its own name if it is no shard."""

    param: torch.Tensor
    names: list[str]
    local_name: str
    unit: Unit | None = None
    number: int = 0
    line: Line | None = None
    slots: list[FlatSlot] | None = None


def _names_of_slots(model: nn.Module) -> dict[FlatSlot, str]:
    """Each slot's name in ``model``: that of the first place that shows it."""
    places: dict[tuple[int, str], FlatSlot] = {}
    for unit in _flat_units(model):
        for slot in unit.slots:
            assert isinstance(slot, FlatSlot)
            places.update(((id(place.params), place.name), slot) for place in slot.places)
    names: dict[FlatSlot, str] = {}
    for path, module in model.named_modules():
        params = parameters_of(module)
        for name in params:
            found = places.get((id(params), name))
            if found is not None:
                prefix = clean_name(path)
                names.setdefault(found, f"{prefix}.{name}" if prefix else name)
    return names


def _flat_units(model: nn.Module) -> list[Unit]:
    return [unit for unit in dict.fromkeys(u for m in model.modules() for u in units_of(m)) if is_flat(unit)]


def _held_by(model: nn.Module, params: Iterable[torch.Tensor]) -> list[_Held]:
    """What each of the optimizer's parameters holds, in the optimizer's order."""
    names = _names_of_slots(model)
    local_names = {id(param): clean_name(name) for name, param in model.named_parameters()}
    known: dict[int, _Held] = {}
    for unit in _flat_units(model):
        for number, line in enumerate(flat_form(unit).lines):
            groups = [line.slots] if line.flat is not None else [[slot] for slot in line.slots]
            for slots in groups:
                sharded = slots[0].sharded
                own = [names[slot] for slot in slots]
                local = local_names.get(id(sharded), own[0])
                known[id(sharded)] = _Held(sharded, own, local, unit, number, line, slots)
    for name, param in model.named_parameters():
        known.setdefault(id(param), _Held(param, [clean_name(name)], clean_name(name)))
    found = []
    for number, stepped in enumerate(params):
        if id(stepped) not in known:
            raise ConfigError(
                f"the optimizer's parameter number {number} of shape {tuple(stepped.shape)} is none of the model's",
                where=f"optimizer state of {type(model).__name__}",
                fix="make the optimizer from the wrapped model's parameters()",
            )
        found.append(known[id(stepped)])
    return found


def mesh_of(model: nn.Module) -> DataMesh | None:
    """The ranks that share the outermost wrapped module."""
    return next((unit.mesh for unit in _flat_units(model)), None)


def is_first_rank(model: nn.Module) -> bool:
    """Whether this is the first of the ranks that share the model; of all, if nothing of it is wrapped."""
    mesh = mesh_of(model)
    return dist.get_rank() == 0 if mesh is None else mesh.is_first


def _params_of(optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optim.param_groups for param in group["params"]]


def _is_cut(key: str, value: Any, shape: torch.Size | tuple[int, ...]) -> bool:
    """Whether a state has an element for each of the parameter's."""
    return isinstance(value, torch.Tensor) and key != "step" and tuple(value.shape) == tuple(shape)


# --- out ------------------------------------------------------------------------------------------------------------


def named_state(model: nn.Module, optim: torch.optim.Optimizer, settings: StateDictSettings) -> State:
    """The optimizer's state by parameter name, of the kind that is set. Every rank must call it."""
    held = _held_by(model, _params_of(optim))
    kind, config = settings.state_dict_type, settings.optim_state_dict_config
    state: State = {}
    for names, values in _named_values(held, optim, kind):
        for name, value in zip(names, values, strict=True):
            state[name] = {key: _offloaded(each, config.offload_to_cpu) for key, each in value.items()}
    ordered = {name: state[name] for each in held for name in _shown_names(each, kind) if name in state}
    by_param = {id(each.param): each for each in held}
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [name for param in group["params"] for name in _shown_names(by_param[id(param)], kind)],
        }
        for group in optim.param_groups
    ]
    if isinstance(config, FullOptimStateDictConfig) and config.rank0_only and not is_first_rank(model):
        return {}
    return {"state": ordered, "param_groups": groups}


def _shown_names(held: _Held, kind: StateDictType) -> list[str]:
    """The names a parameter's state goes by: local states of a flat parameter by the flat parameter's own."""
    return [held.local_name] if kind is StateDictType.LOCAL_STATE_DICT else held.names


def _named_values(
    held: list[_Held], optim: torch.optim.Optimizer, kind: StateDictType
) -> Iterator[tuple[list[str], list[State]]]:
    lines: dict[Line, list[_Held]] = {}
    for each in held:
        if each.line is None or kind is StateDictType.LOCAL_STATE_DICT:
            if each.param in optim.state:
                yield _shown_names(each, kind), [dict(optim.state[each.param])]
        else:
            lines.setdefault(each.line, []).append(each)
    for line, members in lines.items():
        unit, number = members[0].unit, members[0].number
        assert unit is not None
        names = {
            slot: name for each in members for slot, name in zip(each.slots or (), each.names, strict=True)
        }
        values = _whole_states(unit, number, line, members, optim, kind)
        yield [names[slot] for slot in values], list(values.values())


def _whole_states(
    unit: Unit,
    number: int,
    line: Line,
    members: list[_Held],
    optim: torch.optim.Optimizer,
    kind: StateDictType,
) -> dict[FlatSlot, State]:
    """The states of one line's parameters: each key that is cut is gathered once for all of them."""
    found: dict[FlatSlot, State] = {}
    cut: dict[str, dict[FlatSlot, torch.Tensor]] = {}
    for each in members:
        for key, value in optim.state.get(each.param, {}).items():
            for slot in each.slots or ():
                if _is_cut(key, value, each.param.shape):
                    found.setdefault(slot, {})[key] = None
                    cut.setdefault(key, {})[slot] = shown_part(slot, value)
                else:
                    copied = value.clone() if isinstance(value, torch.Tensor) else value
                    found.setdefault(slot, {})[key] = copied
    for key, parts in cut.items():
        share = share_of(
            line, [parts.get(slot) for slot in line.slots], flat_form(unit).layout.segments[number].numel
        )
        assert share is not None
        for slot, whole in zip(line.slots, wholes_of(unit, number, gather_line(unit, share)), strict=True):
            if slot in parts:
                is_sharded = kind is StateDictType.SHARDED_STATE_DICT and unit.mesh.shard.world > 1
                found[slot][key] = rows_of(whole, unit) if is_sharded else whole.clone()
    return found


def _offloaded(value: Any, offloads: bool) -> Any:
    return value.cpu() if offloads and isinstance(value, torch.Tensor) else value


# --- in -------------------------------------------------------------------------------------------------------------


def state_to_load(model: nn.Module, params: list[list[torch.Tensor]], named: State) -> State:
    """A state dict for ``optimizer.load_state_dict``: this rank's elements of ``named``, by the optimizer's numbers.

    ``params`` are the optimizer's parameters by group.
    """
    held = _held_by(model, [param for group in params for param in group])
    numbers = {id(each.param): number for number, each in enumerate(held)}
    wholes = {
        name: {key: whole_of(value) for key, value in state.items()} for name, state in named["state"].items()
    }
    state: dict[int, State] = {}
    for number, each in enumerate(held):
        if each.local_name in wholes and each.local_name not in each.names:
            state[number] = dict(wholes[each.local_name])
        elif any(name in wholes for name in each.names):
            state[number] = _shard_state(each, [wholes.get(name, {}) for name in each.names])
    groups = []
    for group in params:
        names = {name for param in group for name in held[numbers[id(param)]].names}
        names |= {held[numbers[id(param)]].local_name for param in group}
        known = [saved for saved in named["param_groups"] if names & set(saved["params"])]
        if not known and names:
            raise CheckpointError(
                f"the optimizer state has no group for the parameters {sorted(names)[:3]} ...",
                where=f"optimizer state of {type(model).__name__}",
                fix="load a state that was saved from an optimizer of the same model",
            )
        options = {key: value for key, value in known[0].items() if key != "params"} if known else {}
        groups.append({**options, "params": [numbers[id(param)] for param in group]})
    return {"state": state, "param_groups": groups}


def _shard_state(held: _Held, states: list[State]) -> State:
    """This rank's elements of the states of the parameters that one of the optimizer's holds."""
    if held.slots is None:
        return dict(states[0])
    sharded: State = {}
    for key in dict.fromkeys(key for state in states for key in state):
        values = [state.get(key) for state in states]
        first = next(value for value in values if value is not None)
        parts: list[torch.Tensor | None] = []
        for slot, value in zip(held.slots, values, strict=True):
            if held.line is not None and held.line.flat is None and _is_cut(key, value, held.param.shape):
                # This rank's own elements, as a local state dict has them.
                parts.append(value)
            elif value is None or not _is_cut(key, value, slot.shape):
                if value is not None and isinstance(value, torch.Tensor) and value.dim() and key != "step":
                    raise CheckpointError(
                        f"state '{key}' of shape {tuple(value.shape)} does not fit a parameter of shape {slot.shape}",
                        where=f"optimizer state of '{slot.name}'",
                        fix="load a state that was saved from an optimizer of the same model",
                    )
                parts.append(None)
            else:
                parts.append(own_elements(slot, value).to(held.param.device))
        if all(part is None for part in parts):
            sharded[key] = first.clone() if isinstance(first, torch.Tensor) else first
        elif held.line is not None and held.line.flat is not None:
            sharded[key] = share_of(held.line, parts, held.param.numel())
        else:
            sharded[key] = parts[0].clone().view(held.param.shape)  # type: ignore[union-attr]
    return sharded


# --- other keys -------------------------------------------------------------------------------------------------------


def rekeyed(
    state_dict: State, key_type: OptimStateKeyType, model: nn.Module, params: list[list[torch.Tensor]]
) -> State:
    """The same state by names instead of numbers, or the other way; ``model`` may be a plain one."""
    names_of = [each.names[0] for each in _held_by(model, [param for group in params for param in group])]
    keys: dict[Any, Any] = dict(enumerate(names_of))
    if key_type is OptimStateKeyType.PARAM_ID:
        keys = {name: number for number, name in keys.items()}
    elif key_type is not OptimStateKeyType.PARAM_NAME:
        raise ConfigError(
            f"{key_type!r} is no OptimStateKeyType",
            where="rekey_optim_state_dict",
            fix="pass PARAM_NAME or PARAM_ID",
        )
    if all(key in keys.values() and key not in keys for key in state_dict["state"]):
        return state_dict
    if unknown := [key for key in state_dict["state"] if key not in keys]:
        raise CheckpointError(
            f"states {unknown[:3]} are of no parameter of {type(model).__name__}",
            where="rekey_optim_state_dict",
            fix="pass the model that the optimizer state belongs to",
        )
    groups = [
        {**group, "params": [keys[key] for key in group["params"] if key in keys]}
        for group in state_dict["param_groups"]
    ]
    if key_type is OptimStateKeyType.PARAM_ID:
        # torch takes the numbers of a group in the order of the optimizer's parameters.
        for group in groups:
            group["params"].sort()
    state = {keys[key]: value for key, value in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}
