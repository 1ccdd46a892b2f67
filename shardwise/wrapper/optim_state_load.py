"""Optimizer states of wrapped models, taken: whole ones or DTensors, by name, into this rank's shards.

    optimizer's state of shards ──optim_gather──▶ whole, by parameter name ──cut──▶ shards, of any world and either face

A state tensor shaped like its parameter is cut like it. Everything else (a step count, say) is the same for all of a
parameter, and copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comm.collectives.agreement import gather_objects
from shardwise.engine.checkpoint_span import CheckpointSpan
from shardwise.engine.gather.full_tensors import assemble_shard, full_tensor_of, shard_elements
from shardwise.errors import CheckpointError, ConfigError, RankDisagreement
from shardwise.wrapper.optim_parameters import HeldParameter, HeldParameters, State, mesh_of
from shardwise.wrapper.optim_state_gather import is_cut, is_same


class OptimStateKeyType(Enum):
    """What the states in an optimizer's state dict are found by."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


# --- in -------------------------------------------------------------------------------------------------------------


def state_to_load(model: nn.Module, params: list[list[torch.Tensor]], named: State) -> State:
    """A state dict for ``optimizer.load_state_dict``: this rank's elements of ``named``, by the optimizer's numbers.

    ``params`` are the optimizer's parameters by group. Names decide what goes where, not the order of either.
    """
    holdings = HeldParameters(model)
    groups = [holdings.of(group) for group in params]
    held = [each for group in groups for each in group]
    numbers = {id(each.param): number for number, each in enumerate(held)}
    wholes = _wholes(model, named["state"])
    per_element = _keys_per_element(holdings, wholes)
    state: dict[Any, Any] = {}
    for number, each in enumerate(held):
        if each.local_name in wholes and each.local_name not in each.names:
            _check_local(each, wholes[each.local_name])
            state[number] = dict(wholes[each.local_name])
        elif any(wholes.get(name) for name in each.names):
            state[number] = _shard_state(each, [wholes.get(name, {}) for name in each.names], per_element)
    of_groups = {name for group in named["param_groups"] for name in group["params"]}
    state.update((name, value) for name, value in wholes.items() if name not in of_groups)
    options = _options_by_group(model, groups, named["param_groups"])
    return {
        "state": state,
        "param_groups": [
            {**settings, "params": [numbers[id(each.param)] for each in group]}
            for settings, group in zip(options, groups, strict=True)
        ],
    }


def _options_by_group(
    model: nn.Module, groups: list[list[HeldParameter]], saved: Sequence[Mapping[str, Any]]
) -> list[State]:
    """The settings of each group, by the names in it. An empty one takes those of one that was saved empty, or any."""
    empty = iter([group for group in saved if not group["params"]])
    return [
        _options(model, group, saved) if group else _settings(next(empty, saved[0] if saved else {}))
        for group in groups
    ]


def _settings(group: Mapping[str, Any]) -> State:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _options(model: nn.Module, group: list[HeldParameter], saved: Iterable[Mapping[str, Any]]) -> State:
    """The settings that a group's parameters were saved with: those of one group, or of several that are alike."""
    group_of = {name: known for known in saved for name in known["params"]}
    names = [
        name for each in group for name in ([each.local_name] if each.local_name in group_of else each.names)
    ]
    where = f"optimizer state of {type(model).__name__}"
    if missing := [name for name in names if name not in group_of]:
        raise CheckpointError(
            f"the optimizer state has no group for the parameters {missing[:3]}{' ...' if missing[3:] else ''}",
            where=where,
            fix="load a state that was saved from an optimizer of the same model",
        )
    options: State = {}
    for number, name in enumerate(names):
        found = _settings(group_of[name])
        if number == 0:
            options = found
        for key in {*found, *options} if found is not options else ():
            if key not in found or key not in options or not is_same(found[key], options[key]):
                raise CheckpointError(
                    f"'{names[0]}' and '{name}' are in one group of the optimizer, but were saved in two with other "
                    f"settings: {key} is {options.get(key)!r} and {found.get(key)!r}",
                    where=where,
                    fix="make the optimizer with the groups it was saved with; flat parameters hold several "
                    "parameters each, use_orig_params=True keeps them apart",
                )
    return options


def _wholes(model: nn.Module, states: Mapping[str, Any]) -> dict[str, Any]:
    """States with DTensors made whole, in one order on all ranks, which must have the same ones."""
    sharded = {
        (name, key): value
        for name, state in states.items()
        if isinstance(state, Mapping)
        for key, value in state.items()
        if isinstance(value, DTensor)
    }
    order = sorted(sharded, key=repr)
    mesh = mesh_of(model)
    if mesh is not None:
        lines = [f"{entry} {tuple(sharded[entry].shape)} {sharded[entry].dtype}" for entry in order]
        by_rank = gather_objects(lines, mesh.shard)
        for rank, theirs in enumerate(by_rank):
            if theirs != lines:
                differing = sorted({*theirs} ^ {*lines})
                raise RankDisagreement(
                    f"ranks were given different optimizer states: {differing[:3]} differ on rank {rank} of the group",
                    where=f"optimizer state of {type(model).__name__}, rank {mesh.rank}",
                    fix="load the same checkpoint on every rank",
                )
    wholes = {entry: full_tensor_of(sharded[entry]) for entry in order}
    return {
        name: {key: wholes.get((name, key), _plain(value)) for key, value in state.items()}
        if isinstance(state, Mapping)
        else state
        for name, state in states.items()
    }


