"""Flat runs: neighbours in a unit's shards that ``flat`` steps as one tensor.

    shards of a unit   | a a a a | b b | . | c c c c c c | d d |        '.' is padding
    gradients          | a a a a | b b | . | c c c c c c | d d |
    run                |◀──────────── one tensor ─────────────▶|

Members of a run have the same parameter group, dtype and history (the same step count), and in each step either all
of them or none have a gradient. A run that breaks this rule is split and stays split. A parameter of no unit is a run
of its own.

The authoritative state is per parameter, in the optimizer's ``state``: DTensors (or tensors) that are views of the
run's state. Runs can be remade from it at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.engine.buffers import alias, contiguous_strides
from shardwise.engine.unit.binding import Slot
from shardwise.engine.unit.membership import membership
from shardwise.engine.unit.unit import Unit
from shardwise.errors import StateError
from shardwise.optim.joined_step import State, have_same_history
from shardwise.optim.quantized_states import QuantizedStates, is_quantized
from shardwise.planning.layout import ceil_div
from shardwise.torch_internals import copy_all, dtensor, dtensor_spec, leaves_of, local_of, spec_of

States = dict[torch.Tensor, State]


class Member:
    """A parameter of a run; ``start`` counts elements from the beginning of the run.

    ``rows_together`` is given for a class that steps bands of that many rows, whose state may count rows or bands.
    """

    __slots__ = (
        "_address",
        "_is_dtensor",
        "_rows_together",
        "local",
        "param",
        "slot",
        "start",
        "state",
        "unit",
    )

    def __init__(
        self, param: torch.Tensor, unit: Unit | None, slot: Slot | None, rows_together: int | None = None
    ) -> None:
        self.param = param
        self._rows_together = rows_together
        self.unit = unit
        self.slot = slot
        self._is_dtensor = isinstance(param, DTensor)
        self.local = local_of(param) if self._is_dtensor else param
        self._address = 0 if self._is_dtensor else param.data_ptr()
        self.start = 0
        self.state: State | None = None

    def is_in_place(self) -> bool:
        """Whether the parameter still uses the memory it had when the run was made."""
        if self._is_dtensor:
            return local_of(self.param) is self.local
        return self.param.data_ptr() == self._address

    @property
    def start_bytes(self) -> int:
        """The offset of its shard in the unit's buffer of shards."""
        assert self.unit is not None
        assert self.slot is not None
        return self.unit.buffers.starts_bytes[self.slot]

    @property
    def end_bytes(self) -> int:
        return self.start_bytes + self.local.numel() * self.local.itemsize

    def local_part(self, value: torch.Tensor) -> torch.Tensor:
        """Returns this rank's shard of a state value, which may be sharded in any way or a full tensor."""
        if not isinstance(self.param, DTensor):
            return value
        spec = spec_of(self.param)
        if not isinstance(value, DTensor):
            value = distribute_tensor(value, spec.mesh, spec.placements, src_data_rank=None)
        elif value.placements != spec.placements:
            value = value.redistribute(placements=spec.placements)
        return local_of(value)

    def as_param(self, local: torch.Tensor) -> torch.Tensor:
        """Returns a state value as a tensor of the parameter's kind, for users and checkpoints."""
        if not isinstance(self.param, DTensor):
            return local
        spec = spec_of(self.param)
        shape, stride = spec.shape, spec.stride
        if self._rows_together is not None:
            shape = torch.Size((self._num_rows(local), *local.shape[1:]))
            stride = contiguous_strides(shape)
        return dtensor(local, dtensor_spec(spec.mesh, spec.placements, shape, stride, local.dtype))

    def _num_rows(self, local: torch.Tensor) -> int:
        """How many rows a state has on all ranks: as many as the parameter has rows, or bands of rows."""
        assert self._rows_together is not None
        num_rows, own_rows = self.param.shape[0], self.local.shape[0]
        if local.shape[0] == own_rows:
            return num_rows
        if local.shape[0] == ceil_div(own_rows, self._rows_together):
            return ceil_div(num_rows, self._rows_together)
        raise _not_banded(
            f"a tensor of state has shape {tuple(local.shape)} for {own_rows} rows of a parameter: its first dim "
            f"counts neither rows nor blocks of {self._rows_together}"
        )

    def check_whole(self, value: Any) -> None:
        """Raises if a state value that every rank keeps for itself has tensors in it that depend on its rows."""
        if self._rows_together is not None and any(map(_is_per_element, leaves_of(value))):
            raise _not_banded(f"a state value is a {type(value).__name__} with tensors in it")


