"""State dicts of modules sharded by ``fully_shard``: DTensors, even while a unit is unsharded.

Reading changes nothing and needs no communication, so one rank may do it alone, in the middle of a step. Loading checks
the whole state dict before it writes the first value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise import trace
from shardwise.engine.state_dict_check import check_state_dict, size_mismatch
from shardwise.engine.unit.binding import Slot, not_copied
from shardwise.engine.unit.membership import is_member, membership
from shardwise.engine.unit.replaced import ties_while_gathered
from shardwise.engine.unit.unit import Unit
from shardwise.errors import StateError
from shardwise.planning.lifecycle import UNSHARDED
from shardwise.torch_internals import inside_backward, loads_as_usual, parameters_of, spec_of, state_entries

_HOOKS_ATTRIBUTE = "_shardwise_state_hooks"


def keep_state_dicts_sharded(units: Iterable[Unit]) -> None:
    """Registers state dict hooks on every module that has parameters of these units, once for each module."""
    for unit in units:
        for slot in unit.slots:
            for place in slot.places:
                hooks = place.module.__dict__.get(_HOOKS_ATTRIBUTE)
                if hooks is None:
                    hooks = place.module.__dict__[_HOOKS_ATTRIBUTE] = _StateHooks()
                    # torch sets an attribute on this hook, which a bound method does not allow.
                    place.module.register_state_dict_post_hook(partial(hooks.replace_unsharded))
                    place.module.register_load_state_dict_pre_hook(hooks)
                hooks.slots[place.name] = (unit, slot)


def _slots_of(module: nn.Module) -> dict[str, tuple[Unit, Slot]]:
    """The units and slots of a module's own parameters by name, including parameters tied after sharding."""
    hooks = module.__dict__.get(_HOOKS_ATTRIBUTE)
    if hooks is None:
        return {}
    tied = {
        name: found
        for name, param in parameters_of(module).items()
        if name in hooks.slots and param is not None and (found := membership(param)) is not None
    }
    return {**hooks.slots, **tied}


class _StateHooks:
    """The state dict hooks of one module. ``slots``: of its own parameters by name, when it was sharded."""

    def __init__(self) -> None:
        self.slots: dict[str, tuple[Unit, Slot]] = {}

    def replace_unsharded(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """After ``state_dict``: replaces unsharded parameters by their shards."""
        shown = parameters_of(module)
        for name, (unit, slot) in _slots_of(module).items():
            value, param = state_dict.get(prefix + name), shown.get(name)
            if value is None or param is None:
                continue
            is_gathered = unit.state is UNSHARDED and not unit.gathered.is_hidden
            if is_gathered and not is_member(param):
                # A replacement, which would be saved whole; this raises.
                ties_while_gathered(unit)
            if param is slot.unsharded:
                unit.gathered.copy_writes_to_shards()
                sharded = slot.sharded
                state_dict[prefix + name] = sharded if value is slot.unsharded else sharded.detach()

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
        """Before a load: reshards the units, and brings the values to the placements of the parameters."""
        for name, (unit, slot) in _slots_of(module).items():
            if unit.gathered.holders and unit.root.in_backward and not inside_backward():
                # That backward raised: its step is over.
                unit.root.recover()
            if unit.gathered.holders:
                raise StateError(
                    f"load_state_dict was called while unit '{unit.name}' is in use",
                    where=f"rank {unit.rank}, inside a forward or backward",
                    fix="load between steps",
                )
            unit.reshard(trace.IDLE)
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.shape == slot.sharded.shape:
                state_dict[prefix + name] = _shard_of(value, slot)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise not_copied("deepcopy", "a module inside a sharded one")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copied("pickle", "a module inside a sharded one")


def _shard_of(value: torch.Tensor, slot: Slot) -> torch.Tensor:
    """This rank's shard of a tensor, as a DTensor. Communicates only if the tensor is sharded in another way."""
    spec = spec_of(slot.sharded)
    with torch.no_grad():
        if isinstance(value, DTensor):
            is_placed = value.device_mesh != spec.mesh or tuple(value.placements) == tuple(spec.placements)
            return value if is_placed else value.redistribute(spec.mesh, spec.placements)
        return distribute_tensor(value.detach(), spec.mesh, spec.placements, src_data_rank=None)


def check_fits(module: nn.Module, state_dict: Any, strict: bool, assign: bool) -> None:
    """Raises ``CheckpointError`` if ``state_dict`` cannot be loaded into ``module``; changes nothing.

    Checks nothing if a submodule customizes how it loads: only loading shows whether that works.
    """
    members = dict(module.named_modules(remove_duplicate=False))
    plainly = all(loads_as_usual(member, _StateHooks) for member in members.values())
    if not plainly or not isinstance(state_dict, Mapping):
        return
    entries: dict[str, torch.Tensor | None] = {}
    for path, member in members.items():
        slots = _slots_of(member)
        for name, value in state_entries(member):
            is_unsharded = name in slots and value is slots[name][1].unsharded
            entries[f"{path}.{name}" if path else name] = slots[name][1].sharded if is_unsharded else value
    arguments = f"strict={strict}, assign={assign}"
    check_state_dict(module, state_dict, entries, _problem_with, strict, arguments)


def _problem_with(key: str, own: torch.Tensor | None, value: Any) -> str | None:
    if own is None:
        return None
    if not isinstance(value, torch.Tensor):
        return f"{key} is a {type(value).__name__}, not a tensor."
    if problem := size_mismatch(key, value, tuple(own.shape)):
        return problem
    if not isinstance(own, DTensor):
        return f"{key} is a DTensor, but not sharded in the model." if isinstance(value, DTensor) else None
    if not isinstance(value, DTensor):
        return None
    if value.device_mesh != own.device_mesh:
        return f"{key} is on {value.device_mesh}, in the model on {own.device_mesh}."
    return None
