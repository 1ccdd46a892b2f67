"""Reads an optimizer's state by parameter name: as full tensors, as DTensors, or as this rank's elements.

    all ranks exchange reports of their optimizers ──▶ all agree, or all raise ──▶ one gather per flat segment and key

Optimizers of different ranks may list parameters in different orders and groups. A rank without elements of a parameter
need not have it in its optimizer: it learns the parameter's state from the reports of other ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from shardwise.comm.collectives.agreement import gather_objects
from shardwise.comm.collectives.group import GroupCollectives
from shardwise.engine.gather.full_tensors import (
    assemble_shard,
    flat_form,
    flat_slots,
    full_tensors_of,
    gather_segment,
    local_elements,
    ranks_with_elements,
)
from shardwise.engine.unit.flat_form import FlatSlot
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError, RankDisagreement
from shardwise.optim.mixed_optimizer import MixedOptimizer
from shardwise.optim.whole_optimizer import WholeOptimizer
from shardwise.wrapper.model_state import gathered_value, local_shard_of
from shardwise.wrapper.optim_parameters import (
    OptimizerContents,
    OptimParameter,
    OptimParameters,
    State,
    is_first_rank,
)
from shardwise.wrapper.state_dict_types import FullOptimStateDictConfig, StateDictSettings, StateDictType

LOCAL = StateDictType.LOCAL_STATE_DICT


def is_sharded_state(key: str, value: Any, shape: torch.Size | tuple[int, ...]) -> bool:
    """Whether an optimizer state is sharded like its parameter, whose shape is ``shape``."""
    return isinstance(value, torch.Tensor) and key != "step" and tuple(value.shape) == tuple(shape)


@dataclass(frozen=True)
class _StateReport:
    """One rank's report of one state. ``value``: unless the state is sharded like its parameter; travels on the CPU."""

    is_sharded: bool
    dtype: torch.dtype | None
    value: Any = None
    # Where that rank has it.
    device_type: str = "cpu"

    def learned(self, device: torch.device) -> Any:
        """The value for a rank that computes on ``device``, where that is the kind of device the reporting rank has."""
        return self.value.to(device) if self.device_type == device.type != "cpu" else self.value


@dataclass
class _RankReport:
    """One rank's report of its optimizer, by parameter name; or why it cannot take part."""

    problem: str | None = None
    # Whether there is a state, of each parameter of the model that is not sharded.
    unsharded: dict[str, bool] = field(default_factory=dict)
    states: dict[str, dict[str, _StateReport]] = field(default_factory=dict)
    groups: list[tuple[list[str], State]] = field(default_factory=list)


def named_state(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    settings: StateDictSettings,
    state_dict: Mapping[str, Any] | None = None,
) -> State:
    """Returns the optimizer's state by parameter name, of the kind that ``settings`` says. Every rank must call it."""
    kind, config = settings.state_dict_type, settings.optim_state_dict_config
    if state_dict is None and isinstance(optim, (MixedOptimizer, WholeOptimizer)):
        # Its state is with the owners of whole matrices; its state dict has every rank's elements.
        state_dict = optim.state_dict()
    optim_params = OptimParameters(model)
    contents = OptimizerContents(optim, optim_params)
    problem: ConfigError | None = None
    groups: list[list[OptimParameter]] = []
    try:
        if state_dict is not None:
            contents = OptimizerContents(optim, optim_params, state_dict)
        groups = [optim_params.of(params) for params in contents.params]
    except ConfigError as error:
        # Reported before it is raised: other ranks would wait for this one.
        problem = error
    if kind is LOCAL:
        if problem is not None:
            raise problem
        state = _local_states(groups, contents)
        names = [[entry.local_name for entry in group] for group in groups]
    else:
        reports = _exchange(optim_params, _report(optim_params, groups, contents, problem))
        if problem is not None:
            raise problem
        _raise_problems(optim_params, reports)
        state = _gather_states(optim_params, groups, contents, kind, reports)
        names = _names_by_group(groups, contents.options or [], reports)
    if isinstance(config, FullOptimStateDictConfig) and config.rank0_only and not is_first_rank(model):
        return {}
    if contents.global_state:
        warnings.warn(
            f"the optimizer states {list(contents.global_state)} belong to no parameter, and are copied as they are",
            stacklevel=3,
        )
    order = {name: number for number, name in enumerate(optim_params.names)}
    ordered = sorted(state, key=lambda name: order.get(name, len(order)))
    saved: State = {
        "state": {
            name: {key: _offloaded(value, config.offload_to_cpu) for key, value in state[name].items()}
            for name in ordered
        }
        | contents.global_state
    }
    if contents.options is not None:
        saved["param_groups"] = [
            {**options, "params": own} for options, own in zip(contents.options, names, strict=True)
        ]
    return saved


