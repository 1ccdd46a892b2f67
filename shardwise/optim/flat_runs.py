"""Runs: neighbours in a unit's shards that are stepped as one tensor.

    shards of a unit   | a a a a | b b | . | c c c c c c | d d |        '.' is padding
    gradients          | a a a a | b b | . | c c c c c c | d d |
    run                |◀──────────── one tensor ─────────────▶|

Members of a run are in one parameter group, have one dtype, one history (the same count of steps) and, in each step,
either all a gradient or none. Where that stops to be true the run is split, and stays so. What is in no unit is a run
of its own.

The truth about state is per parameter, in the optimizer's ``state``: DTensors (or tensors) over a part of the run's
own. Runs are made from it, and can be made anew from it at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.engine.buffers import alias
from shardwise.engine.unit.binding import Slot
from shardwise.engine.unit.membership import membership
from shardwise.engine.unit.unit import Unit
from shardwise.torch_internals import Spec, copy_all, dtensor, dtensor_spec, local_of, spec_of

State = dict[str, Any]
States = dict[torch.Tensor, State]


class Member:
    """A parameter of a run; ``start`` counts elements from the beginning of the run."""

    __slots__ = ("_address", "_is_dtensor", "local", "param", "slot", "start", "state", "unit")

    def __init__(self, param: torch.Tensor, unit: Unit | None, slot: Slot | None) -> None:
        self.param = param
        self.unit = unit
        self.slot = slot
        self._is_dtensor = isinstance(param, DTensor)
        self.local = local_of(param) if self._is_dtensor else param
        self._address = 0 if self._is_dtensor else param.data_ptr()
        self.start = 0
        self.state: State | None = None

    def is_in_place(self) -> bool:
        """Whether the parameter still is over the memory that it was over."""
        if self._is_dtensor:
            return local_of(self.param) is self.local
        return self.param.data_ptr() == self._address

    @property
    def start_bytes(self) -> int:
        """Where its shard begins in the unit's."""
        assert self.unit is not None
        assert self.slot is not None
        return self.unit.buffers.starts_bytes[self.slot]

    @property
    def end_bytes(self) -> int:
        return self.start_bytes + self.local.numel() * self.local.itemsize

    def local_part(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a state's value, however it came: sharded like the parameter, or whole."""
        if not isinstance(self.param, DTensor):
            return value
        spec = spec_of(self.param)
        if not isinstance(value, DTensor):
            value = distribute_tensor(value, spec.mesh, spec.placements, src_data_rank=None)
        elif value.placements != spec.placements:
            value = value.redistribute(placements=spec.placements)
        return local_of(value)

    def shown(self, local: torch.Tensor) -> torch.Tensor:
        """A state's local value as users and checkpoints see it."""
        if not isinstance(self.param, DTensor):
            return local
        return dtensor(local, _spec_in(spec_of(self.param), local.dtype))


def _spec_in(spec: Spec, dtype: torch.dtype) -> Spec:
    return dtensor_spec(spec.mesh, spec.placements, spec.shape, spec.stride, dtype)


class FlatRun:
    """Parameters stepped as one tensor."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        first = members[0]
        if first.unit is None:
            # In no unit: a parameter on its own, in its own shape.
            self.tensor = first.local
        else:
            itemsize, start_bytes = first.local.itemsize, first.start_bytes
            for member in members:
                member.start = (member.start_bytes - start_bytes) // itemsize
            # Not the end of the last: one without elements may stand where another begins.
            numel = max(member.start + member.local.numel() for member in members)
            self.tensor = alias(first.unit.buffers.shards, start_bytes, numel, first.local.dtype)
        self._shown: State = {}

    @property
    def is_as_it_is(self) -> bool:
        """Whether it is a plain parameter, stepped as it is."""
        return self.tensor is self.members[0].param

    def holds(self, states: States) -> bool:
        """Whether nobody replaced a parameter, its local tensor or its state since the run was made."""
        if self.is_as_it_is:
            return True
        for member in self.members:
            param, slot = member.param, member.slot
            if (
                not member.is_in_place()
                or (slot is not None and slot.sharded is not param)
                or states.get(param) is not member.state
            ):
                return False
        return True

    # --- gradients ------------------------------------------------------------------------------------------------

    def local_gradients(self) -> list[torch.Tensor | None]:
        gradients: list[torch.Tensor | None] = []
        for member in self.members:
            gradient = member.param.grad
            if gradient is None:
                gradients.append(None)
            elif isinstance(gradient, DTensor):
                if member.unit is None and isinstance(member.param, DTensor):
                    placements = member.param.placements
                    if gradient.placements != placements:
                        gradient = gradient.redistribute(placements=placements)
                gradients.append(local_of(gradient))
            else:
                gradients.append(gradient)
        return gradients

    def split(self, has_gradient: list[bool]) -> list[FlatRun]:
        """Neighbours that have a gradient, or have none, in a run each."""
        parts: list[list[Member]] = []
        for index, member in enumerate(self.members):
            if index and has_gradient[index] == has_gradient[index - 1]:
                parts[-1].append(member)
            else:
                parts.append([member])
        return [FlatRun(part) for part in parts]

    def take(self, gradients: list[torch.Tensor]) -> None:
        """Gives the run's tensor its gradient: the memory that the members' already lie in, or a copy."""
        if self.is_as_it_is:
            return
        tensor = self.tensor
        if self.members[0].unit is None:
            tensor.grad = gradients[0]
        elif _lie_alike(self.members, gradients, tensor):
            tensor.grad = gradients[0].as_strided(tensor.shape, (1,), gradients[0].storage_offset())
        else:
            together = torch.zeros_like(tensor)
            copy_all(
                [
                    together[member.start : member.start + member.local.numel()].view(member.local.shape)
                    for member in self.members
                ],
                gradients,
            )
            tensor.grad = together

    def drop_gradient(self) -> None:
        # The engine frees the memory of gradients when nobody but itself has them.
        if not self.is_as_it_is:
            self.tensor.grad = None

    # --- state ----------------------------------------------------------------------------------------------------

    def adopt_state(self, states: States, own: States) -> None:
        """Makes the run's state out of its members'; theirs is then part of it."""
        for member in self.members:
            member.state = states.get(member.param)
        given = self.members[0].state
        if given is None:
            return
        if self.is_as_it_is:
            own[self.tensor] = given
            return
        made: State = {}
        for key, value in given.items():
            if not _is_of_elements(value):
                made[key] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            parts = []
            for member in self.members:
                assert member.state is not None
                parts.append(member.local_part(member.state[key]))
            if self.members[0].unit is None:
                made[key] = parts[0]
                continue
            together = torch.zeros_like(self.tensor, dtype=parts[0].dtype)
            copy_all(
                [
                    together[member.start : member.start + member.local.numel()].view(member.local.shape)
                    for member in self.members
                ],
                parts,
            )
            made[key] = together
        own[self.tensor] = made
        self._shown = {}
        self.show_state(states, own)

    def show_state(self, states: States, own: States) -> None:
        """Shows each member its part of what the optimizer has made, after a step that made something."""
        state = own.get(self.tensor)
        if state is None:
            return
        if self.is_as_it_is:
            states[self.tensor] = state
            return
        shown = self._shown
        if len(shown) == len(state) and all(shown.get(key) is value for key, value in state.items()):
            return
        self._shown = dict(state)
        for member in self.members:
            member.state = states.setdefault(member.param, {})
            member.state.clear()
            for key, value in state.items():
                member.state[key] = self._part(member, value)

    def _part(self, member: Member, value: Any) -> Any:
        if not _is_of_elements(value):
            return value
        if member.unit is None:
            return member.shown(value)
        local = member.local
        part = alias(value.view(torch.uint8), member.start * value.itemsize, local.numel(), value.dtype)
        return member.shown(part.view(local.shape))


def _lie_alike(members: list[Member], gradients: list[torch.Tensor], tensor: torch.Tensor) -> bool:
    """Whether the gradients lie in one piece of memory as the shards do."""
    first, itemsize = gradients[0], tensor.itemsize
    begin, dtype = first.data_ptr(), tensor.dtype
    if first.numel() == 0 and tensor.numel():
        return False
    for member, gradient in zip(members, gradients, strict=True):
        if gradient.dtype is not dtype or not gradient.is_contiguous():
            return False
        if gradient.data_ptr() != begin + member.start * itemsize and gradient.numel():
            return False
    # What lies between them belongs to the same memory, so it is padding.
    end_bytes = (first.storage_offset() + tensor.numel()) * itemsize
    return bool(end_bytes <= first.untyped_storage().nbytes())


def _is_of_elements(value: Any) -> bool:
    """Whether a state's value has an element for each of the parameter's; others are counts and the like."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


# --- making runs ------------------------------------------------------------------------------------------------------


def make_runs(params: list[torch.Tensor], states: States, bridges_padding: bool) -> list[FlatRun]:
    """The fewest runs for one parameter group."""
    alone: list[Member] = []
    by_unit: dict[Unit, list[Member]] = {}
    for param in params:
        member = _member(param)
        if not param.numel() and not isinstance(param, DTensor):
            # Of a flat unit, and all of it on other ranks: it gets no gradient here.
            continue
        if member.unit is None:
            alone.append(member)
        else:
            by_unit.setdefault(member.unit, []).append(member)
    runs = [FlatRun([member]) for member in alone]
    for unit, members in by_unit.items():
        runs += [FlatRun(together) for together in _neighbours(unit, members, states, bridges_padding)]
    return runs


def _member(param: torch.Tensor) -> Member:
    found = membership(param)
    if found is not None:
        unit, slot = found
        is_taken = slot.sharded is param and unit.has_memory and slot in unit.buffers.starts_bytes
        if is_taken and _lies_in(slot, param):
            return Member(param, unit, slot)
    return Member(param, None, None)


def _lies_in(slot: Slot, param: torch.Tensor) -> bool:
    """Whether the parameter is over its part of the unit's shards, and nobody has moved it."""
    if isinstance(param, DTensor):
        return bool(local_of(param) is slot.local)
    return param.numel() == 0 or param.data_ptr() == slot.local.data_ptr()


def _neighbours(
    unit: Unit, members: list[Member], states: States, bridges_padding: bool
) -> Iterator[list[Member]]:
    places = {slot: place for place, slot in enumerate(unit.buffers.starts_bytes)}
    members.sort(key=lambda member: places[member.slot])  # type: ignore[index]
    run: list[Member] = []
    for member in members:
        if run:
            last = run[-1]
            joins = (
                places[member.slot] == places[last.slot] + 1  # type: ignore[index]
                and member.local.dtype == last.local.dtype
                and (bridges_padding or member.start_bytes == last.end_bytes)
                and _same_history(states.get(member.param), states.get(last.param))
            )
            if not joins:
                yield run
                run = []
        run.append(member)
    if run:
        yield run


def _same_history(one: State | None, other: State | None) -> bool:
    """Whether two parameters' states differ in their elements alone."""
    if not one or not other:
        return not one and not other
    if one.keys() != other.keys():
        return False
    for key, value in one.items():
        against = other[key]
        if value is against:
            continue
        if _is_of_elements(value) or _is_of_elements(against):
            if not (_is_of_elements(value) and _is_of_elements(against) and value.dtype == against.dtype):
                return False
        elif value != against:
            return False
    return True
