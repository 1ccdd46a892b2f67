"""The flat form: parameters laid end to end and cut evenly over ranks. The wrapper's units have it.

While sharded, modules show this rank's elements in one of two ways:

    original names    each name shows the rank's elements of that parameter, as one dim, perhaps none
    flat parameters   one parameter holds the rank's shard of each line; the original names show nothing

Unsharded, modules show each full parameter under its own name, and no flat parameter.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comm.mesh import DataMesh
from shardwise.engine.buffers import GradientView, alias, contiguous_strides
from shardwise.engine.unit.binding import FoundParameter, ShownEntry, Slot
from shardwise.engine.unit.dtensor_form import gradient_views_by_slot, placed_on_both
from shardwise.errors import StateError
from shardwise.planning.flat import FlatLayout, FlatPacking, grid_of, plan_flat
from shardwise.planning.layout import Layout, Packing, RowParam, Span
from shardwise.policies import MixedPrecisionPolicy
from shardwise.torch_internals import Spec, dtensor_spec, local_of, local_part, parameters_of, spec_of

FLAT_NAME = "_flat_param"


class Line:
    """Parameters of one dtype, all trained or all frozen, laid end to end; with their flat parameter, if any."""

    def __init__(self, kind: Hashable, is_whole: bool) -> None:
        self.kind = kind
        self.is_whole = is_whole
        self.slots: list[FlatSlot] = []
        self.name = FLAT_NAME
        self.flat: nn.Parameter | None = None
        self.flat_numel = 0
        # This rank's shard of the line, in the unit's buffer.
        self.share: torch.Tensor
        self.params: dict[str, nn.Parameter | None] = {}
        self.address = 0

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.slots[0].stored_dtype


class FlatSlot(Slot):
    """One parameter of a line. This rank's shard of it is ``span``, at ``start`` in the rank's shard of the line.

    With tensor parallelism that is a shard of this rank's part of the parameter. ``spec`` then says where all parts
    are, if each is cut along its first dim, as in sharded state dicts.
    """

    __slots__ = ("_placement", "line", "span", "start")

    def __init__(
        self,
        found: FoundParameter,
        compute_dtype: torch.dtype,
        is_cast: bool,
        line: Line,
        span: Span,
        start: int,
        sharded: nn.Parameter,
    ) -> None:
        param = local_part(found.param)
        self.name = found.name
        self.places = found.places
        self.dim = 0
        self.shape = tuple(param.shape)
        self.stored_dtype = param.dtype
        self.compute_dtype = compute_dtype
        self.is_cast = is_cast
        self.sharded = sharded
        self.local = param.detach().reshape(-1)[span.start : span.stop]
        self.unsharded = sharded
        self.data_axes = ()
        self._placement = spec_of(found.param) if isinstance(found.param, DTensor) else None
        self.stash = None
        self.is_shown = line.flat is None
        self.line = line
        self.span = span
        self.start = start
        line.slots.append(self)

    @property
    def tensor_parallel(self) -> Spec | None:  # type: ignore[override]
        return self.placement(self.compute_dtype)

    def placement(self, dtype: torch.dtype) -> Spec | None:
        """How tensor parallelism places a tensor of this dtype that is shaped like the parameter."""
        placed = self._placement
        if placed is None:
            return None
        return dtensor_spec(placed.mesh, placed.placements, placed.shape, placed.stride, dtype)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the parameter; with tensor parallelism, ``shape`` is that of this rank's part."""
        return self.shape if self._placement is None else tuple(self._placement.shape)

    @property
    def shown_shape(self) -> tuple[int, ...]:
        """The shape under which the shard is shown: one dim, or the full shape in a world of one."""
        return self.shape if self.line.is_whole else (self.span.numel,)

    @property
    def kind(self) -> Hashable:
        # Fixed: cuts must not move when dtypes change or parameters are frozen later.
        return self.line.kind

    @property
    def description(self) -> str:
        return f"{list(self.shape)} {self.stored_dtype} sharded flat, computed in {self.compute_dtype}"

    def move_into(self, part: torch.Tensor) -> None:
        part.copy_(self.local)
        self.local = part
        if self.line.flat is None:
            self.sharded.data = part.view(self.shown_shape)

    def gradient(self, local: torch.Tensor) -> torch.Tensor:
        return local

    def found(self) -> nn.Parameter | None:
        return super().found() if self.line.flat is None else self.line.params.get(self.line.name)

    def fits(self, param: nn.Parameter) -> bool:
        # Not the shape of ``sharded``, which ``.data = ...`` may have changed.
        return tuple(param.shape) == self._fitting_shape

    @property
    def wanted(self) -> str:
        return f"a plain tensor of shape {self._fitting_shape}"

    @property
    def _fitting_shape(self) -> tuple[int, ...]:
        return self.shown_shape if self.line.flat is None else (self.line.flat_numel,)

    def adopt(self, param: nn.Parameter) -> None:
        if self.sharded is not param:
            self.stash = None
        self.sharded = param
        whole = param.detach().reshape(-1)
        self.local = whole if self.line.flat is None else whole[self.start : self.start + self.span.numel]
        if not self.is_cast:
            self.compute_dtype = param.dtype
        self.stored_dtype = param.dtype
        if self.line.flat is not None:
            self.line.flat = param

    def version(self) -> int:
        # ``.data = ...`` does not raise the version, but changes the address.
        return self.sharded._version + self.sharded.data_ptr()


