"""Reducing a unit's gradients: from full gradients on every rank to averaged shards.

    full gradients ──pack (cast, pad)──▶ rows for all ranks ──one reduce-scatter──▶ own row ──▶ gradients of shards
                                                                                      │
                                            with replicas: ──all-reduce over them─────┘

Packing, summing and dividing run on the reduce lane, the replicas' sum on a lane of its own. The own row, cast to the
parameters' dtypes where that differs, *is* the gradient buffer: the shards' gradients are views of it.

Which parameters take part is decided by ``requires_grad``, so a rank always sends the same sizes as its peers; a
parameter without a gradient this time sends zeros and receives nothing. Rows that would take very much memory are
packed and reduced slice by slice, through the memory of one. All of this is decided here, once for a set of trainable
parameters; a reduce that is under way is told in ``engine/reduce/reduce_in_flight``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwise.comm.collectives.custom import HookedCollectives
from shardwise.comm.collectives.group import AllReduceHook, GroupCollectives
from shardwise.comm.mesh import DataMesh
from shardwise.comm.streams import SideStreams
from shardwise.engine.reduce.gradient_buffer import GradientBuffer, GradientView
from shardwise.engine.reduce.pack import plan_slices
from shardwise.engine.reduce.reduce_in_flight import PartialSum, ReduceInFlight
from shardwise.engine.unit.binding import Slot
from shardwise.engine.unit.dtensor_form import ShardedForm
from shardwise.plan.sums import Division, plan_division
from shardwise.policies import MixedPrecisionPolicy


@dataclass
class ReduceSettings:
    """What users set about a unit's reduce; read when one is issued."""

    calls: GroupCollectives
    divide_factor: float | None = None
    sums_only: bool = False
    all_reduces: bool = True
    includes_unused: bool = False
    # In the place of the mesh's own, to sum over replicas with.
    replicate_calls: GroupCollectives | None = None
    hook: AllReduceHook | None = None
    hook_stream: torch.cuda.Stream | None = None
    # Told when a unit's gradients have been given out, with what to wait for before the host reads them.
    listener: Callable[[Callable[[], None]], None] | None = None

    is_hooked: bool = False

    def use_hook(
        self,
        shard: GroupCollectives,
        replicate: GroupCollectives | None,
        state: object,
        hook: Callable[..., object],
    ) -> None:
        """Lets a user's function do the reduce, and the division with it."""
        self.is_hooked = True
        self.divide_factor, self.sums_only = 1.0, True
        if replicate is None:
            self.calls = HookedCollectives(shard, state, hook)
        else:
            self.replicate_calls = HookedCollectives(replicate, state, hook)


class Summation:
    """How a unit's gradients are summed up: this is how by default, in the order that each group likes best."""

    is_exact = False

    def settings(self, mesh: DataMesh) -> ReduceSettings:
        return ReduceSettings(mesh.shard)

    def plan(
        self,
        slots: list[Slot],
        form: ShardedForm,
        mesh: DataMesh,
        precision: MixedPrecisionPolicy,
        shard_device: torch.device,
        pins: bool,
    ) -> ReducePlan:
        """The reduce of these slots, in one dtype: the policy's, or the one that holds all gradients without loss."""
        dtype = precision.reduce_dtype or computed_dtype(slots)
        return ReducePlan(slots, form, mesh, dtype, shard_device, pins)


DEFAULT_SUMMATION = Summation()


def computed_dtype(slots: list[Slot]) -> torch.dtype:
    """The dtype that holds the gradients of all these slots without loss."""
    dtype = slots[0].compute_dtype
    for slot in slots[1:]:
        dtype = torch.promote_types(dtype, slot.compute_dtype)
    return dtype


class _DtypeRun(NamedTuple):
    """Neighbours in the own row whose shards have one dtype."""

    dtype: torch.dtype
    start: int
    numel: int


