"""Parameters that were replaced, tied, frozen or thawed from outside, or have left the meta device.

``.to()`` and ``to_empty()`` move parameters out of the unit's buffer, ``load_state_dict(assign=True)`` installs new
ones. The unit's next gather notices, and moves them into its buffer. A replacement must be the same shard on the same
kind of device. If it is another sharded parameter, the two names have been tied: the name moves to that parameter's
slot, and the old parameter is no longer used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine.unit.binding import Place, Slot
from shardwise.engine.unit.membership import hidden, membership, tag
from shardwise.errors import StateError
from shardwise.torch_internals import parameters_of

if TYPE_CHECKING:
    from shardwise.engine.unit.unit import Unit


def catch_up(unit: Unit) -> None:
    """Adopts what changed since the last gather: parameters frozen, thawed or replaced."""
    if unit.has_memory:
        unit.note_trainable()
        if unit.is_unchanged():
            return
    _adopt_replaced(unit)
    # order: the values' move into the unit's buffer before it is gathered, because this step's gathers waited for what
    # came before the step
    unit.root.streams.gather.wait_compute()


def take_back_replaced(unit: Unit) -> None:
    """Adopts replaced parameters now, for a caller that reads the shards between steps."""
    if not unit.is_unchanged():
        catch_up(unit)


def move_from_meta(unit: Unit) -> None:
    """Moves parameters that ``to_empty()`` gave memory into the unit's buffer, if all of them fit.

    The memory of ``to_empty()`` is returned to the device: in the caching allocator, in blocks of the shards' odd
    sizes, it would be of little use to activations.
    """
    if unit.has_memory or not unit.slots:
        return
    home = unit.home.device
    found = [slot.found() for slot in unit.slots]
    for slot, param in zip(unit.slots, found, strict=True):
        if param is None or not slot.fits(param) or param.device.type != home.type:
            return
    del found, param
    _adopt_replaced(unit)
    if home.type == "cuda":
        torch.cuda.empty_cache()


def _adopt_replaced(unit: Unit) -> None:
    """Makes the parameters that modules show now the unit's own, and moves their values into its buffer."""
    unit.gradients.check_none_wait_for_replicas()
    _follow_ties(unit)
    _adopt_found(unit)
    for slot in unit.slots:
        tag(slot.sharded, unit, slot)
    unit.show_in_all_places()
    _check_are_home(unit)
    unit.build()


def _follow_ties(unit: Unit) -> None:
    """Lets units that show a parameter which was tied to another unit's gather that unit, too."""
    moved = _move_tied_names(unit)
    if not moved:
        return
    unit.drop_nameless_slots()
    for owner, places in moved.items():
        if owner is unit:
            continue
        # Before a model's first forward they are not of one root yet.
        for other in (unit, *unit.needed_by):
            other.need(owner)
        if not owner.gathered.holders:
            # Otherwise what was frozen or thawed since its last gather would go unnoticed.
            owner.note_trainable()
        owner.show_in(places)


def _move_tied_names(unit: Unit) -> dict[Unit, list[Place]]:
    """Moves names that now show another sharded parameter to its slot; returns them by the unit of that slot.

    A slot of ``unit`` may be left without a name.
    """
    moved: dict[Unit, list[Place]] = {}
    replaced: dict[int, Slot] = {}
    for slot in unit.slots:
        for place in tuple(slot.places):
            shown = place.params.get(place.name)
            if shown is slot.sharded or shown is None:
                continue
            if (found := _tied_to(shown, slot, unit)) is None:
                # A new parameter under the names of several slots belongs to the first of them.
                found = (unit, replaced.setdefault(id(shown), slot))
            owner, tied = found
            if tied is slot:
                continue
            if tied not in owner.slots:
                owner.take_back(tied)
            if owner.settings.precision.param_dtype != unit.settings.precision.param_dtype:
                raise StateError(
                    f"parameter '{slot.name}' was tied to '{tied.name}' of unit '{owner.name}', which computes in "
                    f"{owner.settings.precision.param_dtype or 'its own dtype'} and not in "
                    f"{unit.settings.precision.param_dtype or 'its own dtype'}",
                    where=f"unit '{unit.name}', rank {unit.rank}",
                    fix="give both units the same param_dtype, or tie the parameters before fully_shard",
                )
            slot.places.remove(place)
            tied.places.append(place)
            moved.setdefault(owner, []).append(place)
    return moved


def _tied_to(shown: torch.Tensor | None, slot: Slot, unit: Unit) -> tuple[Unit, Slot] | None:
    """Returns unit and slot of ``shown``, if it is a parameter of another slot than ``slot`` of ``unit``."""
    found = None if shown is None else membership(shown)
    if shown is not None and found is None:
        # A conversion of some modules has dropped all attributes of their parameters.
        units = dict.fromkeys((unit, *unit.root.units))
        found = next(((each, own) for each in units for own in each.slots if own.sharded is shown), None)
    if (
        found is None
        or found[1] is slot
        or (shown is not found[1].sharded and shown is not found[1].unsharded)
    ):
        return None
    return found


