"""Reduce plans: how a unit's full gradients become averaged gradients of its shards.

    full gradients ──pack (cast, pad)──▶ rows for all ranks ──one reduce-scatter──▶ own row ──▶ gradients of shards
                                                                                      │
                                            with replicas: ──all-reduce over them─────┘

Packing runs on the compute stream, so that backward can reuse the gradients' memory at once; summing and dividing run
on the reduce stream, the all-reduce over replicas on a stream of its own. Rows that fit take the memory of the unit's
full parameters, which backward has just passed, until the reduce has read them. Rows in memory of their own (they are
wider, say) go before the next unit's are allocated: compute waits for their reduce. The own row, cast to the shards'
dtypes where they differ, *is* the gradient buffer: the shards' gradients are views of it.

``requires_grad`` decides which parameters take part, so all ranks send rows of the same size; a parameter without a
gradient sends zeros and receives nothing. Very large rows are packed and reduced slice by slice, on the reduce stream,
through the memory of one slice. All of this is planned here, once per set of trainable parameters;
``reduce_in_flight`` carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from shardwise.comm.collectives.custom import HookedCollectives
from shardwise.comm.collectives.group import AllReduceHook, GroupCollectives
from shardwise.comm.mesh import DataMesh
from shardwise.comm.streams import SideStreams
from shardwise.engine.reduce.gradient_buffer import GradientBuffer, GradientView, Presence
from shardwise.engine.reduce.pack import plan_slices
from shardwise.engine.reduce.reduce_in_flight import PartialSum, ReduceInFlight
from shardwise.engine.unit.binding import Slot
from shardwise.engine.unit.dtensor_form import ShardedForm
from shardwise.engine.unit.settings import ShardHome
from shardwise.planning.layout import Packing
from shardwise.planning.sums import Division, plan_division
from shardwise.policies import MixedPrecisionPolicy


@dataclass
class ReduceSettings:
    """What users set for a unit's reduces; read when one is issued."""

    calls: GroupCollectives
    divide_factor: float | None = None
    sums_only: bool = False
    all_reduces: bool = True
    includes_unused: bool = False
    # Used instead of the mesh's own collectives over replicas.
    replicate_calls: GroupCollectives | None = None
    hook: AllReduceHook | None = None
    hook_stream: torch.cuda.Stream | None = None
    # Called when a unit's gradients have been assigned, with a function that waits until the host may read them, and
    # whether this is the last backward of the step.
    listeners: dict[int, Callable[[Callable[[], None], bool], None]] = field(default_factory=dict)
    # A user's function that reduces, with its state.
    comm_hook: tuple[Callable[..., object], object] | None = None

    def use_hook(
        self,
        shard: GroupCollectives,
        replicate: GroupCollectives | None,
        state: object,
        hook: Callable[..., object],
    ) -> None:
        """Replaces the reduce, including its division, by a user's function."""
        self.comm_hook = (hook, state)
        self.divide_factor, self.sums_only = 1.0, True
        if replicate is None:
            self.calls = HookedCollectives(shard, state, hook)
        else:
            self.replicate_calls = HookedCollectives(replicate, state, hook)


class Summation:
    """How a unit's gradients are summed; by default in whatever order the process group sums."""

    is_exact = False

    def settings(self, mesh: DataMesh) -> ReduceSettings:
        return ReduceSettings(mesh.shard)

    def plan(
        self,
        slots: list[Slot],
        form: ShardedForm,
        mesh: DataMesh,
        precision: MixedPrecisionPolicy,
        home: ShardHome,
    ) -> ReducePlan:
        """Plans the reduce of these slots in one dtype: the policy's, or one that holds all gradients without loss."""
        dtype = precision.reduce_dtype or computed_dtype(slots)
        return ReducePlan(slots, form, mesh, dtype, home)


DEFAULT_SUMMATION = Summation()


def computed_dtype(slots: list[Slot]) -> torch.dtype:
    """A dtype that holds the gradients of all these slots without loss."""
    dtype = slots[0].compute_dtype
    for slot in slots[1:]:
        dtype = torch.promote_types(dtype, slot.compute_dtype)
    return dtype


class _RowSegment(NamedTuple):
    """Neighbours in the own row whose gradients have one dtype."""

    dtype: torch.dtype
    start: int
    numel: int


def _split_sizes(views: list[GradientView], segments: list[_RowSegment]) -> list[int] | None:
    """The sizes that split the only segment into these views, and padding at its end; None if no split does."""
    end = 0
    numels = []
    for view in views:
        if view.is_segment or view.start != end or len(view.shape) != 1:
            return None
        numels.append(view.shape[0])
        end += view.shape[0]
    if len(segments) > 1:
        return None
    return numels if end == segments[0].numel else [*numels, segments[0].numel - end]