def _offloaded(value: Any, offloads: bool) -> Any:
    return value.cpu() if offloads and isinstance(value, torch.Tensor) else value


def _local_states(groups: list[list[OptimParameter]], contents: OptimizerContents) -> dict[str, State]:
    return {
        entry.local_name: {
            key: local_shard_of(entry.unit, entry.slots, value)
            if entry.unit is not None and entry.slots and is_sharded_state(key, value, entry.param.shape)
            else value
            for key, value in state.items()
        }
        for group in groups
        for entry in group
        if (state := contents.state_of(entry.param))
    }


# --- reports between ranks ----------------------------------------------------------------------------------------


def _report(
    optim_params: OptimParameters,
    groups: list[list[OptimParameter]],
    contents: OptimizerContents,
    problem: ConfigError | None,
) -> _RankReport:
    states: dict[str, dict[str, _StateReport]] = {}
    for group in groups:
        for entry in group:
            if entry.slots is not None:
                of_param = {
                    key: _report_state(key, value, entry.param)
                    for key, value in contents.state_of(entry.param).items()
                }
                states.update(dict.fromkeys(entry.names, of_param))
    named = [
        ([name for entry in group for name in entry.names], options)
        for group, options in zip(groups, contents.options or [], strict=False)
    ]
    unsharded = {each.names[0]: bool(contents.state_of(each.param)) for each in optim_params.unsharded}
    return _RankReport(None if problem is None else str(problem).splitlines()[0], unsharded, states, named)


def _report_state(key: str, value: Any, param: torch.Tensor) -> _StateReport:
    if not isinstance(value, torch.Tensor):
        return _StateReport(False, None, value)
    looks_sharded = is_sharded_state(key, value, param.shape)
    # On a shard of one element a count has the same shape as a sharded state: other ranks' reports decide.
    has_value = not looks_sharded or value.numel() == 1
    return _StateReport(
        looks_sharded, value.dtype, value.detach().cpu() if has_value else None, value.device.type
    )


def _exchange(optim_params: OptimParameters, own: _RankReport) -> dict[GroupCollectives, list[_RankReport]]:
    """Gathers the reports of all ranks, in each group that shards a part of the model."""
    return {
        calls: gather_objects(own, calls)
        for calls in dict.fromkeys(unit.mesh.shard for unit in optim_params.units)
    }


def _raise_problems(
    optim_params: OptimParameters, by_group: dict[GroupCollectives, list[_RankReport]]
) -> None:
    """Raises one rank's problem on all ranks."""
    has_flat_params = any(
        line.flat is not None for unit in optim_params.units for line in flat_form(unit).lines
    )
    for reports in by_group.values():
        for rank, report in enumerate(reports):
            stateless = [
                name
                for name, has_state in reports[0].unsharded.items()
                if has_state > report.unsharded.get(name, True)
            ]
            if stateless and has_flat_params:
                raise RankDisagreement(
                    f"rank {rank} of the group has no optimizer states of {stateless[:3]}, but rank 0 has",
                    where=f"optimizer state of {type(optim_params.model).__name__}",
                    fix="step the same parameters on every rank",
                )
            if report.problem is not None:
                raise RankDisagreement(
                    f"rank {rank} of the group cannot report its optimizer state: {report.problem}",
                    where=f"optimizer state of {type(optim_params.model).__name__}",
                    fix="create the same optimizer on every rank",
                )


def _names_by_group(
    groups: list[list[OptimParameter]],
    options: list[State],
    by_group: dict[GroupCollectives, list[_RankReport]],
) -> list[list[str]]:
    """The parameter names of each of the optimizer's groups.

    A parameter that only other ranks' optimizers have goes to the group of the parameters that it is grouped with
    there, or to a group with the same options.
    """
    own = [[name for entry in group for name in entry.names] for group in groups]
    group_of = {name: number for number, names in enumerate(own) for name in names}
    for names, settings in (
        group for reports in by_group.values() for report in reports for group in report.groups
    ):
        missing = [name for name in names if name not in group_of]
        known = (group_of[name] for name in names if name in group_of)
        equal = (number for number, other in enumerate(options) if _are_equal(other, settings))
        number = next(chain(known, equal), None) if missing else None
        if number is not None:
            own[number] += missing
            group_of.update(dict.fromkeys(missing, number))
    return own


def _are_equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)


# --- agreement and gather -------------------------------------------------------------------------------------------


