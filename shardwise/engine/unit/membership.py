"""Which unit a parameter belongs to, and what modules show for it while the unit is sharded.

Every parameter of a unit is tagged with its unit and slot, as it was found, sharded and gathered, so that optimizers,
state dicts and modules sharded later find the unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from shardwise.engine.tensor_trees import tensors_in
from shardwise.engine.unit.binding import Attachment, Shown, ShownEntry, Slot
from shardwise.engine.unit.interfaces import NamedUnit
from shardwise.errors import StateError
from shardwise.torch_internals import local_of, without_memory_like

if TYPE_CHECKING:
    from shardwise.engine.unit.unit import Unit

MEMBERSHIP_ATTRIBUTE = "_shardwise_membership"
_HIDDEN_ATTRIBUTE = "_shardwise_hidden"


class Membership(Attachment):
    """Unit and slot of a parameter; an attribute of it as it was found, sharded, and gathered.

    A module sharded later that shows the same parameter finds its unit here. Copies belong to no unit.
    """

    def __init__(self, unit: Unit | None = None, slot: Slot | None = None) -> None:
        self.unit = weakref.ref(unit) if unit is not None else None
        self.slot = slot

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


def units_in(modules: Iterable[nn.Module]) -> list[Unit]:
    """The units of all these modules, each once, in order."""
    return list(dict.fromkeys(unit for module in modules for unit in units_of(module)))


def share_tag(param: torch.Tensor, sharded: torch.Tensor) -> None:
    """Gives the sharded parameter the tag of the one that was found, so that both move to another unit at once."""
    sharded.__dict__[MEMBERSHIP_ATTRIBUTE] = param.__dict__[MEMBERSHIP_ATTRIBUTE]


def move_tags(slots: Iterable[Slot], unit: Unit) -> None:
    """Makes ``unit`` the owner of these slots."""
    for slot in slots:
        slot.sharded.__dict__[MEMBERSHIP_ATTRIBUTE].unit = weakref.ref(unit)


class ShardedPlaceholder(torch.Tensor):
    """What modules show for a parameter inside a flat parameter, while its unit is sharded.

    It has the parameter's shape, dtype and device, and no memory. Computing with it raises an error that says what to
    do.
    """

    param_name: str
    # Weak: modules hold the placeholder, and must not keep the unit alive through it.
    unit: weakref.ref[NamedUnit]

    @classmethod
    def of(cls, param: torch.Tensor, name: str, unit: NamedUnit) -> ShardedPlaceholder:
        made = without_memory_like(cls, param)
        made.param_name, made.unit = name, weakref.ref(unit)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<parameter '{self.param_name}', {list(self.shape)} {self.dtype}, sharded>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        used = next(tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, cls))
        unit = used.unit()
        raise StateError(
            f"parameter '{used.param_name}' was used while its unit is sharded ({func})",
            where=f"unit '{unit.name}', rank {unit.rank}"
            if unit is not None
            else "a unit that no longer exists",
            fix="call the wrapper rather than the module inside it; name other methods that compute with "
            "register_fsdp_forward_method(), or use summon_full_params()",
        )


def sharded_shown(slots: Iterable[Slot], unit: Unit) -> Shown:
    """What modules show while the unit is sharded; None for a parameter inside a flat parameter.

    Code outside of the unit may still read such a parameter's dtype or shape, or test whether there is a bias: it finds
    a placeholder, as an attribute of the module that Python looks up before ``_parameters``.
    """
    entries: list[ShownEntry] = list(unit.form.flat_entries())
    for slot in slots:
        placeholder = None if slot.is_shown else ShardedPlaceholder.of(slot.unsharded, slot.name, unit)
        for place in slot.places:
            entries.append((place.params, place.name, slot.sharded if slot.is_shown else None))
            if placeholder is not None:
                entries.append((place.module.__dict__, place.name, placeholder))
    return Shown(entries)
