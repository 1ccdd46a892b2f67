"""``summon_full_params``: full parameters in a wrapped model's modules, between steps.

While a unit is *summoned*, its modules hold full parameters under their original names, in separate memory, instead of
shards or flat parameters. Forwards use them without communication. With ``writeback`` the shards are then overwritten
with this rank's elements. Backward raises where the gradient of a full parameter would be lost. State dicts are read
from summoned units too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from shardwise import trace
from shardwise.engine.gather.full_tensors import (
    as_shown,
    flat_form,
    flat_slots,
    gather_gradients,
    gather_parameters,
    is_flat,
    local_elements,
    shard_elements,
    write_parameter,
)
from shardwise.engine.unit.binding import Place
from shardwise.engine.unit.flat_form import FlatSlot, Line
from shardwise.engine.unit.membership import MEMBERSHIP_ATTRIBUTE, membership, units_in
from shardwise.engine.unit.replaced import take_back_replaced
from shardwise.engine.unit.unit import Unit
from shardwise.errors import StateAssertionError, StateError, UnsupportedError
from shardwise.torch_internals import inside_backward

# An attribute of a wrapper while its unit is summoned: whether this rank has the full parameters.
SUMMONED_ATTRIBUTE = "_shardwise_summoned"
# An attribute of a wrapper while torch loads into temporary parameters of its modules.
LOADING_ATTRIBUTE = "_shardwise_loading"


@contextmanager
def summoned(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """The context manager that ``summon_full_params`` returns."""
    where = f"summon_full_params({type(module).__name__})"
    if writeback and rank0_only:
        raise UnsupportedError(
            "writeback and rank0_only exclude each other: the other ranks would have nothing to write back",
            where=where,
            fix="pass writeback=False or rank0_only=False",
        )
    # To the caller, past contextlib.
    warn_of_copies("summon_full_params", offload_to_cpu, rank0_only, stacklevel=4)
    idle_units(module.modules(), "summon_full_params")
    units = flat_units(module.modules() if recurse else [module])
    for unit in units:  # and those that are added meanwhile
        # A name that is tied to a parameter of another unit shows it in full, too.
        units += [
            needed
            for needed in unit.needs
            if is_flat(needed) and needed not in units and not is_summoned(needed)
        ]
    for unit in units:
        unit.gradients.hide_stash()
        if with_grads and unit.gradients.has_stash:
            raise StateError(
                f"unit '{unit.name}' has gradients that are not reduced yet, so its full gradients are not known",
                where=f"{where}, with_grads=True, rank {unit.rank}",
                fix="run a backward outside no_sync() first, or pass with_grads=False",
            )
        if is_summoned(unit):
            raise StateAssertionError(
                f"summon_full_params is already active for unit '{unit.name}'",
                where=f"{where}, rank {unit.rank}",
                fix="exit the outer summon_full_params first, or pass recurse=False to one of them",
            )
    slot_of: dict[int, FlatSlot] = {}
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(
                summoned_unit(
                    unit,
                    writeback,
                    offload_to_cpu,
                    with_grads,
                    on_this_rank=not rank0_only or unit.mesh.is_first,
                    slot_of=slot_of,
                )
            )
            _raise_at_lost_gradients(unit, writeback)
        yield


def warn_of_copies(call: str, offload_to_cpu: bool, rank0_only: bool, stacklevel: int) -> None:
    """Warns where all ranks of a host copy the same full parameters to its memory."""
    if offload_to_cpu and not rank0_only:
        warnings.warn(
            f"{call} with offload_to_cpu=True but not rank0_only=True copies all parameters to host memory once for "
            "every rank of the host",
            stacklevel=stacklevel,
        )


def flat_units(modules: Iterable[nn.Module]) -> list[Unit]:
    """The units of all wrappers among ``modules``."""
    return [unit for unit in units_in(modules) if is_flat(unit)]


def flat_lines(unit: Unit) -> list[Line]:
    """The lines of a unit that its wrapper has as flat parameters; none with ``use_orig_params``."""
    return [line for line in flat_form(unit).lines if line.flat is not None]


def slots_by_parameter(line: Line) -> list[list[FlatSlot]]:
    """The slots of each parameter that an optimizer sees: all for a flat parameter, else one each."""
    return [line.slots] if line.flat is not None else [[slot] for slot in line.slots]


def check_idle(unit: Unit, call: str) -> None:
    """Raises if ``call`` is made inside a forward or backward; cleans up after a step that raised."""
    root = unit.root
    if root.in_forward or (root.in_backward and inside_backward()):
        raise StateAssertionError(
            f"{call} was called in the middle of a step",
            where=f"unit '{unit.name}', rank {unit.rank}, inside a forward or backward",
            fix=f"call {call} between steps",
        )
    # After a step that raised it must still be possible to save the model.
    root.recover()


def idle_units(modules: Iterable[nn.Module], call: str) -> list[Unit]:
    """The units of all wrappers among ``modules``, then those that they share parameters with, ready for ``call``.

    They are sharded, and parameters that users tied, replaced, frozen or thawed are their own. Every call that reads or
    writes what a model has between steps begins here, because it may be the first to run after such a change. All units
    come before the first is used: one may find that another's parameter has been tied to its own.
    """
    found = flat_units(modules)
    for unit in found:  # and those that are added meanwhile
        check_idle(unit, call)
        if not is_summoned(unit) and not is_loading(unit):
            unit.reshard(trace.IDLE)
            take_back_replaced(unit)
        found += [needed for needed in unit.needs if is_flat(needed) and needed not in found]
    for unit in filter(is_summoned, found):
        _show_full_in_new_places(unit)
    return found


def _show_full_in_new_places(unit: Unit) -> None:
    """Shows full parameters under names that have been tied to those of a summoned unit."""
    for slot in flat_slots(unit):
        shown = [place.params.get(place.name) for place in slot.places]
        full = [param for param in shown if param is not None and param is not slot.sharded]
        for place, param in zip(slot.places, shown, strict=True):
            if full and param is slot.sharded:
                place.show_alone(full[0])


def is_summoned(unit: Unit) -> bool:
    return SUMMONED_ATTRIBUTE in unit.modules[0].__dict__


def is_loading(unit: Unit) -> bool:
    return LOADING_ATTRIBUTE in unit.modules[0].__dict__


@contextmanager
def summoned_unit(
    unit: Unit,
    writeback: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    on_this_rank: bool = True,
    slot_of: dict[int, FlatSlot] | None = None,
) -> Iterator[dict[FlatSlot, torch.Tensor]]:
    """Puts full parameters into one unit's modules; yields them by slot.

    Every rank gathers. A rank with ``on_this_rank=False`` drops the full parameters and keeps its shards. ``slot_of``
    collects the slots of full parameters by their ids, from all units that are summoned together.
    """
    unit.reshard(trace.IDLE)
    full = gather_parameters(unit)
    gradients = gather_gradients(unit) if with_grads else {}
    if not on_this_rank:
        full, gradients = {}, {}
    if offload_to_cpu:
        full = {slot: tensor.cpu() for slot, tensor in full.items()}
        gradients = {slot: gradient.cpu() for slot, gradient in gradients.items()}
    params = {slot: _full_parameter(slot, tensor) for slot, tensor in full.items()}
    for slot, gradient in gradients.items():
        params[slot].grad_dtype = gradient.dtype
        params[slot].grad = as_shown(slot, gradient)
    slot_of = {} if slot_of is None else slot_of
    slot_of.update((id(param), slot) for slot, param in params.items())
    wrapper_attributes = unit.modules[0].__dict__
    wrapper_attributes[SUMMONED_ATTRIBUTE] = on_this_rank
    for slot, param in params.items():
        for place in slot.places:
            place.show_alone(param)
    if params:
        hide_flat_parameters(unit)
    try:
        yield full
    finally:
        tied = _ties(params, slot_of)
        final = {slot: _final_parameter(slot, param, tied) for slot, param in params.items()}
        del wrapper_attributes[SUMMONED_ATTRIBUTE]
        unit.show_in_all_places()
        show_flat_parameters(unit)
        if writeback:
            _write_back(unit, final)
            if with_grads:
                _write_back_gradients(unit, final)
        _keep_freezing(unit, final)
        _keep_ties(unit, tied)


def _full_parameter(slot: FlatSlot, full: torch.Tensor) -> nn.Parameter:
    param = nn.Parameter(as_shown(slot, full), slot.sharded.requires_grad)
    if slot.is_shown:
        # Attributes that users gave the original parameter; not which unit it belongs to.
        own = {name: value for name, value in vars(slot.sharded).items() if name != MEMBERSHIP_ATTRIBUTE}
        vars(param).update(own)
    return param


def check_has_full_parameters(unit: Unit) -> None:
    """Raises if only another rank has the full parameters of a summoned unit, so that it cannot run here."""
    if not unit.modules[0].__dict__[SUMMONED_ATTRIBUTE]:
        raise StateError(
            "the model was called on a rank without full parameters: only the first rank has them",
            where=f"summon_full_params(rank0_only=True), unit '{unit.name}', rank {unit.rank}",
            fix="call the model only on the first rank, or leave rank0_only out",
        )


def _raise_at_lost_gradients(unit: Unit, writeback: bool) -> None:
    """Makes backward raise at full parameters whose gradients would not be written back."""
    for slot in flat_slots(unit):
        if not slot.places:
            continue  # its names have been tied to another parameter
        param = slot.places[0].params[slot.places[0].name]
        if param is None or param is slot.sharded or not param.requires_grad or param.is_inference():
            continue
        if param.grad is None or not writeback:
            param.register_post_accumulate_grad_hook(partial(_raise_lost_gradient, unit, slot.name))


def _raise_lost_gradient(unit: Unit, name: str, param: torch.Tensor) -> None:
    param.grad = None
    raise StateError(
        f"backward computed a gradient of parameter '{name}' inside summon_full_params: it would be lost",
        where=f"unit '{unit.name}', rank {unit.rank}",
        fix="run forward and backward outside summon_full_params; inside it, run forward under torch.no_grad()",
    )


def hide_flat_parameters(unit: Unit) -> None:
    """Removes flat parameters from the wrapper's own parameters."""
    for line in flat_lines(unit):
        line.params.pop(line.name, None)


