"""Loads an optimizer state by parameter name, as full tensors or DTensors, into this rank's shards.

The state may come from any number of ranks and from either API. A state tensor of its parameter's shape is sharded like
the parameter. Every other value (a step count, say) is copied. ``optim_state_gather`` is the other direction.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comm.collectives.agreement import gather_objects
from shardwise.engine.checkpoint_span import CheckpointSpan
from shardwise.engine.gather.full_tensors import assemble_shard, full_tensor_of, loaded, shard_elements
from shardwise.errors import (
    CheckpointError,
    ConfigAssertionError,
    ConfigError,
    ConfigTypeError,
    RankDisagreement,
)
from shardwise.torch_internals import ShardedTensor
from shardwise.wrapper.optim_parameters import OptimParameter, OptimParameters, State, mesh_of
from shardwise.wrapper.optim_state_gather import is_same, is_sharded_state
from shardwise.wrapper.options import as_choice


class OptimStateKeyType(Enum):
    """The keys of the states in an optimizer's state dict: parameter names, or numbers."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


def state_to_load(
    model: nn.Module,
    params: list[list[torch.Tensor]],
    named: State,
    named_optim: torch.optim.Optimizer | None = None,
) -> State:
    """Returns a state dict for ``optimizer.load_state_dict``: this rank's shards of ``named``, by parameter number.

    ``params`` are the optimizer's parameters by group. States are matched by name, in any order. ``named`` may lack its
    parameter groups; then the result does, too. For a ``named_optim``, parameters have the names of
    ``model.named_parameters()`` instead of numbers, and empty ones the states that the optimizer has of them.
    """
    if "state" not in named:
        raise ConfigError(
            f'the optimizer state dict has no "state", only {list(named)}',
            where=f"optimizer state of {type(model).__name__}",
            fix="pass what optim_state_dict returned",
        )
    optim_params = OptimParameters(model)
    groups = [optim_params.of(group) for group in params]
    entries = [each for group in groups for each in group]
    keys: dict[int, Any] = {
        id(each.param): number if named_optim is None else each.shown_name
        for number, each in enumerate(entries)
    }
    full = _full_states(model, named["state"])
    sharded_keys = _sharded_keys(optim_params, full)
    state: dict[Any, Any] = {}
    for each in entries:
        if each.local_name in full and each.local_name not in each.names:
            _check_local(each, full[each.local_name])
            state[keys[id(each.param)]] = dict(full[each.local_name])
        elif each.is_empty_here:
            if named_optim is not None and each.param in named_optim.state:
                state[each.shown_name] = copy.deepcopy(named_optim.state[each.param])
        elif any(full.get(name) for name in each.names):
            states = [full.get(name, {}) for name in each.names]
            state[keys[id(each.param)]] = _shard_state(each, states, sharded_keys)
    saved = named.get("param_groups")
    of_params = {*optim_params.names, *optim_params.by_local_name}
    of_params.update(name for group in saved or () for name in group["params"])
    state.update((name, value) for name, value in full.items() if name not in of_params)
    if saved is None:
        return {"state": state}
    return {
        "state": state,
        "param_groups": [
            {**settings, "params": [keys[id(each.param)] for each in group]}
            for settings, group in zip(_options_by_group(model, groups, saved), groups, strict=True)
        ],
    }


def _options_by_group(
    model: nn.Module, groups: list[list[OptimParameter]], saved: Sequence[Mapping[str, Any]]
) -> list[State]:
    """The saved options of each group, found by the names in it; an empty group takes those of an empty saved group."""
    empty = iter([group for group in saved if not group["params"]])
    return [
        _saved_options(model, group, saved) if group else _options_in(next(empty, saved[0] if saved else {}))
        for group in groups
    ]