def _plain(value: Any) -> Any:
    return value.elements if isinstance(value, CheckpointSpan) else value


def _keys_per_element(holdings: HeldParameters, wholes: Mapping[str, Any]) -> set[str]:
    """The keys that have an element for each of a parameter's: a parameter without dims cannot tell them by shape."""
    shapes = {name: slot.shape for slot, name in holdings.slot_names.items()}
    known = [(shapes[name], key, value) for name in shapes for key, value in wholes.get(name, {}).items()]
    told = {key for shape, key, _ in known if shape}
    return {key for shape, key, value in known if is_cut(key, value, shape) and (shape or key not in told)}


def _check_local(held: HeldParameter, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and not is_cut(key, value, held.param.shape):
            raise _unfit(key, value, held.local_name, tuple(held.param.shape))


def _unfit(key: str, value: torch.Tensor, name: str, shape: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(
        f"state '{key}' of shape {tuple(value.shape)} does not fit a parameter of shape {shape}",
        where=f"optimizer state of '{name}'",
        fix="load a state that was saved from an optimizer of the same model",
    )


def _shard_state(held: HeldParameter, states: list[State], per_element: set[str]) -> State:
    """This rank's elements of the states of the parameters that one of the optimizer's holds."""
    if held.slots is None or held.line is None:
        return dict(states[0])
    sharded: State = {}
    for key in dict.fromkeys(key for state in states for key in state):
        parts: list[torch.Tensor | None] = []
        copied: list[Any] = []
        for slot, name, state in zip(held.slots, held.names, states, strict=True):
            value: Any = state.get(key)
            if held.line.flat is None and is_cut(key, value, held.param.shape) and slot.shape:
                # This rank's own elements, as a local state dict has them.
                parts.append(value)
            elif key in per_element and is_cut(key, value, slot.shape):
                parts.append(shard_elements(slot, value).to(held.param.device))
            elif isinstance(value, torch.Tensor) and value.dim() and key != "step":
                raise _unfit(key, value, name, slot.shape)
            else:
                parts.append(None)
                copied.append(value)
        if len(copied) == len(parts):
            sharded[key] = _one_of(held, key, copied)
        elif held.line.flat is not None:
            present = next(part for part in parts if part is not None)
            sharded[key] = assemble_shard(
                held.line, parts, held.param.numel(), present.dtype, held.param.device
            )
        else:
            sharded[key] = parts[0].clone().view(held.param.shape)  # type: ignore[union-attr]
    return sharded


def _one_of(held: HeldParameter, key: str, values: list[Any]) -> Any:
    """The one value that all parameters of a flat parameter have: an optimizer keeps no more than one for it."""
    first = next(value for value in values if value is not None)
    for name, value in zip(held.names, values, strict=True):
        if value is None or not is_same(value, first):
            raise CheckpointError(
                f"'{key}' is not the same for all parameters of one flat parameter: {value!r} for '{name}', and "
                f"{first!r} for another",
                where=f"optimizer state of '{held.local_name}'",
                fix="wrap with use_orig_params=True, which keeps the states of parameters apart",
            )
    return first.clone() if isinstance(first, torch.Tensor) else first


# --- other keys -------------------------------------------------------------------------------------------------------


def rekeyed(
    state_dict: State,
    key_type: OptimStateKeyType,
    model: nn.Module,
    params: list[list[torch.Tensor]],
    is_optimizers_own: bool,
) -> State:
    """The same state by names instead of numbers, or the other way; ``model`` may be a plain one.

    ``params`` are the optimizer's by group; or all of the model's, and then the groups are taken as they were saved.
    """
    groups = [HeldParameters(model).of(group) for group in params]
    held = [each for group in groups for each in group]
    if flat := next((each for each in held if len(each.names) > 1), None):
        raise ConfigError(
            f"'{flat.local_name}' holds {len(flat.names)} parameters: its one state goes by no parameter's name",
            where="rekey_optim_state_dict",
            fix="call FullyShardedDataParallel.optim_state_dict(model, optimizer) for a state by names",
        )
    keys: dict[Any, Any] = {number: each.names[0] for number, each in enumerate(held)}
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
    state = {keys[key]: value for key, value in state_dict["state"].items()}
    if key_type is OptimStateKeyType.PARAM_ID and is_optimizers_own:
        # torch goes by the place of a number, not by the number: they must stand as the optimizer has them.
        saved = state_dict["param_groups"]
        renumbered = [
            {**settings, "params": [keys[each.names[0]] for each in group]}
            for settings, group in zip(_options_by_group(model, groups, saved), groups, strict=True)
        ]
    else:
        renumbered = [
            {**group, "params": sorted(keys[key] for key in group["params"] if key in keys)}
            if key_type is OptimStateKeyType.PARAM_ID
            else {**group, "params": [keys[key] for key in group["params"] if key in keys]}
            for group in state_dict["param_groups"]
        ]
    return {**state_dict, "state": state, "param_groups": renumbered}
