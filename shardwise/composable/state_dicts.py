"""State dicts of sharded modules: read and written in the sharded form, whatever state the units are in.

Reading changes nothing and communicates nothing: one rank may do it alone, in the middle of a step. Loading checks
all of a state dict before the first value is written, so that one that does not fit leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise import trace
from shardwise.engine.unit.binding import Slot, membership, not_copied
from shardwise.engine.unit.unit import Unit
from shardwise.errors import CheckpointError, StateError
from shardwise.torch_internals import loads_as_usual, parameters_of, spec_of, state_entries

_HOOKS_ATTRIBUTE = "_shardwise_state_hooks"


def keep_state_dicts_sharded(units: Iterable[Unit]) -> None:
    """Sees to it for every module that shows parameters of these units; those it was done for are passed over."""
    for unit in units:
        for slot in unit.slots:
            for place in slot.places:
                hooks = place.module.__dict__.get(_HOOKS_ATTRIBUTE)
                if hooks is None:
                    hooks = place.module.__dict__[_HOOKS_ATTRIBUTE] = _StateHooks()
                    # torch leaves a mark on this hook, which a bound method cannot take.
                    place.module.register_state_dict_post_hook(partial(hooks.give_sharded))
                    place.module.register_load_state_dict_pre_hook(hooks)
                hooks.slots[place.name] = (unit, slot)


def _slots_of(module: nn.Module) -> dict[str, tuple[Unit, Slot]]:
    """The slots of a module's own parameters by name: those it was sharded with, or was tied to since."""
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
    """The hooks of one module, with the slots of its own parameters by name, as it was sharded."""

    def __init__(self) -> None:
        self.slots: dict[str, tuple[Unit, Slot]] = {}

    def give_sharded(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        shown = parameters_of(module)
        for name, (unit, slot) in _slots_of(module).items():
            value = state_dict.get(prefix + name)
            if value is not None and shown.get(name) is slot.unsharded:
                unit.take_over_writes()
                sharded = slot.sharded
                state_dict[prefix + name] = sharded if value is slot.unsharded else sharded.detach()

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
        """Before a load: shows the shards, and cuts them out of values that come whole."""
        for name, (unit, slot) in _slots_of(module).items():
            if unit.holders:
                raise StateError(
                    f"a state dict was loaded while unit '{unit.name}' is in use",
                    where=f"rank {unit.rank}, inside a forward or backward",
                    fix="load between steps",
                )
            unit.reshard(trace.IDLE)
            value = state_dict.get(prefix + name)
            is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if is_whole and value.shape == slot.sharded.shape:
                state_dict[prefix + name] = _shard_of(value, slot)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise not_copied("deepcopy", "a module inside a sharded one")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copied("pickle", "a module inside a sharded one")


def _shard_of(value: torch.Tensor, slot: Slot) -> torch.Tensor:
    """This rank's part, without communication: every rank has the whole."""
    spec = spec_of(slot.sharded)
    with torch.no_grad():
        return distribute_tensor(value.detach(), spec.mesh, spec.placements, src_data_rank=None)


def check_fits(module: nn.Module, state_dict: Any, strict: bool, assign: bool) -> None:
    """Raises if ``state_dict`` cannot be loaded into ``module``; changes nothing.

    Where a module below has a way of its own to load, only loading itself can tell.
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
    problems = []
    if strict:
        if missing := [key for key in entries if key not in state_dict]:
            problems.append(f"Missing key(s) in state_dict: {_quoted(missing)}.")
        if unexpected := [key for key in state_dict if key not in entries]:
            problems.append(f"Unexpected key(s) in state_dict: {_quoted(unexpected)}.")
    for key, own in entries.items():
        if own is not None and key in state_dict:
            problem = _problem(key, own, state_dict[key], assign)
            if problem is not None:
                problems.append(problem)
    if problems:
        raise CheckpointError(
            f"the state dict does not fit {type(module).__name__}, and none of it was loaded:\n    "
            + "\n    ".join(problems),
            where=f"{type(module).__name__}.load_state_dict(strict={strict}, assign={assign})",
            fix="load a state dict of the same model; strict=False passes over missing and unexpected keys",
        )


def _problem(key: str, own: torch.Tensor, value: Any, assign: bool) -> str | None:
    if not isinstance(value, torch.Tensor):
        return f"{key} is a {type(value).__name__} and not a tensor."
    if value.shape != own.shape:
        return (
            f"size mismatch for {key}: copying a param with shape {tuple(value.shape)} from checkpoint, "
            f"the shape in current model is {tuple(own.shape)}."
        )
    if not isinstance(own, DTensor):
        return f"{key} is a DTensor, in the model it is not sharded." if isinstance(value, DTensor) else None
    if not isinstance(value, DTensor):
        return None
    if value.device_mesh != own.device_mesh:
        return f"{key} lies on {value.device_mesh}, in the model on {own.device_mesh}."
    if assign and tuple(value.placements) != tuple(own.placements):
        return f"{key} is placed {tuple(value.placements)}, in the model {tuple(own.placements)}."
    return None


def _quoted(keys: list[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)