def _wraps_frozen(shown: torch.Tensor | None, slot: Slot) -> bool:
    """Returns whether ``shown`` is the gathered memory of a frozen parameter in an object of another class.

    bitsandbytes puts a weight into such an object in every forward. Nothing is lost with it: it holds the same values,
    and has no gradient.
    """
    if shown is None or shown.requires_grad or slot.sharded.requires_grad:
        return False
    return isinstance(shown, nn.Parameter) and shown.is_set_to(slot.unsharded)


def ties_while_gathered(unit: Unit) -> dict[Place, Slot]:
    """Returns places of gathered parameters that now show another sharded parameter, with its slot.

    Raises where a place shows anything else.
    """
    tied: dict[Place, Slot] = {}
    for slot in unit.slots:
        for place in slot.places:
            shown = place.params.get(place.name)
            if shown is slot.unsharded or shown is slot.sharded or _wraps_frozen(shown, slot):
                continue
            if (found := _tied_to(shown, slot, unit)) is None:
                raise StateError(
                    f"parameter '{slot.name}' was replaced by {_described(shown)} while it was gathered, and the "
                    "replacement would be lost",
                    where=f"unit '{unit.name}', rank {unit.rank}",
                    fix="call reshard() first, and give the sharded parameter new values with copy_() or "
                    "load_state_dict()",
                )
            tied[place] = found[1]
    return tied


def _adopt_found(unit: Unit) -> None:
    """Makes the parameters that modules show now the slots' sharded parameters; raises if one does not fit."""
    found = unit.form.found(unit.slots, f"unit '{unit.name}', rank {unit.rank}")
    for slot, param in zip(unit.slots, found, strict=True):
        if slot.is_shown and any(place.params.get(place.name) is not param for place in slot.places):
            raise StateError(
                f"parameter '{slot.name}' has several names, and they were given different parameters",
                where=f"unit '{unit.name}', rank {unit.rank}",
                fix="give all of them the same one, write values with copy_() or load_state_dict(assign=False), or "
                "untie them before the model is sharded",
            )
        if param is None or not slot.fits(param):
            raise StateError(
                f"parameter '{slot.name}' was replaced by {_described(param)}, which cannot take the place of "
                f"{slot.wanted}",
                where=f"unit '{unit.name}', rank {unit.rank}",
                fix="replace it with one of the same kind on the same mesh, or load values with load_state_dict",
            )
    for slot, param in zip(unit.slots, found, strict=True):
        assert param is not None
        slot.adopt(param)


def _check_are_home(unit: Unit) -> None:
    """Raises unless all shards have memory on the kind of device where the unit keeps them."""
    home = unit.home.device
    if meta := [slot.name for slot in unit.slots if slot.local.device.type == "meta"]:
        raise StateError(
            f"parameters {meta} of unit '{unit.name}' are still on the meta device",
            where=f"rank {unit.rank}",
            fix="give them memory and values before the first forward: model.to_empty(device=...), then "
            "initialise (e.g. reset_parameters()) or load a state dict",
        )
    if moved := [slot for slot in unit.slots if slot.local.device.type != home.type]:
        raise StateError(
            f"parameters {[slot.name for slot in moved]} of unit '{unit.name}' were moved to "
            f"{moved[0].local.device}, but its shards live on {home}",
            where=f"rank {unit.rank}",
            fix=f"move the model back with .to('{home.type}')"
            + (": with CPUOffloadPolicy shards stay on the host" if unit.home.is_offloaded else ""),
        )


def values_to_swap(model: nn.Module, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values that ``functional_call`` has to put in the place of others: not those that are there already.

    Raises if one would take the place of a unit's parameter: a gather in the call would overwrite it or take it for the
    new shard, and backward would not know it.
    """
    swapped = {}
    for name, value in values.items():
        found = _unit_and_slot(model, name)
        if found is None:
            swapped[name] = value
        elif value is not found[1].sharded:
            unit, slot = found
            raise StateError(
                f"functional_call cannot give parameter '{name}' other values: it is sharded, and the unit's gather "
                "would lose them",
                where=f"unit '{unit.name}', parameter '{slot.name}', rank {unit.rank}",
                fix="call functional_call on a model that is not sharded, or write the values to the sharded "
                "parameters with copy_() or load_state_dict()",
            )
    return swapped


def _unit_and_slot(model: nn.Module, name: str) -> tuple[Unit, Slot] | None:
    path, _, own = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None  # functional_call says what is wrong
    param = parameters_of(module).get(own)
    return hidden(module, own) if param is None else membership(param)


def _described(param: object) -> str:
    if isinstance(param, DTensor):
        return f"a DTensor of shape {tuple(param.shape)} placed {tuple(param.placements)}"
    if isinstance(param, torch.Tensor):
        return f"a plain tensor of shape {tuple(param.shape)}"
    return "nothing" if param is None else f"a {type(param).__name__}"
