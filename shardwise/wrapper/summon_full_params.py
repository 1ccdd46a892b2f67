"""Whole parameters between steps: ``summon_full_params``, and what state dicts are read from.

While a unit is shown whole, its modules hold whole parameters under their own names, in memory of their own, and no
flat parameters. Forwards compute with them as they stand, without communication. Shards take over this rank's elements
afterwards, if asked to; gradients that no shard would take over are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from shardwise import trace
from shardwise.engine.gather.full_tensors import (
    flat_form,
    flat_slots,
    gather_gradients,
    gather_parameters,
    is_flat,
    local_elements,
    shard_elements,
    write_parameter,
)
from shardwise.engine.unit.flat_form import FlatSlot
from shardwise.engine.unit.membership import units_of
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError, StateError
from shardwise.torch_internals import inside_backward

# Set on a wrapper while its unit is shown whole: whether this rank is among those that show it.
WHOLE_ATTRIBUTE = "_shardwise_whole"


@contextmanager
def shown_whole(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """What ``summon_full_params`` does."""
    where = f"summon_full_params({type(module).__name__})"
    if writeback and rank0_only:
        raise ConfigError(
            "writeback and rank0_only exclude each other: other ranks have nothing to write back",
            where=where,
            fix="pass writeback=False or rank0_only=False",
        )
    modules = module.modules() if recurse else [module]
    units = [unit for unit in dict.fromkeys(u for m in modules for u in units_of(m)) if is_flat(unit)]
    for unit in units:
        check_idle(unit, "summon_full_params")
        if with_grads and unit.gradients.has_stash:
            raise StateError(
                f"unit '{unit.name}' has gradients that no backward has reduced yet: there are no whole ones to show",
                where=f"{where}, with_grads=True, rank {unit.rank}",
                fix="run a backward outside of no_sync() first, or pass with_grads=False",
            )
        if is_shown_whole(unit):
            raise StateError(
                f"unit '{unit.name}' is shown whole already",
                where=f"{where}, rank {unit.rank}",
                fix="leave the outer summon_full_params first, or pass recurse=False to one of them",
            )
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(
                one_shown_whole(
                    unit,
                    writeback,
                    offload_to_cpu,
                    with_grads,
                    materializes=not rank0_only or unit.mesh.is_first,
                )
            )
            _refuse_gradients(unit, writeback)
        yield


def check_idle(unit: Unit, call: str) -> None:
    root = unit.root
    if root.in_forward or (root.in_backward and inside_backward()):
        raise StateError(
            f"{call} was called in the middle of a step",
            where=f"unit '{unit.name}', rank {unit.rank}, inside a forward or backward",
            fix=f"call {call} between steps",
        )
    # A step that raised has ended all the same: what it left behind must not keep anybody from saving the model.
    root.recover()


def is_shown_whole(unit: Unit) -> bool:
    return WHOLE_ATTRIBUTE in unit.modules[0].__dict__


@contextmanager
def one_shown_whole(
    unit: Unit,
    writeback: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    materializes: bool = True,
) -> Iterator[dict[FlatSlot, torch.Tensor]]:
    """Shows one unit whole. Every rank gathers; those that do not materialize go on showing shards."""
    unit.reshard(trace.IDLE)
    wholes = gather_parameters(unit)
    gradients = gather_gradients(unit) if with_grads else {}
    if not materializes:
        wholes, gradients = {}, {}
    if offload_to_cpu:
        wholes = {slot: whole.cpu() for slot, whole in wholes.items()}
        gradients = {slot: gradient.cpu() for slot, gradient in gradients.items()}
    params = {slot: nn.Parameter(whole, slot.sharded.requires_grad) for slot, whole in wholes.items()}
    for slot, gradient in gradients.items():
        params[slot].grad_dtype = gradient.dtype
        params[slot].grad = gradient
    marks = unit.modules[0].__dict__
    marks[WHOLE_ATTRIBUTE] = materializes
    _show(unit, params)
    try:
        yield wholes
    finally:
        left = {slot: _left_in(slot, param) for slot, param in params.items()}
        del marks[WHOLE_ATTRIBUTE]
        unit.show_in_all_places()
        show_flats(unit)
        if writeback:
            _write_back(unit, left)
            if with_grads:
                _write_back_gradients(unit, left)


def check_shows_whole(unit: Unit) -> None:
    """Raises where a unit that is shown whole cannot run, because other ranks show it."""
    if not unit.modules[0].__dict__[WHOLE_ATTRIBUTE]:
        raise StateError(
            "a model was called that only the first rank shows whole",
            where=f"summon_full_params(rank0_only=True), unit '{unit.name}', rank {unit.rank}",
            fix="call it on the first rank alone, or leave rank0_only out",
        )


def _refuse_gradients(unit: Unit, writeback: bool) -> None:
    """Has backward raise at a whole parameter whose gradient would end with it."""
    for slot in flat_slots(unit):
        place = slot.places[0]
        param = place.params[place.name]
        if param is None or param is slot.sharded or not param.requires_grad or param.is_inference():
            continue
        if param.grad is None or not writeback:
            param.register_post_accumulate_grad_hook(partial(_refuse_gradient, unit, slot.name))


def _refuse_gradient(unit: Unit, name: str, param: torch.Tensor) -> None:
    param.grad = None
    raise StateError(
        f"backward reached parameter '{name}' as summon_full_params shows it: its gradient would get to no shard",
        where=f"unit '{unit.name}', rank {unit.rank}",
        fix="run forward and backward outside of summon_full_params; within it, forward under torch.no_grad()",
    )


def _show(unit: Unit, params: dict[FlatSlot, nn.Parameter]) -> None:
    for slot, param in params.items():
        for place in slot.places:
            place.show_alone(param)
    if params:
        for line in flat_form(unit).lines:
            if line.flat is not None:
                del line.params[line.name]


def show_flats(unit: Unit) -> None:
    for line in flat_form(unit).lines:
        if line.flat is not None:
            line.params[line.name] = line.flat


def _left_in(slot: FlatSlot, param: nn.Parameter) -> torch.Tensor | None:
    """What stands where a whole parameter was shown: that, or what somebody has put in its place."""
    found = [place.params.get(place.name) for place in slot.places]
    return next((each for each in found if each is not param), param)


def _write_back(unit: Unit, left: dict[FlatSlot, torch.Tensor | None]) -> None:
    fitting = {slot: whole for slot, whole in left.items() if whole is not None and whole.shape == slot.shape}
    for slot, whole in left.items():
        if slot not in fitting:
            found = "nothing" if whole is None else f"a tensor of shape {tuple(whole.shape)}"
            raise StateError(
                f"{found} was left in the place of parameter '{slot.name}', whose shape is {slot.shape}",
                where=f"summon_full_params, unit '{unit.name}', rank {unit.rank}",
                fix="write values of the parameter's shape; nothing of this unit was written back",
            )
    for slot, whole in fitting.items():
        write_parameter(slot, whole.detach())


def _write_back_gradients(unit: Unit, left: dict[FlatSlot, torch.Tensor | None]) -> None:
    """Gives shards the gradients that the whole parameters have now: changed, set where none was, or dropped."""
    gradients = {slot: whole.grad for slot, whole in left.items() if whole is not None}
    for line in flat_form(unit).lines:
        shown = [line.slots] if line.flat is not None else [[slot] for slot in line.slots]
        for slots in shown:
            param = slots[0].sharded
            if all(gradients.get(slot) is None for slot in slots):
                param.grad = None
                continue
            if param.grad is None and (param.numel() or 0 in slots[0].shape):
                param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
            if param.grad is not None:
                for slot in slots:
                    part, gradient = local_elements(slot, param.grad), gradients.get(slot)
                    part.zero_() if gradient is None else part.copy_(shard_elements(slot, gradient))
