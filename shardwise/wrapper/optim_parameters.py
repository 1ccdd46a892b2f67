"""The parameters that an optimizer of a wrapped model steps, with their original names; and the optimizer's state.

Optimizer states are matched by name, in the model's order: an optimizer may list its parameters in any order, which may
differ between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.mesh import DataMesh
from shardwise.engine.gather.full_tensors import flat_form
from shardwise.engine.unit.binding import clean_name
from shardwise.engine.unit.flat_form import FlatSlot, Line
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError
from shardwise.torch_internals import parameters_of
from shardwise.wrapper.summon_full_params import flat_units, idle_units, slots_by_parameter

State = dict[str, Any]


@dataclass
class OptimParameter:
    """One parameter that an optimizer may step.

    ``names``: the original parameters whose elements it has, several for a flat parameter. ``shown_name``: its name in
    ``model.named_parameters()``. ``local_name``: the same without what wrappers add. The rest is None if it is not a
    shard.
    """

    param: torch.Tensor
    names: list[str]
    shown_name: str
    unit: Unit | None = None
    number: int = 0
    line: Line | None = None
    slots: list[FlatSlot] | None = None

    @property
    def local_name(self) -> str:
        return clean_name(self.shown_name)

    @property
    def is_empty_here(self) -> bool:
        """Whether only other ranks have elements of it: this rank's optimizer keeps no state of it."""
        return self.slots is not None and self.param.numel() == 0 and 0 not in self.slots[0].shape


class OptimParameters:
    """Every parameter that an optimizer of a model may step, in the model's order."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.units = idle_units(model.modules(), "reading or loading an optimizer's state")
        self.slot_names = _names_of_slots(model, self.units)
        shown_names = {id(param): name for name, param in model.named_parameters()}
        known: dict[int, OptimParameter] = {}
        for unit in self.units:
            for number, line in enumerate(flat_form(unit).lines):
                for slots in slots_by_parameter(line):
                    if slots[0] not in self.slot_names:
                        continue  # its names have been tied to another parameter
                    sharded = slots[0].sharded
                    own = [self.slot_names[slot] for slot in slots]
                    shown = shown_names.get(id(sharded), own[0])
                    known[id(sharded)] = OptimParameter(sharded, own, shown, unit, number, line, slots)
        for name, param in model.named_parameters():
            known.setdefault(id(param), OptimParameter(param, [clean_name(name)], name))
        self._known = known

    def of(self, params: Iterable[torch.Tensor]) -> list[OptimParameter]:
        """Looks up an optimizer's parameters; raises ``ConfigError`` if one is not a parameter of the model."""
        found = []
        for number, param in enumerate(params):
            if id(param) not in self._known:
                raise ConfigError(
                    f"parameter {number} of the optimizer, shape {tuple(param.shape)}, is not a parameter of the model",
                    where=f"optimizer state of {type(self.model).__name__}",
                    fix="create the optimizer with the wrapped model's parameters()",
                )
            found.append(self._known[id(param)])
        return found

    @property
    def names(self) -> list[str]:
        """The original names of all parameters, in the model's order."""
        return [name for entry in self._known.values() for name in entry.names]

    @property
    def unsharded(self) -> list[OptimParameter]:
        return [entry for entry in self._known.values() if entry.slots is None]

    @property
    def by_local_name(self) -> dict[str, torch.Tensor]:
        """All parameters by the names that they have in the wrapped model."""
        return {entry.local_name: entry.param for entry in self._known.values()}


def _names_of_slots(model: nn.Module, units: list[Unit]) -> dict[FlatSlot, str]:
    """The name of each slot's parameter in ``model``; of a shared parameter, the first one."""
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
    """The mesh of the outermost wrapped module; None if nothing is wrapped."""
    return next((unit.mesh for unit in flat_units(model.modules())), None)


def is_first_rank(model: nn.Module) -> bool:
    """Whether this is the first rank of the model's mesh; or of all ranks, if nothing is wrapped."""
    mesh = mesh_of(model)
    return dist.get_rank() == 0 if mesh is None else mesh.is_first


class OptimizerContents:
    """An optimizer's parameter groups and its state of each parameter, read from itself or from its state dict.

    The state dict may lack its parameter groups: then ``options`` is None. Its keys may be parameter numbers or names.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        optim_params: OptimParameters,
        state_dict: Mapping[str, Any] | None = None,
    ) -> None:
        self.params = [list(group["params"]) for group in optim.param_groups]
        groups: Sequence[Mapping[str, Any]] | None = optim.param_groups
        state: dict[Any, Any] = dict(optim.state)
        if state_dict is not None:
            groups = state_dict.get("param_groups")
            params_by_key = self._params_by_key(state_dict["state"], groups, optim_params)
            state = {
                params_by_key.get(clean_name(key) if isinstance(key, str) else key, key): value
                for key, value in state_dict["state"].items()
            }
        self.options = None if groups is None else [_options_of(group) for group in groups]
        self._states: dict[int, State] = {
            id(key): value for key, value in state.items() if isinstance(key, torch.Tensor)
        }
        # State that belongs to no parameter.
        self.global_state = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}

    def _params_by_key(
        self, state: Iterable[Any], groups: Sequence[Mapping[str, Any]] | None, optim_params: OptimParameters
    ) -> dict[Any, torch.Tensor]:
        """The parameters that a state dict's keys stand for; the first key says which kind of keys it has."""
        sizes = [len(group) for group in self.params]
        if groups is not None and [len(group["params"]) for group in groups] != sizes:
            raise ConfigError(
                f"the state dict has groups of {[len(group['params']) for group in groups]} parameters, the "
                f"optimizer has groups of {sizes}",
                where="optim_state_dict",
                fix="pass the result of this optimizer's state_dict(), or leave it out",
            )
        params = [param for group in self.params for param in group]
        if isinstance(next(iter(state), None), str):
            return dict(optim_params.by_local_name)
        if groups is None:
            return dict(enumerate(params))
        return dict(zip((number for group in groups for number in group["params"]), params, strict=True))

    def state_of(self, param: torch.Tensor) -> State:
        return self._states.get(id(param), {})


def _options_of(group: Mapping[str, Any]) -> State:
    return {key: value for key, value in group.items() if key != "params"}
