"""Slots: one parameter each, in its two forms, and the places in modules that show it.

A module's ``_parameters`` hold the sharded form (a DTensor, what optimizers and state dicts see) except while the
unit is unsharded. A parameter that several modules share has one slot and several places.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine.unit.sharded_placeholder import ShardedPlaceholder
from shardwise.errors import StateError
from shardwise.torch_internals import (
    Spec,
    children_of,
    dtensor,
    dtensor_spec,
    local_of,
    parameters_of,
    redistributed_local,
    replace_local,
    spec_of,
)

if TYPE_CHECKING:
    from shardwise.engine.unit.unit import Unit


# A module that wraps another holds it under this name, which no user wants to see in a parameter's name.
WRAPPED_NAME = "_fsdp_wrapped_module"
# What torch's activation checkpointing calls the module it is wrapped around, in all names but a state dict's.
_CHECKPOINTED_NAME = "_checkpoint_wrapped_module"


def is_wrapper(module: nn.Module) -> bool:
    return WRAPPED_NAME in children_of(module)


def clean_name(name: str) -> str:
    """A name of a parameter or module as if nothing were wrapped."""
    for added in (WRAPPED_NAME, _CHECKPOINTED_NAME):
        name = name.replace(f"{added}.", "").removesuffix(added).removesuffix(".")
    return name


class Place:
    """A name in a module's own parameters."""

    __slots__ = ("module", "name", "params")

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.params = parameters_of(module)

    def show_alone(self, param: nn.Parameter) -> None:
        """Shows ``param``, and nothing that stands in for it."""
        self.module.__dict__.pop(self.name, None)
        self.params[self.name] = param


@dataclass
class FoundParameter:
    """A parameter with every place that shows it, and the unit and slot that have taken it already, if any have."""

    name: str
    param: nn.Parameter
    places: list[Place]
    taken: tuple[Unit, Slot] | None = None