def _numels_end_to_end(parts: list[GradientView], runs: list[_DtypeRun]) -> list[int] | None:
    """The lengths to cut the one run into, if parts lie there end to end; the last may be of padding."""
    end = 0
    numels = []
    for part in parts:
        if part.is_run or part.start != end or len(part.shape) != 1:
            return None
        numels.append(part.shape[0])
        end += part.shape[0]
    if len(runs) > 1:
        return None
    return numels if end == runs[0].numel else [*numels, runs[0].numel - end]


class ReducePlan:
    """The reduce of one set of trainable slots, decided beforehand."""

    def __init__(
        self,
        slots: list[Slot],
        form: ShardedForm,
        mesh: DataMesh,
        reduce_dtype: torch.dtype,
        shard_device: torch.device,
        pins: bool,
        sum_dtype: torch.dtype | None = None,
    ) -> None:
        self.slots = slots
        self.params = [slot.unsharded for slot in slots]
        self.mesh = mesh
        # What rows travel in, and what they are summed in.
        self.dtype = reduce_dtype
        self.sum_dtype = sum_dtype or reduce_dtype
        # Whether this backward has reduced before: parts of a unit may come in one after another.
        self.is_again = False
        self.shard_device = shard_device
        self.pins = pins
        itemsize = reduce_dtype.itemsize
        packing = form.packing(slots, mesh.shard.world, itemsize)
        self.row_numel = packing.row_numel
        self.rows, self.slices = plan_slices(
            packing,
            reduce_dtype,
            mesh.device,
            [slot.shape for slot in slots],
            [slot.gradient_dtype for slot in slots],
        )

        self.runs = [
            _DtypeRun(
                form.gradient_dtype(slots[section.members[0]], reduce_dtype), section.start, section.numel
            )
            for section in packing.segments
        ]
        self.parts = form.parts(slots, packing, mesh.shard.rank)
        given = [part for part in self.parts if not part.is_none]
        self.num_given = len(given)
        self.part_numels = _numels_end_to_end(given, self.runs)
        # The own row serves as the gradient buffer as it is.
        self.is_one_run = (
            len(self.runs) == 1 and self.runs[0].dtype == self.sum_dtype and shard_device == mesh.device
        )
        self._lends = self.is_one_run and form.lends_gradients
        # Whose rows are in the buffer now.
        self.filled_by: ReduceInFlight | None = None
        # Kept while the all-reduce is put off.
        self.partial: PartialSum | None = None
        self._buffer: GradientBuffer | None = None
        # What this reduce is called, for each set of gradients that came.
        self.codes: dict[object, tuple[int, int]] = {}
        self._divisions: dict[tuple[float | None, bool], Division] = {}

    def begin(self, settings: ReduceSettings, streams: SideStreams, codes: tuple[int, int]) -> ReduceInFlight:
        return ReduceInFlight(self, settings, streams, codes)

    @property
    def is_offloaded(self) -> bool:
        return self.shard_device != self.mesh.device

    def buffer_to_fill(self) -> GradientBuffer | None:
        """The gradient buffer, if a reduce may write to it: not while it is lent out."""
        if not self._lends:
            return None
        if self._buffer is not None and self._buffer.is_lent:
            return None
        if self._buffer is None or not self._buffer.is_own():
            self._buffer = GradientBuffer(self.parts, self.row_numel, self.dtype, self.mesh.device)
        return self._buffer

    @property
    def lent(self) -> GradientBuffer | None:
        """The gradient buffer, if all of the parameters' gradients lie there."""
        buffer = self._buffer
        return buffer if buffer is not None and buffer.is_all_lent else None

    def division(self, settings: ReduceSettings) -> Division:
        key = (settings.divide_factor, settings.sums_only)
        if key not in self._divisions:
            replicate = self.mesh.replicate
            groups = [settings.calls] if replicate is None else [settings.calls, replicate]
            world = self.mesh.shard.world * (1 if replicate is None else replicate.world)
            averages = not settings.sums_only and all(calls.averages for calls in groups)
            self._divisions[key] = plan_division(
                world, self.sum_dtype == torch.float16, averages, settings.divide_factor
            )
        return self._divisions[key]