def _options_in(group: Mapping[str, Any]) -> State:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _saved_options(
    model: nn.Module, group: list[OptimParameter], saved: Iterable[Mapping[str, Any]]
) -> State:
    """The options that a group's parameters were saved with; raises if they were saved with different ones."""
    group_of = {name: saved_group for saved_group in saved for name in saved_group["params"]}
    names = [
        name for each in group for name in ([each.local_name] if each.local_name in group_of else each.names)
    ]
    where = f"optimizer state of {type(model).__name__}"
    if missing := [name for name in names if name not in group_of]:
        raise CheckpointError(
            f"the optimizer state has no group for the parameters {missing[:3]}{' ...' if missing[3:] else ''}",
            where=where,
            fix="load the state of an optimizer of the same model",
        )
    options: State = {}
    for number, name in enumerate(names):
        found = _options_in(group_of[name])
        if number == 0:
            options = found
        for key in {*found, *options} if found is not options else ():
            if key not in found or key not in options or not is_same(found[key], options[key]):
                raise CheckpointError(
                    f"'{names[0]}' and '{name}' are in one group of the optimizer, but were saved in groups with "
                    f"different options: {key} is {options.get(key)!r} and {found.get(key)!r}",
                    where=where,
                    fix="create the optimizer with the groups it was saved with; use_orig_params=True keeps parameters "
                    "separate that would share a flat parameter",
                )
    return options


def _full_states(model: nn.Module, states: Mapping[str, Any]) -> dict[str, Any]:
    """Gathers all sharded values of ``states``; raises on all ranks if the ranks do not have the same ones."""
    sharded = {
        (name, key): value
        for name, state in states.items()
        if isinstance(state, Mapping)
        for key, value in state.items()
        if isinstance(value, (DTensor, ShardedTensor))
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
                    f"ranks load different optimizer states: {differing[:3]} differ on rank {rank} of the group",
                    where=f"optimizer state of {type(model).__name__}, rank {mesh.rank}",
                    fix="load the same checkpoint on every rank",
                )
    full = {entry: full_tensor_of(sharded[entry]) for entry in order}
    return {
        name: {key: full.get((name, key), _plain(value)) for key, value in state.items()}
        if isinstance(state, Mapping)
        else state
        for name, state in states.items()
    }


def _plain(value: Any) -> Any:
    return value.elements if isinstance(value, CheckpointSpan) else loaded(value)


def _sharded_keys(optim_params: OptimParameters, full: Mapping[str, Any]) -> set[str]:
    """The states that are sharded like their parameters. Scalar parameters decide only if there are no others."""
    shapes = {name: slot.shape for slot, name in optim_params.slot_names.items()}
    states = [(shapes[name], key, value) for name in shapes for key, value in full.get(name, {}).items()]
    with_dims = {key for shape, key, _ in states if shape}
    return {
        key
        for shape, key, value in states
        if is_sharded_state(key, value, shape) and (shape or key not in with_dims)
    }


