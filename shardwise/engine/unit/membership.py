"""Which unit a parameter belongs to, and what happens when somebody replaces or ties a unit's parameters.

Every parameter of a unit is tagged with its unit and slot, as it was found, sharded and gathered, so that optimizers,
state dicts and modules sharded later find the unit.

``.to()`` and ``to_empty()`` move parameters out of the unit's buffer, ``load_state_dict(assign=True)`` installs new
ones. A replacement must be the same shard on the same kind of device. If it is another sharded parameter, the two names
have been tied: the name moves to that parameter's slot, and the old parameter is no longer used.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine.unit.binding import Place, Shown, Slot
from shardwise.engine.unit.sharded_placeholder import ShardedPlaceholder
from shardwise.errors import StateError
from shardwise.torch_internals import local_of, parameters_of

if TYPE_CHECKING:
    from shardwise.engine.unit.unit import Unit

MEMBERSHIP_ATTRIBUTE = "_shardwise_membership"
_HIDDEN_ATTRIBUTE = "_shardwise_hidden"


class Membership:
    """Unit and slot of a parameter; an attribute of it as it was found, sharded, and gathered.

    A module sharded later that shows the same parameter finds its unit here. Copies and saved parameters get an empty
    one: they belong to no unit.
    """

    def __init__(self, unit: Unit | None = None, slot: Slot | None = None) -> None:
        self.unit = weakref.ref(unit) if unit is not None else None
        self.slot = slot

    def __deepcopy__(self, memo: dict[int, object]) -> Membership:
        return Membership()

    def __reduce__(self) -> tuple[type[OrderedDict[str, object]], tuple[()]]:
        # Saved files must load without shardwise, and with torch.load(weights_only=True).
        return (OrderedDict, ())

    def owner(self) -> tuple[Unit, Slot] | None:
        if self.unit is None or self.slot is None:
            return None
        unit = self.unit()
        return None if unit is None else (unit, self.slot)


def membership(param: torch.Tensor) -> tuple[Unit, Slot] | None:
    tag = param.__dict__.get(MEMBERSHIP_ATTRIBUTE)
    return tag.owner() if isinstance(tag, Membership) else None


def is_member(param: torch.Tensor) -> bool:
    return MEMBERSHIP_ATTRIBUTE in param.__dict__


def watched_data(param: torch.Tensor) -> torch.Tensor | None:
    """Returns the data of a shard such that its unit notices writes to them; None for other tensors."""
    found = membership(param)
    if found is None or found[1].sharded is not param or found[1].local is not local_of(param):
        return None
    return found[1].watched_data()


def tag(param: torch.Tensor, unit: Unit, slot: Slot) -> None:
    param.__dict__[MEMBERSHIP_ATTRIBUTE] = Membership(unit, slot)


def tag_hidden(unit: Unit, slot: Slot) -> None:
    """Tags modules that show None for the parameter while the unit is sharded: other units may share them."""
    for place in slot.places if not slot.is_shown else ():
        place.module.__dict__.setdefault(_HIDDEN_ATTRIBUTE, {})[place.name] = Membership(unit, slot)


def hidden(module: nn.Module, name: str) -> tuple[Unit, Slot] | None:
    """Returns unit and slot of a parameter for which ``module`` shows None."""
    tag = module.__dict__.get(_HIDDEN_ATTRIBUTE, {}).get(name)
    return tag.owner() if isinstance(tag, Membership) else None


UNITS_ATTRIBUTE = "_shardwise_units"


def units_of(module: nn.Module) -> tuple[Unit, ...]:
    """The units of a module: first the one that follows its forward, then its companions on other meshes."""
    units: tuple[Unit, ...] = module.__dict__.get(UNITS_ATTRIBUTE, ())
    return units


def sharded_shown(slots: Iterable[Slot], unit: Unit) -> Shown:
    """What modules show while the unit is sharded; None for a parameter inside a flat parameter.

    Code outside of the unit may still read such a parameter's dtype or shape, or test whether there is a bias: it finds
    a placeholder, as an attribute of the module that Python looks up before ``_parameters``.
    """
    entries: list[tuple[dict[str, Any], str, Any]] = []
    for slot in slots:
        placeholder = None if slot.is_shown else ShardedPlaceholder.of(slot.unsharded, slot.name, unit)
        for place in slot.places:
            entries.append((place.params, place.name, slot.sharded if slot.is_shown else None))
            if placeholder is not None:
                entries.append((place.module.__dict__, place.name, placeholder))
    return Shown(entries)


# --- parameters replaced or tied from outside -------------------------------------------------------------------------


def follow_ties(unit: Unit) -> dict[Unit, list[Place]]:
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
            if (found := _tied_to(shown, slot)) is None:
                # A new parameter under the names of several slots belongs to the first of them.
                found = (unit, replaced.setdefault(id(shown), slot))
            owner, tied = found
            if tied is slot:
                continue
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


def _tied_to(shown: torch.Tensor | None, slot: Slot) -> tuple[Unit, Slot] | None:
    """Returns unit and slot of ``shown``, if it is a parameter of another slot than ``slot``."""
    found = None if shown is None else membership(shown)
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
    if shown is None or slot.unsharded is None or shown.requires_grad or slot.sharded.requires_grad:
        return False
    return isinstance(shown, nn.Parameter) and shown.is_set_to(slot.unsharded)


def ties_while_gathered(slots: list[Slot], unit: str, rank: int) -> dict[Place, Slot]:
    """Returns places of gathered parameters that now show another sharded parameter, with its slot.

    Raises where a place shows anything else.
    """
    tied: dict[Place, Slot] = {}
    for slot in slots:
        for place in slot.places:
            shown = place.params.get(place.name)
            if shown is slot.unsharded or shown is slot.sharded or _wraps_frozen(shown, slot):
                continue
            if (found := _tied_to(shown, slot)) is None:
                raise StateError(
                    f"parameter '{slot.name}' was replaced by {_described(shown)} while it was gathered, and the "
                    "replacement would be lost",
                    where=f"unit '{unit}', rank {rank}",
                    fix="call reshard() first, and give the sharded parameter new values with copy_() or "
                    "load_state_dict()",
                )
            tied[place] = found[1]
    return tied


def adopt_found(slots: list[Slot], unit: str, rank: int) -> None:
    """Makes the parameters that modules show now the slots' sharded parameters; raises if one does not fit."""
    found = [slot.found() for slot in slots]
    for slot, param in zip(slots, found, strict=True):
        if slot.is_shown and any(place.params.get(place.name) is not param for place in slot.places):
            raise StateError(
                f"parameter '{slot.name}' has several names, and they were given different parameters",
                where=f"unit '{unit}', rank {rank}",
                fix="give all of them the same one, write values with copy_() or load_state_dict(assign=False), or "
                "untie them before the model is sharded",
            )
        if param is None or not slot.fits(param):
            raise StateError(
                f"parameter '{slot.name}' was replaced by {_described(param)}, which cannot take the place of "
                f"{slot.wanted}",
                where=f"unit '{unit}', rank {rank}",
                fix="replace it with one of the same kind on the same mesh, or load values with load_state_dict",
            )
    for slot, param in zip(slots, found, strict=True):
        assert param is not None
        slot.adopt(param)


