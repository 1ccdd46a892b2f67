"""Optimizer states out of shards, by parameter name: whole, in DTensors, or as this rank's own elements.

    each rank tells what its optimizer holds ──▶ all agree, or all raise ──▶ one gather a line and key

Which optimizer lists which parameter first, or in which group, does not matter. A rank that has no element of a
parameter need not hold it: it learns from its peers what goes with it.
"""

from __future__ import annotations

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
from shardwise.wrapper.local_shards import local_shard_of
from shardwise.wrapper.model_state import rows_of
from shardwise.wrapper.optim_parameters import (
    HeldParameter,
    HeldParameters,
    OptimizerContents,
    State,
    is_first_rank,
)
from shardwise.wrapper.state_dict_types import FullOptimStateDictConfig, StateDictSettings, StateDictType

LOCAL = StateDictType.LOCAL_STATE_DICT


def is_cut(key: str, value: Any, shape: torch.Size | tuple[int, ...]) -> bool:
    """Whether a state has an element for each of the parameter's."""
    return isinstance(value, torch.Tensor) and key != "step" and tuple(value.shape) == tuple(shape)


@dataclass(frozen=True)
class _Told:
    """What one rank says of one state: whether it is cut like the shard, and its value if that may be all of it."""

    is_cut: bool
    dtype: torch.dtype | None
    value: Any = None


@dataclass
class _Report:
    """What one rank's optimizer holds, by parameter name."""

    problem: str | None = None
    states: dict[str, dict[str, _Told]] = field(default_factory=dict)
    groups: list[tuple[list[str], State]] = field(default_factory=list)


def named_state(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    settings: StateDictSettings,
    state_dict: Mapping[str, Any] | None = None,
) -> State:
    """The optimizer's state by parameter name, of the kind that is set. Every rank must call it."""
    kind, config = settings.state_dict_type, settings.optim_state_dict_config
    holdings, stepped = HeldParameters(model), OptimizerContents(optim, state_dict)
    problem: ConfigError | None = None
    groups: list[list[HeldParameter]] = []
    try:
        groups = [holdings.of(params) for params in stepped.params]
    except ConfigError as error:
        # Told before it is raised: peers would wait for this rank.
        problem = error
    if kind is LOCAL:
        if problem is not None:
            raise problem
        state = _local_states(groups, stepped)
        names = [[held.local_name for held in group] for group in groups]
    else:
        reports = _exchange(holdings, _report(groups, stepped, problem))
        if problem is not None:
            raise problem
        _check_all_can(holdings, reports)
        state = _named_states(holdings, groups, stepped, kind, reports)
        names = _names_by_group(groups, stepped.options, reports)
    if isinstance(config, FullOptimStateDictConfig) and config.rank0_only and not is_first_rank(model):
        return {}
    order = {name: number for number, name in enumerate(holdings.names)}
    ordered = sorted(state, key=lambda name: order.get(name, len(order)))
    return {
        "state": {
            name: {key: _offloaded(value, config.offload_to_cpu) for key, value in state[name].items()}
            for name in ordered
        }
        | stepped.loose,
        "param_groups": [
            {**options, "params": own} for options, own in zip(stepped.options, names, strict=True)
        ],
    }


def _offloaded(value: Any, offloads: bool) -> Any:
    return value.cpu() if offloads and isinstance(value, torch.Tensor) else value


def _local_states(groups: list[list[HeldParameter]], stepped: OptimizerContents) -> dict[str, State]:
    return {
        held.local_name: {
            key: local_shard_of(held.unit, held.slots, value)
            if held.unit is not None and held.slots and is_cut(key, value, held.param.shape)
            else value
            for key, value in state.items()
        }
        for group in groups
        for held in group
        if (state := stepped.state_of(held.param))
    }


# --- what ranks tell each other ---------------------------------------------------------------------------------------


def _report(
    groups: list[list[HeldParameter]], stepped: OptimizerContents, problem: ConfigError | None
) -> _Report:
    states: dict[str, dict[str, _Told]] = {}
    for group in groups:
        for held in group:
            if held.slots is not None:
                told = {
                    key: _told(key, value, held.param) for key, value in stepped.state_of(held.param).items()
                }
                states.update(dict.fromkeys(held.names, told))
    named = [
        ([name for held in group for name in held.names], options)
        for group, options in zip(groups, stepped.options, strict=False)
    ]
    return _Report(None if problem is None else str(problem).splitlines()[0], states, named)


def _told(key: str, value: Any, param: torch.Tensor) -> _Told:
    if not isinstance(value, torch.Tensor):
        return _Told(False, None, value)
    looks_cut = is_cut(key, value, param.shape)
    # A shard of one element may have a count of the same shape: then peers tell which it is.
    return _Told(
        looks_cut, value.dtype, value.detach().cpu() if not looks_cut or value.numel() == 1 else None
    )


def _exchange(holdings: HeldParameters, own: _Report) -> dict[GroupCollectives, list[_Report]]:
    """What the ranks of every group that shards a part of the model hold."""
    return {
        calls: gather_objects(own, calls)
        for calls in dict.fromkeys(unit.mesh.shard for unit in holdings.units)
    }


def _check_all_can(holdings: HeldParameters, by_group: dict[GroupCollectives, list[_Report]]) -> None:
    for reports in by_group.values():
        for rank, report in enumerate(reports):
            if report.problem is not None:
                raise RankDisagreement(
                    f"rank {rank} of the group cannot give its optimizer's state: {report.problem}",
                    where=f"optimizer state of {type(holdings.model).__name__}",
                    fix="make the same optimizer on every rank",
                )