class Slot:
    """One parameter of a unit.

    ``shape`` is that of the tensor the engine cuts and gathers: the whole parameter, or with tensor parallelism this
    rank's part of it, and ``tensor_parallel`` then says how that part is placed. Of the axes it is placed on,
    ``data_axes`` are those of data parallelism, over which the engine itself sums gradients.

    ``local`` is the sharded form's local tensor as the engine made it: when the parameter shows another one, somebody
    has replaced it. ``is_shown``: the parameter's own name shows the sharded form. ``held`` is a gradient kept without
    sync, in the reduce dtype when that is wider.
    """

    __slots__ = (
        "compute_dtype",
        "data_axes",
        "dim",
        "held",
        "is_cast",
        "is_shown",
        "local",
        "name",
        "places",
        "shape",
        "sharded",
        "spec",
        "stored_dtype",
        "tensor_parallel",
        "unsharded",
    )

    def __init__(
        self,
        name: str,
        places: list[Place],
        dim: int,
        shape: tuple[int, ...],
        compute_dtype: torch.dtype,
        spec: Spec,
        sharded: nn.Parameter,
        tensor_parallel: Spec | None,
        data_axes: tuple[int, ...] = (),
        is_cast: bool = False,
    ) -> None:
        self.name = name
        self.places = places
        self.dim = dim
        self.shape = shape
        self.stored_dtype = sharded.dtype
        self.compute_dtype = compute_dtype
        self.spec = spec
        self.sharded = sharded
        self.local = local_of(sharded)
        self.unsharded: nn.Parameter = sharded
        self.tensor_parallel = tensor_parallel
        self.data_axes = data_axes
        # Whether a policy says what is computed in, or the parameter itself.
        self.is_cast = is_cast
        self.is_shown = True
        self.held: torch.Tensor | None = None

    @property
    def gradient_dtype(self) -> torch.dtype:
        """What gradients come in."""
        return self.compute_dtype

    def plain_gradient(self) -> torch.Tensor | None:
        """The gradient that came in, as the engine reduces it: with tensor parallelism, this rank's part of it."""
        gradient = self.unsharded.grad
        if gradient is None or self.tensor_parallel is None:
            return gradient
        return redistributed_local(gradient, self.tensor_parallel, self.data_axes)

    @property
    def kind(self) -> Hashable:
        """Parameters of one kind stand together in a row, and are cast together."""
        return (self.stored_dtype, self.compute_dtype)

    @property
    def description(self) -> str:
        """What ranks compare, to tell whether they hold the same model."""
        return f"{list(self.shape)} {self.stored_dtype} sharded on dim {self.dim}, computed in {self.compute_dtype}"

    def move_into(self, part: torch.Tensor) -> None:
        """Moves into its part of the unit's buffer; the parameter keeps its values and identity."""
        part.copy_(self.local)
        replace_local(self.sharded, part)
        self.local = part

    def gradient(self, local: torch.Tensor) -> torch.Tensor:
        """A gradient of the sharded parameter, over ``local``."""
        return dtensor(local, self.spec, outline=self.local)

    def found(self) -> nn.Parameter | None:
        """The parameter that stands in the sharded one's place now: somebody may have replaced it."""
        if not self.places:
            return self.sharded
        place = self.places[0]
        return place.params.get(place.name)

    def fits(self, param: nn.Parameter) -> bool:
        """Whether ``param`` can take the sharded parameter's place."""
        return (
            isinstance(param, DTensor)
            and tuple(param.shape) == tuple(self.spec.shape)
            and param.device_mesh == self.spec.mesh
            and tuple(param.placements) == tuple(self.spec.placements)
            and tuple(local_of(param).shape) == tuple(self.local.shape)
        )

    @property
    def wanted(self) -> str:
        """What fits, in words."""
        return f"a DTensor of shape {tuple(self.spec.shape)} placed {tuple(self.spec.placements)}"

    def adopt(self, param: nn.Parameter) -> None:
        """Takes ``param``, which fits, for the sharded parameter; a gradient put by was the old one's."""
        if self.sharded is not param:
            self.held = None
        self.sharded = param
        self.local = local_of(param)
        if not self.is_cast:
            self.compute_dtype = param.dtype
        self.stored_dtype = param.dtype
        spec = spec_of(param)
        self.spec = dtensor_spec(spec.mesh, spec.placements, param.shape, self.spec.stride, param.dtype)

    def version(self) -> int:
        """Rises with every in-place write to the parameter, whether through the DTensor or its local tensor."""
        return self.sharded._version + self.local._version

    def add_held(self, gradient: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
        """``gradient`` on top of what was put by, which is thereby taken; in the dtype of what is put by."""
        if self.held is None:
            return None if gradient is None else _in_wider(gradient, dtype)
        held, self.held = self.held, None
        return held if gradient is None else held.add_(gradient)

    def hold_gradient(self, dtype: torch.dtype | None) -> None:
        """Puts the gradient by, without sync; in ``dtype`` if that is wider, so that many micro-batches round less.

        Put by, it cannot be taken for one that came in later: a unit that is passed twice in a backward has a first
        signal before its gradients are there.
        """
        gradient = self.plain_gradient()
        if gradient is None:
            return
        self.held = _in_wider(gradient, dtype) if self.held is None else self.held.add_(gradient)
        self.unsharded.grad = None

    def drop_gradient(self) -> None:
        self.unsharded.grad = None
        self.held = None


def _in_wider(gradient: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return gradient if dtype is None or dtype.itemsize <= gradient.itemsize else gradient.to(dtype)


MEMBERSHIP_ATTRIBUTE = "_shardwise_membership"
_HIDDEN_ATTRIBUTE = "_shardwise_hidden"


class Membership:
    """Set on a parameter in each of its forms: as it was found, sharded, and gathered.

    A module sharded later that shows the same parameter finds its unit here. It stays behind when the parameter is
    copied or saved: a copy belongs to no unit.
    """

    def __init__(self, unit: Unit | None = None, slot: Slot | None = None) -> None:
        self.unit = weakref.ref(unit) if unit is not None else None
        self.slot = slot

    def __deepcopy__(self, memo: dict[int, object]) -> Membership:
        return Membership()

    def __reduce__(self) -> tuple[type[OrderedDict[str, object]], tuple[()]]:
        # What is saved must load without shardwise, and with torch.load(weights_only=True).
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


def tag(param: torch.Tensor, unit: Unit, slot: Slot) -> None:
    param.__dict__[MEMBERSHIP_ATTRIBUTE] = Membership(unit, slot)


def tag_hidden(unit: Unit, slot: Slot) -> None:
    """Leaves word in modules whose names show nothing while the unit is sharded: others may hold those modules too."""
    for place in slot.places if not slot.is_shown else ():
        place.module.__dict__.setdefault(_HIDDEN_ATTRIBUTE, {})[place.name] = Membership(unit, slot)


def hidden(module: nn.Module, name: str) -> tuple[Unit, Slot] | None:
    """Whose parameter a module's name stands for that shows nothing."""
    tag = module.__dict__.get(_HIDDEN_ATTRIBUTE, {}).get(name)
    return tag.owner() if isinstance(tag, Membership) else None


UNITS_ATTRIBUTE = "_shardwise_units"


def units_of(module: nn.Module) -> tuple[Unit, ...]:
    """The units a module was made part of: one for each face that sharded it."""
    units: tuple[Unit, ...] = module.__dict__.get(UNITS_ATTRIBUTE, ())
    return units


# Where to put what, for modules to show one form or the other.
Shown = list[tuple[dict[str, Any], str, Any]]


def sharded_shown(slots: Iterable[Slot], unit: Unit) -> Shown:
    """For the modules to show the sharded form, or nothing where one flat parameter stands for all.

    Code outside of the unit may ask for a dtype or a shape all the same, or whether there is a bias: an attribute of
    the module answers, which is found before its parameters are looked at.
    """
    shown: Shown = []
    for slot in slots:
        stand_in = None if slot.is_shown else ShardedPlaceholder.of(slot.unsharded, slot.name, unit)
        for place in slot.places:
            shown.append((place.params, place.name, slot.sharded if slot.is_shown else None))
            if stand_in is not None:
                shown.append((place.module.__dict__, place.name, stand_in))
    return shown


def unsharded_shown(slots: Iterable[Slot]) -> Shown:
    shown: Shown = []
    for slot in slots:
        for place in slot.places:
            shown.append((place.params, place.name, slot.unsharded))
            if not slot.is_shown:
                shown.append((place.module.__dict__, place.name, slot.unsharded))
    return shown


def show(shown: Shown) -> None:
    for shelf, name, param in shown:
        shelf[name] = param


def is_showing(shown: Shown) -> bool:
    """Whether nobody has put anything else there since it was shown."""
    return all(shelf.get(name) is param for shelf, name, param in shown)


def not_copied(how: str, what: str) -> StateError:
    return StateError(
        f"{what} cannot be copied by {how}: its parameters are tied to the ranks it is sharded over",
        where=f"{how} of a sharded module",
        fix="copy the model before fully_shard, or build a second one and load this one's state_dict() into it",
    )
