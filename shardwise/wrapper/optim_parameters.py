"""Which of a wrapped model's parameters an optimizer holds: whose elements, under which names, in the model's order.

Everything about optimizer states goes by names, and in the model's own order. An optimizer may list parameters in any
order, and in another one on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.mesh import DataMesh
from shardwise.engine.gather.full_tensors import flat_form, is_flat
from shardwise.engine.unit.binding import clean_name
from shardwise.engine.unit.flat_form import FlatSlot, Line
from shardwise.engine.unit.membership import units_of
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError
from shardwise.torch_internals import parameters_of

State = dict[str, Any]


@dataclass
class HeldParameter:
    """One parameter that an optimizer may step: whose elements it holds, or its own name if it is no shard."""

    param: torch.Tensor
    names: list[str]
    local_name: str
    unit: Unit | None = None
    number: int = 0
    line: Line | None = None
    slots: list[FlatSlot] | None = None


class HeldParameters:
    """Every parameter of a model, in the model's order, by what optimizers know it by."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.units = flat_units(model)
        self.slot_names = _names_of_slots(model, self.units)
        local_names = {id(param): clean_name(name) for name, param in model.named_parameters()}
        known: dict[int, HeldParameter] = {}
        for unit in self.units:
            for number, line in enumerate(flat_form(unit).lines):
                groups = [line.slots] if line.flat is not None else [[slot] for slot in line.slots]
                for slots in groups:
                    sharded = slots[0].sharded
                    own = [self.slot_names[slot] for slot in slots]
                    local = local_names.get(id(sharded), own[0])
                    known[id(sharded)] = HeldParameter(sharded, own, local, unit, number, line, slots)
        for name, param in model.named_parameters():
            known.setdefault(id(param), HeldParameter(param, [clean_name(name)], clean_name(name)))
        self._known = known

    def of(self, params: Iterable[torch.Tensor]) -> list[HeldParameter]:
        """What each of these parameters holds, in their order."""
        found = []
        for number, param in enumerate(params):
            if id(param) not in self._known:
                raise ConfigError(
                    f"the optimizer's parameter number {number} of shape {tuple(param.shape)} is none of the model's",
                    where=f"optimizer state of {type(self.model).__name__}",
                    fix="make the optimizer from the wrapped model's parameters()",
                )
            found.append(self._known[id(param)])
        return found

    @property
    def names(self) -> list[str]:
        return [name for held in self._known.values() for name in held.names]


def flat_units(model: nn.Module) -> list[Unit]:
    return [unit for unit in dict.fromkeys(u for m in model.modules() for u in units_of(m)) if is_flat(unit)]


def _names_of_slots(model: nn.Module, units: list[Unit]) -> dict[FlatSlot, str]:
    """Each slot's name in ``model``: that of the first place that shows it."""
    places: dict[tuple[int, str], FlatSlot] = {}
    for unit in units:
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


def mesh_of(model: nn.Module) -> DataMesh | None:
    """The ranks that share the outermost wrapped module."""
    return next((unit.mesh for unit in flat_units(model)), None)


def is_first_rank(model: nn.Module) -> bool:
    """Whether this is the first of the ranks that share the model; of all, if nothing of it is wrapped."""
    mesh = mesh_of(model)
    return dist.get_rank() == 0 if mesh is None else mesh.is_first


class OptimizerContents:
    """An optimizer's groups, and its states by parameter; or those of a state dict of it."""

    def __init__(self, optim: torch.optim.Optimizer, state_dict: Mapping[str, Any] | None = None) -> None:
        self.params = [list(group["params"]) for group in optim.param_groups]
        groups, state = optim.param_groups, dict(optim.state)
        if state_dict is not None:
            groups, state = state_dict["param_groups"], dict(state_dict["state"])
            numbers = [number for group in groups for number in group["params"]]
            params = [param for group in self.params for param in group]
            if [len(group["params"]) for group in groups] != [len(group) for group in self.params]:
                raise ConfigError(
                    f"the state dict has groups of {[len(group['params']) for group in groups]} parameters, the "
                    f"optimizer has groups of {[len(group) for group in self.params]}",
                    where="optim_state_dict",
                    fix="pass what this optimizer's state_dict() gave, or leave it out",
                )
            by_number = dict(zip(numbers, params, strict=True))
            state = {by_number.get(key, key): value for key, value in state.items()}
        self.options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._states: dict[int, State] = {
            id(key): value for key, value in state.items() if isinstance(key, torch.Tensor)
        }
        # What an optimizer keeps for no parameter.
        self.loose = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}

    def state_of(self, param: torch.Tensor) -> State:
        return self._states.get(id(param), {})