class ReduceNames(Protocol):
    """What names a unit's reduces: ``engine/unit/collective_names.CollectiveNames``."""

    def reduce(self, plan: ReducePlan, present: Presence, divide_factor: float | None) -> tuple[int, int]: ...


class ReducePlan:
    """The reduce of one set of trainable slots, planned once."""

    # Whether the memory of gradients may be reused in the next backward.
    _reuses_gradients = True

    # Whether all rows fit into the memory of the unit's full parameters; the unit knows.
    fits_in_full = False

    def __init__(
        self,
        slots: list[Slot],
        form: ShardedForm,
        mesh: DataMesh,
        reduce_dtype: torch.dtype,
        home: ShardHome,
        sum_dtype: torch.dtype | None = None,
    ) -> None:
        self.slots = slots
        self.params = [slot.unsharded for slot in slots]
        self.mesh = mesh
        # The dtype in which rows are sent, and the one in which they are summed.
        self.dtype = reduce_dtype
        self.sum_dtype = sum_dtype or reduce_dtype
        # Whether this backward has reduced gradients of the unit before: they may arrive in several groups.
        self.is_again = False
        self.home = home
        packing = form.packing(slots, mesh.shard.world, reduce_dtype.itemsize)
        self.row_numel = packing.row_numel
        self.rows, self.slices = plan_slices(
            packing,
            reduce_dtype,
            mesh.device,
            [slot.shape for slot in slots],
            [slot.gradient_dtype for slot in slots],
        )
        self._plan_own_row(form, packing)
        # Set while the all-reduce over replicas is deferred.
        self.partial: PartialSum | None = None
        self._buffer: GradientBuffer | None = None
        # The collective codes of this reduce, for each set of gradients that were present.
        self._codes: dict[object, tuple[int, int]] = {}
        self._divisions: dict[tuple[float | None, bool], Division] = {}

    def _plan_own_row(self, form: ShardedForm, packing: Packing) -> None:
        """Plans how the own row becomes the gradients of the shards."""
        self.segments = [
            _RowSegment(
                form.gradient_dtype(self.slots[segment.members[0]], self.dtype), segment.start, segment.numel
            )
            for segment in packing.segments
        ]
        self.views = form.gradient_views(self.slots, packing, self.mesh.shard.rank)
        assigned = [view for view in self.views if not view.is_none]
        self.num_assigned = len(assigned)
        self.split_sizes = _split_sizes(assigned, self.segments)
        # Whether the own row is the gradient buffer, without a cast or a transfer.
        self.needs_no_cast = (
            len(self.segments) == 1
            and self.segments[0].dtype == self.sum_dtype
            and not self.home.is_offloaded
        )
        self._lends = self._reuses_gradients and self.needs_no_cast and form.lends_gradients

    def codes(self, names: ReduceNames, settings: ReduceSettings, present: Presence) -> tuple[int, int]:
        """The codes of a reduce, over the shard axis and over replicas; named once for each set of gradients."""
        if settings.includes_unused:
            present = None
        key = (names, present, settings.divide_factor)
        codes = self._codes.get(key)
        if codes is None:
            codes = self._codes[key] = names.reduce(self, present, settings.divide_factor)
        return codes

    def begin(self, settings: ReduceSettings, streams: SideStreams, codes: tuple[int, int]) -> ReduceInFlight:
        return ReduceInFlight(self, settings, streams, codes)

    def buffer_to_fill(self) -> GradientBuffer | None:
        """The gradient buffer that a reduce writes to; None while its gradients are in use, or if there is none."""
        if not self._lends:
            return None
        if self._buffer is not None and self._buffer.is_lent:
            return None
        if self._buffer is None or not self._buffer.is_own():
            self._buffer = GradientBuffer(self.views, self.row_numel, self.dtype, self.mesh.device)
        return self._buffer

    @property
    def lent(self) -> GradientBuffer | None:
        """The gradient buffer, if it holds the current gradients of all parameters."""
        buffer = self._buffer
        return buffer if buffer is not None and buffer.is_all_lent else None

    def zero_partial(self, shards: Container[torch.Tensor], set_to_none: bool) -> None:
        """As ``zero_grad`` for these shards, of the sum that waits for its all-reduce over replicas."""
        assert self.partial is not None
        self.partial = self.partial.zeroed(shards, set_to_none, [segment.start for segment in self.segments])

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
