"""Slots: one parameter each, sharded and unsharded, and the places in modules that show it.

A module's ``_parameters`` hold the sharded parameter (a DTensor, which optimizers and state dicts see) except while
the unit is unsharded. A parameter that several modules share has one slot and several places. Which unit a parameter
belongs to is in ``membership``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import StateAssertionError, StateError, StateTypeError
from shardwise.torch_internals import (
    Spec,
    children_of,
    dtensor,
    dtensor_spec,
    local_of,
    parameters_of,
    raw_data,
    redistributed_local,
    replace_local,
    spec_of,
)

if TYPE_CHECKING:
    from typing_extensions import Self

# The name under which a wrapper holds its module; parameter names shown to users leave it out.
WRAPPED_NAME = "_fsdp_wrapped_module"
# The same for torch's activation checkpointing; it shows in all names but a state dict's.
CHECKPOINTED_NAME = "_checkpoint_wrapped_module"


def is_wrapper(module: nn.Module) -> bool:
    return WRAPPED_NAME in children_of(module)


def clean_name(name: str) -> str:
    """Returns the name of a parameter or module without the parts that wrappers add."""
    for added in (WRAPPED_NAME, CHECKPOINTED_NAME):
        name = name.replace(f"{added}.", "").removesuffix(added).removesuffix(".")
    return name


class Attachment:
    """An attribute of a tensor that stays behind when the tensor is copied or saved: copies get an empty one.

    Saved files must load without shardwise, and with ``torch.load(weights_only=True)``.
    """

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[OrderedDict[str, object]], tuple[()]]:
        return (OrderedDict, ())


class Place:
    """A name in a module's own parameters."""

    __slots__ = ("module", "name", "params")

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.params = parameters_of(module)

    def show_alone(self, param: nn.Parameter) -> None:
        """Shows ``param``, without a placeholder."""
        self.module.__dict__.pop(self.name, None)
        self.params[self.name] = param


@dataclass
class FoundParameter:
    """A parameter with every place that shows it, and the unit and slot that it already belongs to, if any."""

    name: str
    param: nn.Parameter
    places: list[Place]
    taken: tuple[Any, Slot] | None = None