class FlatRun:
    """Parameters stepped as one tensor; ``quantized`` is given for a class that quantizes its state in blocks."""

    def __init__(self, members: list[Member], quantized: QuantizedStates | None = None) -> None:
        self.members = members
        self._quantized = quantized
        first = members[0]
        if first.unit is None:
            # In no unit: a single parameter, in its own shape.
            self.tensor = first.local
        else:
            # An empty member lies anywhere, also before a parameter of another run.
            itemsize = first.local.itemsize
            start_bytes = min((member.start_bytes for member in members if member.local.numel()), default=0)
            for member in members:
                is_empty = not member.local.numel()
                member.start = 0 if is_empty else (member.start_bytes - start_bytes) // itemsize
            numel = max(member.start + member.local.numel() for member in members)
            self.tensor = alias(first.unit.buffers.shards, start_bytes, numel, first.local.dtype)
        self._published: State = {}

    @property
    def is_plain_param(self) -> bool:
        """Whether the run's tensor is the parameter itself, neither sharded nor in a unit."""
        return self.tensor is self.members[0].param

    def holds(self, states: States) -> bool:
        """Whether the run is still valid: no parameter, local tensor or state was replaced since it was made."""
        if self.is_plain_param:
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
        """Returns one run for each stretch of members that all have a gradient or all have none."""
        parts: list[list[Member]] = []
        for index, member in enumerate(self.members):
            if index and has_gradient[index] == has_gradient[index - 1]:
                parts[-1].append(member)
            else:
                parts.append([member])
        return [FlatRun(part, self._quantized) for part in parts]

    def set_gradient(self, gradients: list[torch.Tensor]) -> None:
        """Sets the run's gradient: a view of the members' gradients if they are laid out like it, else a copy."""
        if self.is_plain_param:
            return
        tensor = self.tensor
        if self.members[0].unit is None:
            tensor.grad = gradients[0]
        elif _are_laid_out_alike(self.members, gradients, tensor):
            tensor.grad = gradients[0].as_strided(tensor.shape, (1,), gradients[0].storage_offset())
        else:
            tensor.grad = torch.zeros_like(tensor)
            copy_all(self._views_of(tensor.grad), gradients)

    def _views_of(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Returns each member's part of a tensor that is laid out like the run's."""
        return [
            value[member.start : member.start + member.local.numel()].view(member.local.shape)
            for member in self.members
        ]

    def drop_gradient(self) -> None:
        # The engine frees gradients once it holds the last reference.
        if not self.is_plain_param:
            self.tensor.grad = None

    # --- state ----------------------------------------------------------------------------------------------------

    def adopt_state(self, states: States, own: States) -> None:
        """Makes the run's state from its members'; theirs become views of it."""
        for member in self.members:
            member.state = states.get(member.param)
        given = self.members[0].state
        if given is None:
            return
        if self.is_plain_param:
            own[self.tensor] = given
            return
        made: State = {}
        for key, value in given.items():
            if not _is_per_element(value):
                made[key] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            parts = []
            for member in self.members:
                assert member.state is not None
                parts.append(member.local_part(member.state[key]))
            if self.members[0].unit is None:
                made[key] = parts[0]
            elif self._quantized is not None and is_quantized(parts[0]):
                members = self.members
                given_parts = [
                    (part, member.param, member.start) for part, member in zip(parts, members, strict=True)
                ]
                made[key] = self._quantized.joined(self.tensor, given_parts)
            else:
                made[key] = torch.zeros_like(self.tensor, dtype=parts[0].dtype)
                copy_all(self._views_of(made[key]), parts)
        own[self.tensor] = made
        self._published = {}
        self.publish_state(states, own)

    def publish_state(self, states: States, own: States) -> None:
        """Gives each member its view of the run's state, if a step has replaced or added any."""
        state = own.get(self.tensor)
        if state is None:
            return
        if self.is_plain_param:
            states[self.tensor] = state
            return
        published = self._published
        if len(published) == len(state) and all(published.get(key) is value for key, value in state.items()):
            return
        self._published = dict(state)
        for member in self.members:
            member.state = states.setdefault(member.param, {})
            member.state.clear()
            for key, value in state.items():
                member.state[key] = self._part(member, value)

    def _part(self, member: Member, value: Any) -> Any:
        if not _is_per_element(value):
            member.check_whole(value)
            return value
        if member.unit is None:
            return member.as_param(value)
        if self._quantized is not None and is_quantized(value):
            return self._quantized.part(value, member.param, member.start)
        local = member.local
        part = alias(value.view(torch.uint8), member.start * value.itemsize, local.numel(), value.dtype)
        return member.as_param(part.view(local.shape))


def _are_laid_out_alike(members: list[Member], gradients: list[torch.Tensor], tensor: torch.Tensor) -> bool:
    """Whether the gradients share one storage, at the same offsets from each other as the shards."""
    first, itemsize = gradients[0], tensor.itemsize
    begin, dtype = first.data_ptr(), tensor.dtype
    if first.numel() == 0 and tensor.numel():
        return False
    for member, gradient in zip(members, gradients, strict=True):
        if gradient.dtype is not dtype or not gradient.is_contiguous():
            return False
        if gradient.data_ptr() != begin + member.start * itemsize and gradient.numel():
            return False
    # Within one storage, what is between the gradients is padding.
    end_bytes = (first.storage_offset() + tensor.numel()) * itemsize
    return bool(end_bytes <= first.untyped_storage().nbytes())


def _not_banded(what: str) -> StateError:
    return StateError(
        what,
        where="an optimizer declared with shardwise.optim.rowwise or blockwise",
        fix="keep tensors with a first dim of rows or blocks directly in the state, or use shardwise.optim.whole",
    )


def _is_per_element(value: Any) -> bool:
    """Whether a state value has an element for each of the parameter's; others are step counts and the like."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


# --- making runs ------------------------------------------------------------------------------------------------------


def make_runs(
    params: list[torch.Tensor],
    states: States,
    bridges_padding: bool,
    rows_together: int | None = None,
    quantized: QuantizedStates | None = None,
) -> list[FlatRun]:
    """Returns the fewest runs that cover one parameter group; with ``rows_together``, each parameter by itself."""
    if rows_together is not None:
        return [FlatRun([Member(param, None, None, rows_together)]) for param in params]
    alone: list[Member] = []
    by_unit: dict[Unit, list[Member]] = {}
    for param in params:
        member = _member(param)
        if not param.numel() and not isinstance(param, DTensor):
            # In a flat unit, all its elements are on other ranks: it gets no gradient here.
            continue
        if member.unit is None:
            alone.append(member)
        else:
            by_unit.setdefault(member.unit, []).append(member)
    runs = [FlatRun([member], quantized) for member in alone]
    for unit, members in by_unit.items():
        for neighbours in _neighbours(unit, members, states, bridges_padding, quantized):
            runs.append(FlatRun(neighbours, quantized))
    return runs


def _member(param: torch.Tensor) -> Member:
    found = membership(param)
    if found is not None:
        unit, slot = found
        is_current = slot.sharded is param and unit.has_memory and slot in unit.buffers.starts_bytes
        if is_current and _is_in_buffer(slot, param):
            return Member(param, unit, slot)
    return Member(param, None, None)


def _is_in_buffer(slot: Slot, param: torch.Tensor) -> bool:
    """Whether the parameter still is a view of the unit's buffer of shards."""
    if isinstance(param, DTensor):
        return bool(local_of(param) is slot.local)
    return param.numel() == 0 or param.data_ptr() == slot.local.data_ptr()


def _neighbours(
    unit: Unit,
    members: list[Member],
    states: States,
    bridges_padding: bool,
    quantized: QuantizedStates | None,
) -> Iterator[list[Member]]:
    """Yields members that can form one run, in the order of the unit's buffer."""
    positions = {slot: position for position, slot in enumerate(unit.buffers.starts_bytes)}
    members.sort(key=lambda member: positions[member.slot])  # type: ignore[index]
    run: list[Member] = []
    for member in members:
        if run:
            last = run[-1]
            joins = (
                positions[member.slot] == positions[last.slot] + 1  # type: ignore[index]
                and member.local.dtype == last.local.dtype
                and (bridges_padding or member.start_bytes == last.end_bytes)
                and (quantized is None or quantized.may_join([each.local for each in run], member.local))
                and have_same_history(states.get(member.param), states.get(last.param))
            )
            if not joins:
                yield run
                run = []
        run.append(member)
    if run:
        yield run