def show_flat_parameters(unit: Unit) -> None:
    """Puts them back."""
    for line in flat_lines(unit):
        line.params[line.name] = line.flat


@contextmanager
def flat_parameters_shown(units: Iterable[Unit]) -> Iterator[None]:
    """Shows flat parameters of gathered units beside the full ones."""
    lines = [line for unit in units if is_flat(unit) for line in flat_lines(unit)]
    hidden = [line for line in lines if line.params.get(line.name, line.flat) is None]
    for line in hidden:
        line.params[line.name] = line.flat
    try:
        yield
    finally:
        for line in hidden:
            line.params[line.name] = None


def _ties(params: dict[FlatSlot, nn.Parameter], slot_of: dict[int, FlatSlot]) -> dict[Place, FlatSlot]:
    """The places that show another slot's parameter than their own, with that slot."""
    tied: dict[Place, FlatSlot] = {}
    for slot in params:
        for place in slot.places:
            shown = place.params.get(place.name)
            if shown is None:
                continue
            found = membership(shown)
            other = slot_of.get(id(shown), found[1] if found and found[1].sharded is shown else None)
            if isinstance(other, FlatSlot) and other is not slot:
                tied[place] = other
    return tied


def _keep_ties(unit: Unit, tied: dict[Place, FlatSlot]) -> None:
    """Ties the shards where a user tied full parameters; raises where those are in flat parameters."""
    for place, other in tied.items():
        if not other.is_shown:
            raise StateError(
                f"parameter '{place.name}' of a {type(place.module).__name__} was tied to '{other.name}' while they "
                "were full, which flat parameters cannot follow",
                where=f"summon_full_params, unit '{unit.name}', rank {unit.rank}",
                fix="tie parameters before they are wrapped, or wrap with use_orig_params=True; they are untied again",
            )
        place.show_alone(other.sharded)