class Slot:
    """One parameter of a unit.

    ``shape`` is that of the tensor the engine cuts and gathers: the full parameter, or with tensor parallelism this
    rank's part of it; then ``tensor_parallel`` is the placement of that part. Of its mesh axes, ``data_axes`` belong to
    data parallelism: over them the engine itself sums gradients.

    ``local`` is the local tensor of ``sharded`` as the engine made it: if ``sharded`` has another one, a user has
    replaced it. ``is_shown``: modules show ``sharded`` under the parameter's own name. ``stash`` is a gradient kept
    back without sync, in the reduce dtype if that is wider.
    """

    __slots__ = (
        "compute_dtype",
        "data_axes",
        "dim",
        "is_cast",
        "is_shown",
        "local",
        "name",
        "places",
        "shape",
        "sharded",
        "spec",
        "stash",
        "stored_dtype",
        "tensor_parallel",
        "unsharded",
        "watched",
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
        # Whether ``compute_dtype`` comes from a policy, not from the parameter.
        self.is_cast = is_cast
        self.is_shown = True
        self.stash: torch.Tensor | None = None
        self.watched: torch.Tensor | None = None

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype in which backward produces gradients."""
        return self.compute_dtype

    def plain_gradient(self) -> torch.Tensor | None:
        """The gradient as the engine reduces it: with tensor parallelism, this rank's part of it."""
        gradient = self.unsharded.grad
        if gradient is None or self.tensor_parallel is None:
            return gradient
        return redistributed_local(gradient, self.tensor_parallel, self.data_axes)

    @property
    def kind(self) -> Hashable:
        """Parameters of one kind are neighbours in a row, and are cast together."""
        return (self.stored_dtype, self.compute_dtype)

    @property
    def description(self) -> str:
        """What ranks compare to check that they hold the same model."""
        return f"{list(self.shape)} {self.stored_dtype} sharded on dim {self.dim}, computed in {self.compute_dtype}"

    def move_into(self, part: torch.Tensor) -> None:
        """Moves the shard into ``part`` of the unit's buffer; the parameter keeps its values and identity."""
        part.copy_(self.local)
        replace_local(self.sharded, part)
        self.local = part
        self.watched = None

    def gradient(self, local: torch.Tensor) -> torch.Tensor:
        """Returns ``local`` as a gradient of the sharded parameter."""
        return dtensor(local, self.spec, outline=self.local)

    def found(self) -> nn.Parameter | None:
        """Returns the parameter that modules show where the sharded one was: a user may have replaced it."""
        if not self.places:
            return self.sharded
        place = self.places[0]
        return place.params.get(place.name)

    def fits(self, param: nn.Parameter) -> bool:
        """Whether ``param`` can replace the sharded parameter."""
        return (
            isinstance(param, DTensor)
            and tuple(param.shape) == tuple(self.spec.shape)
            and param.device_mesh == self.spec.mesh
            and tuple(param.placements) == tuple(self.spec.placements)
            and tuple(local_of(param).shape) == tuple(self.local.shape)
        )

    @property
    def wanted(self) -> str:
        """Says which parameter fits, for errors."""
        return f"a DTensor of shape {tuple(self.spec.shape)} placed {tuple(self.spec.placements)}"

    def adopt(self, param: nn.Parameter) -> None:
        """Makes ``param``, which fits, the sharded parameter; drops a stashed gradient of the old one."""
        if self.sharded is not param:
            self.stash = None
        self.sharded = param
        self.local = local_of(param)
        self.watched = None
        if not self.is_cast:
            self.compute_dtype = param.dtype
        self.stored_dtype = param.dtype
        spec = spec_of(param)
        self.spec = dtensor_spec(spec.mesh, spec.placements, param.shape, self.spec.stride, param.dtype)

    def version(self) -> int:
        """Rises with every in-place write to the parameter, through the DTensor, its data or its local tensor."""
        version = self.sharded._version + self.local._version
        return version if self.watched is None else version + self.watched._version

    def watched_data(self) -> torch.Tensor:
        """Returns ``sharded.data``, writes to which raise ``version()`` although autograd does not hear of them."""
        if self.watched is None:
            self.watched = raw_data(self.sharded)
        return self.watched.detach()

    def pop_stash(self, gradient: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Returns the sum of the stash and ``gradient``, in the dtype of the stash, and empties the stash."""
        if self.stash is None:
            return None if gradient is None else _in_wider(gradient, dtype)
        stash, self.stash = self.stash, None
        return stash if gradient is None else stash.add_(gradient)

    def stash_gradient(self, dtype: torch.dtype | None) -> None:
        """Moves the gradient to the stash; in ``dtype`` if that is wider, so that many micro-batches round less.

        In the stash it cannot be mistaken for one of a later backward: where a backward visits a unit twice, the first
        signal comes before there are new gradients.
        """
        gradient = self.plain_gradient()
        if gradient is None:
            return
        self.stash = _in_wider(gradient, dtype) if self.stash is None else self.stash.add_(gradient)
        self.unsharded.grad = None

    def drop_gradient(self) -> None:
        self.unsharded.grad = None
        self.stash = None


def computed_dtype(slots: list[Slot]) -> torch.dtype:
    """A dtype that holds the gradients of all these slots without loss."""
    dtype = slots[0].compute_dtype
    for slot in slots[1:]:
        dtype = torch.promote_types(dtype, slot.compute_dtype)
    return dtype


def is_wider(dtype: torch.dtype | None, other: torch.dtype) -> bool:
    return dtype is not None and dtype.itemsize > other.itemsize


def _in_wider(gradient: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return gradient.to(dtype) if is_wider(dtype, gradient.dtype) else gradient


# A dict, a key and what to put there.
ShownEntry = tuple[dict[str, Any], str, Any]


class Shown:
    """What to write where, for modules to show one form of their parameters."""

    __slots__ = ("entries",)

    def __init__(self, entries: Sequence[ShownEntry] = ()) -> None:
        self.entries = entries

    def show(self) -> None:
        for holder, name, param in self.entries:
            holder[name] = param

    def is_shown(self) -> bool:
        """Whether modules still show all of this."""
        return all(holder.get(name) is param for holder, name, param in self.entries)


@dataclass(frozen=True, slots=True)
class ShownForms:
    """What a unit's modules show in either form.

    ``snapshot`` is what they showed when the lists were made (see ``ShardedForm.snapshot``).
    """

    sharded: Shown
    unsharded: Shown
    snapshot: Any


def unsharded_shown(slots: Iterable[Slot], flat_entries: Iterable[ShownEntry]) -> Shown:
    """What modules show while the unit is gathered: full parameters, and no flat ones that would count twice."""
    entries: list[ShownEntry] = [(params, name, None) for params, name, _ in flat_entries]
    for slot in slots:
        for place in slot.places:
            entries.append((place.params, place.name, slot.unsharded))
            if not slot.is_shown:
                entries.append((place.module.__dict__, place.name, slot.unsharded))
    return Shown(entries)


def shallow_copy(module: nn.Module) -> nn.Module:
    """What ``copy.copy`` makes of a module: another of its class with the same submodules, parameters and units."""
    copied = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    return copied


def not_copied(how: str, what: str) -> StateError:
    error = StateTypeError if how == "pickle" else StateAssertionError
    return error(
        f"{what} cannot be copied by {how}: its parameters are tied to the ranks it is sharded over",
        where=f"{how} of a sharded module",
        fix="copy the model before fully_shard, or build a second one and load this one's state_dict() into it",
    )