def _shown_parameter(param: nn.Parameter) -> nn.Parameter:
    """The parameter that shows the shard under the original name: the same object, unless that is a DTensor."""
    if not isinstance(param, DTensor):
        return param
    shown = nn.Parameter(local_of(param).detach(), param.requires_grad)
    vars(shown).update(vars(param))
    return shown


def _spec_of_parts(param: DTensor, mesh: DataMesh) -> Spec:
    if mesh.shard.world == 1:
        return spec_of(param)
    both, placements = placed_on_both(param, 0, mesh, ())
    return dtensor_spec(both, placements, param.shape, contiguous_strides(tuple(param.shape)), param.dtype)


class FlatForm:
    """The form of ``FullyShardedDataParallel``.

    ``holder`` is the module that shows flat parameters; with None, original names show shards.
    """

    lends_gradients = False
    uses_whole_shards = True
    sees_all_writes = False
    are_written_together = True
    hides_kept = True

    def __init__(
        self, holder: nn.Module | None, as_stored: Sequence[nn.Module] = (), keeps_reduced: bool = False
    ) -> None:
        self._holder = holder
        # Modules that compute in the stored dtype, whatever the policy says.
        self._as_stored = set(as_stored)
        # Whether gradients keep the dtype they were reduced in.
        self._keeps_reduced = keeps_reduced
        self._numbers: dict[Slot, int] = {}
        # By kind of parameter: what cuts are multiples of, whatever becomes of the dtypes.
        self._grids: dict[Hashable, int] = {}
        self.layout: FlatLayout
        self.lines: list[Line] = []

    def make_slots(
        self,
        found: list[FoundParameter],
        mesh: DataMesh,
        precision: MixedPrecisionPolicy,
        device: torch.device,
        where: str,
    ) -> list[Slot]:
        lines: dict[Hashable, Line] = {}
        params, dtypes = [], []
        for each in found:
            given = self._given_dtype(each, precision)
            dtype, shape = given or each.param.dtype, tuple(local_part(each.param).shape)
            kind = (each.param.dtype, dtype, given is not None, each.param.requires_grad)
            lines.setdefault(kind, Line(kind, is_whole=mesh.shard.world == 1))
            dtypes.append(given)
            params.append(RowParam(shape, 0, kind, each.param.dtype.itemsize, dtype.itemsize))
        self._grids = {param.kind: grid_of(param.sent_itemsize) for param in params}
        rank, layout = mesh.shard.rank, plan_flat(params, mesh.shard.world, self._grids)
        self.lines = list(lines.values())
        for number, (line, segment) in enumerate(zip(self.lines, layout.segments, strict=True)):
            if self._holder is not None:
                first = found[segment.members[0]].param
                line.name = FLAT_NAME if number == 0 else f"{FLAT_NAME}_{number}"
                line.params = parameters_of(self._holder)
                line.flat_numel = segment.numel
                line.flat = nn.Parameter(
                    torch.zeros(segment.numel, dtype=first.dtype, device=device),
                    requires_grad=first.requires_grad,
                )
        slots: list[Slot] = []
        for index, (each, given) in enumerate(zip(found, dtypes, strict=True)):
            line = lines[params[index].kind]
            sharded = _shown_parameter(each.param) if line.flat is None else line.flat
            span, start = layout.shard_span(index, rank), layout.shard_start(index, rank)
            dtype, is_cast = given or each.param.dtype, given is not None
            slot = FlatSlot(each, dtype, is_cast, line, span, start, sharded)
            if isinstance(each.param, DTensor):
                slot.spec = _spec_of_parts(each.param, mesh)
            slots.append(slot)
            each.param.grad = None
        self._numbers = {slot: index for index, slot in enumerate(slots)}
        return slots

    def _given_dtype(self, found: FoundParameter, precision: MixedPrecisionPolicy) -> torch.dtype | None:
        """Returns the compute dtype that the policy sets for a parameter; None for the stored dtype."""
        casts = found.param.is_floating_point() and not any(
            place.module in self._as_stored for place in found.places
        )
        return precision.param_dtype if casts else None

    def plan(self, params: list[RowParam], world: int) -> Layout:
        self.layout = plan_flat(params, world, self._grids)
        return self.layout

    def bind_shards(self, shards: torch.Tensor, layout: Layout) -> None:
        for line, segment in zip(self.lines, layout.segments, strict=True):
            line.share = alias(shards, segment.stored_start_bytes, segment.numel, line.stored_dtype)
            if line.flat is not None:
                line.flat.data = line.share
                line.address = line.flat.data_ptr()
                line.params[line.name] = line.flat

    def packing(self, slots: list[Slot], world: int, itemsize: int) -> Packing:
        return FlatPacking(self.layout, [self._numbers[slot] for slot in slots])

    def gradient_views(self, slots: list[Slot], packing: Packing, rank: int) -> list[GradientView]:
        if self._holder is None:
            return [
                replace(
                    part,
                    shape=slot.shown_shape,
                    strides=contiguous_strides(slot.shown_shape),
                    # As torch does; but a parameter without any elements is trained like any other.
                    is_none=slot.span.numel == 0 and 0 not in slot.shape,
                )
                for part, slot in zip(gradient_views_by_slot(slots, packing, rank), slots, strict=True)
                if isinstance(slot, FlatSlot)
            ]
        return [
            GradientView(
                slots[section.members[0]], run, 0, (section.numel,), (1,), section.members, is_segment=True
            )
            for run, section in enumerate(packing.segments)
        ]

    def gradient_dtype(self, slot: Slot, reduce_dtype: torch.dtype) -> torch.dtype:
        if not self._keeps_reduced or slot.stored_dtype == reduce_dtype:
            return slot.stored_dtype
        assert isinstance(slot, FlatSlot)
        for member in slot.line.slots:
            # Otherwise torch refuses a gradient of another dtype than the parameter's.
            member.sharded.grad_dtype = reduce_dtype
        return reduce_dtype

    def flat_entries(self) -> list[ShownEntry]:
        return [(line.params, line.name, line.flat) for line in self.lines if line.flat is not None]

    def snapshot(self, slots: list[Slot]) -> list[Any]:
        # Dtypes and addresses that the unit knows of, not those that a parameter has now.
        shown: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None, int, torch.dtype]]
        if self._holder is not None:
            shown = [
                (line.params, line.name, line.flat, line.address, line.stored_dtype) for line in self.lines
            ]
        else:
            shown = [
                (place.params, place.name, slot.sharded, slot.local.data_ptr(), slot.stored_dtype)
                for slot in slots
                for place in slot.places
            ]
        return [
            (params, name, param, address, dtype, param.requires_grad)
            for params, name, param, address, dtype in shown
            if param is not None
        ]

    def all_show(self, snapshot: Any) -> bool:
        for params, name, param, address, dtype, trainable in snapshot:
            if (
                params.get(name) is not param
                or param.data_ptr() != address
                or param.dtype is not dtype
                or param.requires_grad is not trainable
            ):
                return False
        return True

    def named(self, slots: list[Slot], shown: Container[int]) -> list[Slot]:
        # Cuts must not move: slots without names stay in the line, unused.
        return slots

    def found(self, slots: list[Slot], where: str) -> list[nn.Parameter | None]:
        found = [slot.found() for slot in slots]
        if self._holder is not None:
            return found
        for line in self.lines:
            named = {
                param.dtype: slot.name
                for slot, param in zip(slots, found, strict=True)
                if slot in line.slots and slot.places and param is not None
            }
            if len(named) > 1:
                raise StateError(
                    f"parameters were given different dtypes, {named}, but lie in one flat buffer",
                    where=where,
                    fix="convert the whole wrapped module, or wrap what has a dtype of its own by itself",
                )
            for dtype in named:
                for index, slot in enumerate(slots):
                    if slot in line.slots and not slot.places and slot.sharded.dtype is not dtype:
                        # Nobody converts what has lost its names, but it stays in the buffer of the others.
                        found[index] = nn.Parameter(slot.sharded.detach().to(dtype))
        return found

    def own_part(self, slot: Slot, whole: torch.Tensor, mesh: DataMesh) -> torch.Tensor | None:
        assert isinstance(slot, FlatSlot)
        return whole.detach().reshape(-1)[slot.span.start : slot.span.stop]