def _check_local(entry: OptimParameter, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if (
            isinstance(value, torch.Tensor)
            and value.dim()
            and not is_sharded_state(key, value, entry.param.shape)
        ):
            raise _unfit(key, value, entry.local_name, tuple(entry.param.shape))


def _unfit(key: str, value: torch.Tensor, name: str, shape: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(
        f"state '{key}' of shape {tuple(value.shape)} does not fit a parameter of shape {shape}",
        where=f"optimizer state of '{name}'",
        fix="load a state that was saved from an optimizer of the same model",
    )


def _shard_state(entry: OptimParameter, states: list[State], sharded_keys: set[str]) -> State:
    """This rank's shard of the states of the parameters in ``entry``."""
    if entry.slots is None or entry.line is None:
        return dict(states[0])
    sharded: State = {}
    for key in dict.fromkeys(key for state in states for key in state):
        parts: list[torch.Tensor | None] = []
        values: list[Any] = []
        for slot, name, state in zip(entry.slots, entry.names, states, strict=True):
            value: Any = state.get(key)
            if entry.line.flat is None and is_sharded_state(key, value, entry.param.shape) and slot.shape:
                # From a local state dict: this rank's elements already.
                parts.append(value)
            elif key in sharded_keys and is_sharded_state(key, value, slot.shape):
                parts.append(shard_elements(slot, value).to(entry.param.device))
            elif isinstance(value, torch.Tensor) and value.dim() and key != "step":
                raise _unfit(key, value, name, slot.shape)
            else:
                parts.append(None)
                values.append(value)
        if len(values) == len(parts):
            sharded[key] = _common_value(entry, key, values)
        elif entry.line.flat is not None:
            present = next(part for part in parts if part is not None)
            sharded[key] = assemble_shard(
                entry.line, parts, entry.param.numel(), present.dtype, entry.param.device
            )
        else:
            sharded[key] = parts[0].clone().view(entry.param.shape)  # type: ignore[union-attr]
    return sharded


def _common_value(entry: OptimParameter, key: str, values: list[Any]) -> Any:
    """The value of a state that is not sharded; raises if it differs between the parameters of a flat parameter."""
    first = next((value for value in values if value is not None), None)
    if first is None:
        return None
    for name, value in zip(entry.names, values, strict=True):
        if value is None or not is_same(value, first):
            raise CheckpointError(
                f"'{key}' is not the same for all parameters of one flat parameter: {value!r} for '{name}', "
                f"{first!r} for another",
                where=f"optimizer state of '{entry.local_name}'",
                fix="wrap with use_orig_params=True, which keeps a separate state for each parameter",
            )
    return first.clone() if isinstance(first, torch.Tensor) else first


def as_key_type(value: Any) -> OptimStateKeyType:
    """Returns ``value`` as our enum; accepts torch's."""
    try:
        return as_choice(OptimStateKeyType, value, "rekey_optim_state_dict")
    except ConfigTypeError as error:
        raise ConfigAssertionError(error.what, where=error.where, fix=error.fix) from None


def rekeyed(
    state_dict: State,
    key_type: OptimStateKeyType,
    model: nn.Module,
    params: list[list[torch.Tensor]],
    is_optimizers_own: bool,
) -> State:
    """Returns ``state_dict`` with names instead of numbers as keys, or the reverse; ``model`` may be unwrapped.

    ``params`` are the optimizer's parameters by group. If they are not known (``is_optimizers_own=False``), ``params``
    are all parameters of the model, and the groups stay as they were saved.
    """
    wanted = str if key_type is OptimStateKeyType.PARAM_NAME else int
    if all(isinstance(key, wanted) for key in state_dict["state"]):
        return state_dict
    groups = [OptimParameters(model).of(group) for group in params]
    entries = [each for group in groups for each in group]
    if flat := next((each for each in entries if len(each.names) > 1), None):
        raise ConfigError(
            f"'{flat.local_name}' holds {len(flat.names)} parameters, so its state has no single parameter name",
            where="rekey_optim_state_dict",
            fix="call FullyShardedDataParallel.optim_state_dict(model, optimizer) to get a state by names",
        )
    keys: dict[Any, Any] = {number: each.names[0] for number, each in enumerate(entries)}
    if key_type is OptimStateKeyType.PARAM_ID:
        keys = {name: number for number, name in keys.items()}
    if len({type(key) for key in state_dict["state"]}) > 1:
        raise ConfigError(
            f"the states have names and numbers as keys: {list(state_dict['state'])}",
            where="rekey_optim_state_dict",
            fix="pass a state dict that has one kind of keys",
        )
    if unknown := [key for key in state_dict["state"] if key not in keys]:
        raise CheckpointError(
            f"{type(model).__name__} has no parameters for the states {unknown[:3]}",
            where="rekey_optim_state_dict",
            fix="pass the model that the optimizer state belongs to",
        )
    state = {keys[key]: value for key, value in state_dict["state"].items()}
    if key_type is OptimStateKeyType.PARAM_ID and is_optimizers_own:
        # optimizer.load_state_dict goes by a number's position, so numbers must be in the optimizer's order.
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