def _gather_states(
    optim_params: OptimParameters,
    groups: list[list[OptimParameter]],
    contents: OptimizerContents,
    kind: StateDictType,
    reports: dict[GroupCollectives, list[_RankReport]],
) -> dict[str, State]:
    stepped = {slot: entry.param for group in groups for entry in group for slot in entry.slots or ()}
    names = optim_params.slot_names
    agreed = {
        # Without a name, because that has been tied to another parameter, nothing steps it.
        slot: _agreed(unit, index, names[slot], reports[unit.mesh.shard]) if slot in names else {}
        for unit in optim_params.units
        for index, slot in enumerate(flat_slots(unit))
    }
    state: dict[str, State] = {
        entry.names[0]: dict(own)
        for group in groups
        for entry in group
        if entry.slots is None and (own := contents.state_of(entry.param))
    }
    for unit in optim_params.units:
        own_states = {slot: contents.state_of(stepped[slot]) for slot in flat_slots(unit) if slot in stepped}
        for slot, values in _gather_unit(unit, agreed, own_states, kind).items():
            if values:
                state[names[slot]] = values
    return state


def _agreed(unit: Unit, index: int, name: str, reports: list[_RankReport]) -> dict[str, _StateReport]:
    """The states of one parameter, on which the ranks that have elements of it agree; raises if they do not."""
    by_rank = {rank: reports[rank].states.get(name) for rank in ranks_with_elements(unit, index)}
    keys = {rank: None if states is None else sorted(states) for rank, states in by_rank.items()}
    first, *others = keys
    for other in others:
        if keys[other] != keys[first]:
            raise _disagreement(unit, name, [(rank, _describe_keys(keys[rank])) for rank in (first, other)])
    found: dict[str, _StateReport] = {}
    for key in keys[first] or ():
        reported = {rank: states[key] for rank, states in by_rank.items() if states is not None}
        if all(each.is_sharded for each in reported.values()):
            differs = next((rank for rank in others if reported[rank].dtype != reported[first].dtype), None)
            words = {rank: f"'{key}' in {each.dtype}" for rank, each in reported.items()}
        else:
            values = {rank: each.value for rank, each in reported.items()}
            differs = next((rank for rank in others if not is_same(values[rank], values[first])), None)
            words = {rank: f"'{key}' = {_describe_value(value)}" for rank, value in values.items()}
        if differs is not None:
            raise _disagreement(unit, name, [(rank, words[rank]) for rank in (first, differs)])
        found[key] = next((each for each in reported.values() if not each.is_sharded), reported[first])
    return found


def _describe_keys(keys: list[str] | None) -> str:
    if keys is None:
        return "no such parameter in its optimizer"
    return f"states {keys}" if keys else "no state"


def _describe_value(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)[:60]
    return f"{value.item()}" if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal. Tensors may be on different devices; NaN equals NaN."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and one.shape == other.shape
            and bool(torch.allclose(one.cpu(), other.cpu(), rtol=0, atol=0, equal_nan=True))
        )
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        # Containers of tensors have no simple equality: assume that they are equal.
        return type(one) is type(other)


def _disagreement(unit: Unit, name: str, views: list[tuple[int, str]]) -> RankDisagreement:
    described = "; ".join(f"rank {rank} of the group has {words}" for rank, words in views)
    return RankDisagreement(
        f"the optimizers of ranks that share parameter '{name}' have different states of it: {described}",
        where=f"optimizer state, unit '{unit.name}', rank {unit.rank}",
        fix="step the same parameters on every rank, and load the same state into every rank's optimizer",
    )


def _gather_unit(
    unit: Unit,
    agreed: dict[FlatSlot, dict[str, _StateReport]],
    own_states: dict[FlatSlot, State],
    kind: StateDictType,
) -> dict[FlatSlot, State]:
    """Gathers the states of a unit's parameters: one gather for each flat segment and sharded state."""
    to_dtensors = kind is StateDictType.SHARDED_STATE_DICT and unit.mesh.shard.world > 1
    found: dict[FlatSlot, State] = {slot: {} for slot in flat_slots(unit)}
    for number, line in enumerate(flat_form(unit).lines):
        sharded: dict[tuple[str, torch.dtype], list[FlatSlot]] = {}
        for slot in line.slots:
            for key, report in agreed[slot].items():
                # Keeps the order of keys: sharded states are filled in below.
                found[slot][key] = None
                if report.is_sharded and report.dtype is not None:
                    sharded.setdefault((key, report.dtype), []).append(slot)
                else:
                    own = own_states.get(slot, {}) if slot.span.numel else {}
                    value = own[key] if key in own else report.learned(unit.mesh.device)
                    found[slot][key] = value.clone() if isinstance(value, torch.Tensor) else value
        for (key, dtype), slots in sharded.items():
            parts = [
                local_elements(slot, own_states[slot][key])
                if slot in slots and key in own_states.get(slot, {})
                else None
                for slot in line.slots
            ]
            share = assemble_shard(
                line, parts, flat_form(unit).layout.segments[number].numel, dtype, unit.mesh.device
            )
            for slot, full in zip(
                line.slots, full_tensors_of(unit, number, gather_segment(unit, share)), strict=True
            ):
                if slot in slots:
                    found[slot][key] = gathered_value(slot, full, unit, to_dtensors)
    return found