def _keep_freezing(unit: Unit, final: dict[FlatSlot, torch.Tensor | None]) -> None:
    """Freezes or thaws the shards of full parameters that a user froze or thawed."""
    trained = {slot: param.requires_grad for slot, param in final.items() if param is not None}
    for line in flat_form(unit).lines:
        for slots in slots_by_parameter(line):
            wanted = {trained[slot] for slot in slots if slot in trained}
            if len(wanted) > 1:
                raise StateError(
                    f"of {[slot.name for slot in slots]} some were frozen and some were not, but they are in one flat "
                    "parameter",
                    where=f"summon_full_params, unit '{unit.name}', rank {unit.rank}",
                    fix="wrap with use_orig_params=True, or freeze them before they are wrapped; nothing was frozen",
                )
            if wanted:
                slots[0].sharded.requires_grad_(wanted.pop())


def _final_parameter(slot: FlatSlot, param: nn.Parameter, tied: dict[Place, FlatSlot]) -> torch.Tensor | None:
    """The full parameter as the user leaves it: ``param``, or what a module has in its place."""
    found = [place.params.get(place.name) for place in slot.places if place not in tied]
    return next((each for each in found if each is not param), param)


def _write_back(unit: Unit, final: dict[FlatSlot, torch.Tensor | None]) -> None:
    """Overwrites the shards with this rank's elements; raises before the first if a shape has changed."""
    full = {
        slot: param for slot, param in final.items() if param is not None and param.shape == slot.whole_shape
    }
    for slot, param in final.items():
        if slot not in full:
            found = "missing" if param is None else f"a tensor of shape {tuple(param.shape)}"
            raise StateError(
                f"parameter '{slot.name}' is {found} after summon_full_params, instead of shape {slot.whole_shape}",
                where=f"summon_full_params, unit '{unit.name}', rank {unit.rank}",
                fix="keep the parameter's shape; nothing was written back to this unit",
            )
    for slot, param in full.items():
        write_parameter(slot, param.detach())


def _write_back_gradients(unit: Unit, final: dict[FlatSlot, torch.Tensor | None]) -> None:
    """Copies this rank's elements of the full gradients, where there are any, into the gradients of shards."""
    gradients = {slot: param.grad for slot, param in final.items() if param is not None}
    for line in flat_form(unit).lines:
        for slots in slots_by_parameter(line):
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