def _names_by_group(
    groups: list[list[HeldParameter]], options: list[State], by_group: dict[GroupCollectives, list[_Report]]
) -> list[list[str]]:
    """The names of each of the optimizer's groups; what peers alone hold goes where its neighbours are, or its like."""
    own = [[name for held in group for name in held.names] for group in groups]
    group_of = {name: number for number, names in enumerate(own) for name in names}
    for names, settings in (
        group for told in by_group.values() for report in told for group in report.groups
    ):
        missing = [name for name in names if name not in group_of]
        known = (group_of[name] for name in names if name in group_of)
        alike = (number for number, other in enumerate(options) if _are_alike(other, settings))
        number = next(chain(known, alike), None) if missing else None
        if number is not None:
            own[number] += missing
            group_of.update(dict.fromkeys(missing, number))
    return own


def _are_alike(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)


# --- what they agree on, and gather ---------------------------------------------------------------------------------


def _named_states(
    holdings: HeldParameters,
    groups: list[list[HeldParameter]],
    stepped: OptimizerContents,
    kind: StateDictType,
    reports: dict[GroupCollectives, list[_Report]],
) -> dict[str, State]:
    held_params = {slot: held.param for group in groups for held in group for slot in held.slots or ()}
    agreed = {
        slot: _agreed(unit, index, holdings.slot_names[slot], reports[unit.mesh.shard])
        for unit in holdings.units
        for index, slot in enumerate(flat_slots(unit))
    }
    state: dict[str, State] = {
        held.names[0]: dict(own)
        for group in groups
        for held in group
        if held.slots is None and (own := stepped.state_of(held.param))
    }
    for unit in holdings.units:
        own_states = {
            slot: stepped.state_of(held_params[slot]) for slot in flat_slots(unit) if slot in held_params
        }
        for slot, values in _gather_unit(unit, agreed, own_states, kind).items():
            if values:
                state[holdings.slot_names[slot]] = values
    return state


def _agreed(unit: Unit, index: int, name: str, reports: list[_Report]) -> dict[str, _Told]:
    """What the states of one parameter are, as the ranks say that have elements of it; raises if they differ."""
    told = {rank: reports[rank].states.get(name) for rank in ranks_with_elements(unit, index)}
    kinds = {rank: None if keys is None else sorted(keys) for rank, keys in told.items()}
    first, *others = kinds
    for other in others:
        if kinds[other] != kinds[first]:
            raise _disagreement(unit, name, [(rank, _in_words(kinds[rank])) for rank in (first, other)])
    found: dict[str, _Told] = {}
    for key in kinds[first] or ():
        by_rank = {rank: keys[key] for rank, keys in told.items() if keys is not None}
        if all(each.is_cut for each in by_rank.values()):
            problem = next((rank for rank in others if by_rank[rank].dtype != by_rank[first].dtype), None)
            words = {rank: f"'{key}' in {each.dtype}" for rank, each in by_rank.items()}
        else:
            values = {rank: each.value for rank, each in by_rank.items()}
            problem = next((rank for rank in others if not is_same(values[rank], values[first])), None)
            words = {rank: f"'{key}' = {_shown(value)}" for rank, value in values.items()}
        if problem is not None:
            raise _disagreement(unit, name, [(rank, words[rank]) for rank in (first, problem)])
        found[key] = next((each for each in by_rank.values() if not each.is_cut), by_rank[first])
    return found


def _in_words(keys: list[str] | None) -> str:
    if keys is None:
        return "no such parameter in its optimizer"
    return f"states {keys}" if keys else "no state of it"


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)[:60]
    return f"{value.item()}" if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same; tensors, wherever they lie and whether or not they are numbers."""
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
        # What holds tensors compares element by element: there is no telling, and each rank gives its own.
        return type(one) is type(other)


def _disagreement(unit: Unit, name: str, views: list[tuple[int, str]]) -> RankDisagreement:
    said = "; ".join(f"rank {rank} of the group has {words}" for rank, words in views)
    return RankDisagreement(
        f"the optimizers of ranks that share parameter '{name}' have different states of it: {said}",
        where=f"optimizer state, unit '{unit.name}', rank {unit.rank}",
        fix="step the same parameters on every rank, and load the same state into every rank's optimizer",
    )


def _gather_unit(
    unit: Unit,
    agreed: dict[FlatSlot, dict[str, _Told]],
    own_states: dict[FlatSlot, State],
    kind: StateDictType,
) -> dict[FlatSlot, State]:
    """The states of a unit's parameters: of each line, each key that is cut is gathered once for all of it."""
    is_sharded = kind is StateDictType.SHARDED_STATE_DICT and unit.mesh.shard.world > 1
    found: dict[FlatSlot, State] = {slot: {} for slot in flat_slots(unit)}
    for number, line in enumerate(flat_form(unit).lines):
        cut: dict[tuple[str, torch.dtype], list[FlatSlot]] = {}
        for slot in line.slots:
            for key, told in agreed[slot].items():
                # In their order, though the cut ones come later.
                found[slot][key] = None
                if told.is_cut and told.dtype is not None:
                    cut.setdefault((key, told.dtype), []).append(slot)
                else:
                    own = own_states.get(slot, {}) if slot.span.numel else {}
                    value = own.get(key, told.value)
                    found[slot][key] = value.clone() if isinstance(value, torch.Tensor) else value
        for (key, dtype), slots in cut.items():
            parts = [
                local_elements(slot, own_states[slot][key])
                if slot in slots and key in own_states.get(slot, {})
                else None
                for slot in line.slots
            ]
            share = assemble_shard(
                line, parts, flat_form(unit).layout.segments[number].numel, dtype, unit.mesh.device
            )
            for slot, whole in zip(
                line.slots, full_tensors_of(unit, number, gather_segment(unit, share)), strict=True
            ):
                if slot in slots:
                    found[slot][key] = rows_of(whole, unit) if is_sharded else whole.clone()
    return found