def check_are_home(slots: list[Slot], home: torch.device, is_offloaded: bool, unit: str, rank: int) -> None:
    """Raises unless all shards have memory on the kind of device where the unit keeps them."""
    if meta := [slot.name for slot in slots if slot.local.device.type == "meta"]:
        raise StateError(
            f"parameters {meta} of unit '{unit}' are still on the meta device",
            where=f"rank {rank}",
            fix="give them memory and values before the first forward: model.to_empty(device=...), then "
            "initialise (e.g. reset_parameters()) or load a state dict",
        )
    if moved := [slot for slot in slots if slot.local.device.type != home.type]:
        raise StateError(
            f"parameters {[slot.name for slot in moved]} of unit '{unit}' were moved to "
            f"{moved[0].local.device}, but its shards live on {home}",
            where=f"rank {rank}",
            fix=f"move the model back with .to('{home.type}')"
            + (": with CPUOffloadPolicy shards stay on the host" if is_offloaded else ""),
        )


def check_not_sharded(model: nn.Module, names: Iterable[str]) -> None:
    """Raises if one of the names is a parameter of a unit: ``functional_call`` would put other values in its place.

    A gather in the call would overwrite them or take them for the new shards, and backward would not know them.
    """
    for name in names:
        path, _, own = name.rpartition(".")
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue  # functional_call says what is wrong
        param = parameters_of(module).get(own)
        found = hidden(module, own) if param is None else membership(param)
        if found is not None:
            unit, slot = found
            raise StateError(
                f"functional_call cannot give parameter '{name}' other values: it is sharded, and the unit's gather "
                "would lose them",
                where=f"unit '{unit.name}', parameter '{slot.name}', rank {unit.rank}",
                fix="call functional_call on a model that is not sharded, or write the values to the sharded "
                "parameters with copy_() or load_state_dict()",
            )


def _described(param: object) -> str:
    if isinstance(param, DTensor):
        return f"a DTensor of shape {tuple(param.shape)} placed {tuple(param.placements)}"
    if isinstance(param, torch.Tensor):
        return f"a plain tensor of shape {tuple(param.shape)}"
    return "nothing" if param is None else f"a {type(param).__name__}"
