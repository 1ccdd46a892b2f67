"""One reduce of a unit's gradients in flight: its stages, from full gradients to the gradients of shards.

How rows are laid out, summed and divided is planned in ``reduce_plan``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import is_grad_enabled

from shardwise.comm.collectives.group import Work, drain
from shardwise.comm.streams import SideStreams, StreamEvent
from shardwise.engine.buffers import GradientBuffer, GradientView, Presence
from shardwise.engine.unit.binding import Slot
from shardwise.engine.unit.settings import ReduceSettings
from shardwise.torch_internals import (
    add_all,
    local_part,
    post_accumulate_hooks,
    with_torch_function,
    without_torch_function,
)

if TYPE_CHECKING:
    from shardwise.engine.reduce.reduce_plan import ReducePlan


class Lender(Protocol):
    """A unit that lends the memory of its full parameters, which backward has passed, to the rows of its reduce."""

    @property
    def full_memory(self) -> torch.Tensor: ...

    def free_full(self) -> None: ...


class PartialSum(NamedTuple):
    """A sum over the shard axis that has not been all-reduced over replicas yet, and the gradients in it."""

    row: torch.Tensor
    views: list[GradientView]

    def zeroed(
        self, shards: Container[torch.Tensor], set_to_none: bool, segment_starts: Sequence[int]
    ) -> PartialSum | None:
        """Zeroes the gradients of these shards; returns the sum without them, None if no gradient is left."""
        zeroed = [view for view in self.views if view.slot.sharded in shards]
        for view in zeroed:
            start = segment_starts[view.segment] + view.start
            self.row.as_strided(view.shape, view.strides, start).zero_()
        if not set_to_none:
            return self
        others = [view for view in self.views if view not in zeroed]
        return PartialSum(self.row, others) if others else None


class ReduceInFlight:
    """One reduce in flight.

    ``advance`` completes the next stage: the reduce-scatter, then the all-reduce over replicas. ``finish`` completes
    all of them and assigns the gradients. Where collectives are ordered by their stream, ``issue`` issues all stages at
    once and only the assignment is left.
    """

    def __init__(
        self, plan: ReducePlan, settings: ReduceSettings, streams: SideStreams, codes: tuple[int, int]
    ) -> None:
        self.plan = plan
        self.is_scattering = True
        self.is_done = False
        self._settings = settings
        self._streams = streams
        self._code, self._replicas_code = codes
        self._division = plan.division(settings)
        self._defers_all_reduce = plan.mesh.replicate is not None and not settings.all_reduces
        self._work: Work | None = None
        self._gradients: Sequence[torch.Tensor | None] = ()
        # The own row in the shards' dtypes and on their device, one tensor per segment.
        self._segments: Sequence[torch.Tensor] = ()
        # The gradients that are assigned in the end.
        self._received: list[GradientView] = plan.views
        self._buffer: GradientBuffer | None = None
        self._own_row: torch.Tensor | None = None
        self._holds_rows = False
        # Whose memory the rows are in; None: their own.
        self.lender: Lender | None = None
        # On the reduce stream, after the last use of the rows.
        self._scattered: StreamEvent | None = None
        # After the gradients are complete, if their memory is compute's; until compute has waited for it. Not with
        # replicas: compute would wait for their sum, which may take longer than a unit.
        self._divided: StreamEvent | None = None

    def issue(
        self, gradients: list[torch.Tensor | None], present: Presence, lender: Lender | None = None
    ) -> None:
        """Packs the gradients, into the memory of ``lender`` if there is one, and starts the reduce-scatter."""
        plan, stream = self.plan, self._streams.reduce
        if present is not None and not self._settings.includes_unused:
            self._received = [view for view in plan.views if any(present[member] for member in view.members)]
        if is_grad_enabled():
            # backward(create_graph=True): a double backward does not differentiate the reduce.
            gradients = [None if gradient is None else gradient.detach() for gradient in gradients]
        calls = self._settings.calls
        # Their own memory is the compute stream's, where backward is freeing activations.
        lent = calls.lend(plan.rows.size_bytes) if lender is None else lender.full_memory
        plan.rows.grow_in(lent)
        self.lender, self._holds_rows = lender, True
        packs_at_once = len(plan.slices) == 1
        if packs_at_once:
            # On the compute stream, so that backward may reuse the gradients' memory at once, for the own row first.
            plan.slices[0].pack.fill(gradients, is_complete=present is None)
            gradients.clear()
        if not self._defers_all_reduce:
            self._buffer = plan.buffer_to_fill()
        if self._buffer is not None:
            self._buffer.memory.grow()
            self._own_row = self._buffer.row
        else:
            self._own_row = self._make_own_row()
        # order: gradients and packed rows before the reduce, because backward writes them on the compute stream
        stream.wait_compute()
        if self._streams.host_runs_ahead:
            # alive: gradients that the reduce stream packs, until compute has waited for it
            self._gradients = gradients
        with stream:
            for each in plan.slices:
                if self._work is not None:
                    # order: a slice's reduce before the next one is packed, because both use the same rows; peers may
                    # read shared memory for longer than that, so the next slice gets new shared memory
                    self._work.wait()
                    plan.rows.grow_in(calls.lend(plan.rows.size_bytes))
                if not packs_at_once:
                    each.pack.fill(gradients, is_complete=present is None)
                if self._division.before != 1.0:
                    each.rows.div_(self._division.before)
                self._work = calls.issue_reduce_scatter(
                    each.own_span(self._own_row), each.rows, self._division.group_averages, self._code
                )
            if calls.ordered_by_stream:
                self._receive_own_row()
                if self._work is not None:
                    self._receive_replicas()

    def _make_own_row(self) -> torch.Tensor:
        """Allocates an own row that is cast or added to, on the reduce stream, which frees it when that is done."""
        plan = self.plan
        with self._streams.reduce:
            return torch.empty(plan.row_numel, dtype=plan.sum_dtype, device=plan.mesh.device)

    def release_rows(self) -> None:
        """Returns the memory of the rows, and of gradients packed on the reduce stream, to whom it belongs."""
        if self.lender is not None:
            self.return_memory()
        elif self._holds_rows:
            self._return_to_compute()

    def _return_to_compute(self) -> None:
        if (read := self._divided or self._scattered) is not None:
            # order: the reduce-scatter before compute, because compute's allocator reuses the memory from here on
            self._streams.compute_waits_for(read)
        self._divided = None
        self._gradients = ()
        self._holds_rows = False
        self.plan.rows.shrink()

    def return_memory(self) -> None:
        """Frees the memory that the rows have borrowed, as soon as the reduce has read them; compute does not wait."""
        lender = self.lender
        if lender is None:
            return
        assert self._scattered is not None
        # order: the reduce-scatter before later gathers, because they write to the memory that the rows were in
        self._streams.gather.wait_event(self._scattered)
        self.lender, self._holds_rows = None, False
        self.plan.rows.shrink()
        lender.free_full()

    def advance(self) -> None:
        """Completes the next stage, if any is left."""
        if not self.is_done:
            with self._streams.reduce:
                if self.is_scattering:
                    self._receive_own_row()
                elif self._work is not None:
                    self._receive_replicas()
        if self._streams.host_runs_ahead:
            self.release_rows()

    def finish(self) -> list[Slot]:
        """Completes all stages and assigns the gradients; returns the slots whose parameters have users' hooks."""
        self.advance()
        while not self.is_done:
            self.advance()
        if self._divided is not None:
            # order: the gradients before compute, because their memory is compute's, and users may drop them at once
            self._streams.compute_waits_for(self._divided)
        return self._assign_gradients()

    def listeners(self) -> Collection[Callable[[Callable[[], None], bool], None]]:
        """What to call when gradients have been assigned, if any are."""
        return self._settings.listeners.values() if self._received else ()

    def abandon(self) -> bool:
        """Drops the reduce once its collective has ended; False if its buffers may still be written to."""
        if self._work is not None:
            with self._streams.reduce:
                if not drain(self._work):
                    return False
        if self._streams.host_runs_ahead:
            self._scattered = self._streams.reduce.record_event()
        self.return_memory()
        # Its own row is compute's, too.
        self._return_to_compute()
        return True

    # The stages run on the reduce stream.

    def _receive_own_row(self) -> None:
        plan, streams = self.plan, self._streams
        assert self._work is not None
        assert self._own_row is not None
        self._work.wait()
        self._work = None
        if streams.host_runs_ahead:
            # Not behind what follows: with offload, later gathers come from the host while this row goes there.
            self._scattered = streams.reduce.record_event()
        else:
            self.release_rows()
        if plan.partial is not None:
            self._own_row.add_(plan.partial.row)
            all_views = {view.slot: view for view in (*plan.partial.views, *self._received)}
            self._received = list(all_views.values())
            plan.partial = None
        self.is_scattering = False
        if self._defers_all_reduce:
            plan.partial = PartialSum(self._own_row, self._received)
            self._received, self._own_row = [], None
            self.is_done = True
        elif plan.mesh.replicate is not None:
            # order: the reduce-scatter before the all-reduce over replicas, because that sums its result
            streams.replicate.wait_event(streams.reduce.record_event())
            with streams.replicate:
                calls = self._settings.replicate_calls or plan.mesh.replicate
                self._work = calls.issue_all_reduce(
                    self._own_row, self._division.group_averages, self._replicas_code
                )
        else:
            self._divide(self._own_row)

    def _receive_replicas(self) -> None:
        assert self._work is not None
        assert self._own_row is not None
        with self._streams.replicate:
            self._work.wait()
        self._work = None
        # order: the all-reduce before the division, because gradients are assigned on the reduce stream
        self._streams.reduce.wait_event(self._streams.replicate.record_event())
        self._divide(self._own_row)

    def _divide(self, own_row: torch.Tensor) -> None:
        if self._settings.hook is not None:
            self._run_all_reduce_hook(own_row)
        if self._division.after != 1.0:
            own_row.div_(self._division.after)
        self._segments = [own_row] if self.plan.needs_no_cast else self._cast_segments(own_row)
        self._own_row = None
        if self._buffer is not None and self._streams.host_runs_ahead and self.plan.mesh.replicate is None:
            is_changed = self._settings.hook is not None or self._division.after != 1.0
            # The event of the reduce-scatter serves where nothing has followed it.
            self._divided = self._streams.reduce.record_event() if is_changed else self._scattered
        self.is_done = True

    def _run_all_reduce_hook(self, own_row: torch.Tensor) -> None:
        hook, stream = self._settings.hook, self._settings.hook_stream
        assert hook is not None
        if stream is None:
            hook(own_row)
            return
        # order: the reduced row before the hook, because the hook reads and writes it
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            hook(own_row)
        # order: the hook before the division, because that reads what the hook wrote
        torch.cuda.current_stream().wait_stream(stream)

    def _cast_segments(self, own_row: torch.Tensor) -> list[torch.Tensor]:
        """The segments of the own row in the shards' dtypes and on their device, each in memory of its own."""
        plan = self.plan
        segments = []
        for dtype, start, numel in plan.segments:
            source = own_row[start : start + numel]
            if source.is_complex() and not dtype.is_complex:
                # Real gradients were sent as complex numbers beside complex ones: their imaginary part is zero.
                source = source.real
            if plan.home.is_offloaded:
                # Cast on the device, where it is fast; the host waits for the transfer before anything reads it.
                target = torch.empty(numel, dtype=dtype, device=plan.home.device, pin_memory=plan.home.pins)
                segments.append(target.copy_(source.to(dtype), non_blocking=plan.home.pins))
            else:
                segments.append(source.to(dtype, copy=True))
        return segments

    def _assign_gradients(self) -> list[Slot]:
        assigned: list[GradientView] = []
        added: list[GradientView] = []
        hooked: list[Slot] = []
        with without_torch_function():
            for view in self._received:
                param = view.slot.sharded
                if post_accumulate_hooks(param):
                    hooked.append(view.slot)
                if view.is_none:
                    continue
                if param._backward_hooks:
                    self._assign_through_hooks(view)
                else:
                    (assigned if param.grad is None else added).append(view)
            if added:
                self._add_to_existing(added)
            if self._buffer is not None and assigned:
                self._buffer.lend(assigned)
            else:
                for view, gradient in zip(assigned, self._tensors_of(assigned), strict=False):
                    view.slot.sharded.grad = view.slot.gradient(gradient)
        self._segments = ()
        return hooked

    def _assign_through_hooks(self, view: GradientView) -> None:
        """Assigns a gradient after the hooks of ``register_hook`` have changed it."""
        param, stream = view.slot.sharded, self._streams.reduce
        with stream, with_torch_function():
            if self.plan.home.is_offloaded:
                # order: the transfer before the hooks, because they read the gradient on the host
                self._streams.host_waits_for(stream.record_event())
            gradient = view.slot.gradient(self._tensor_of(view).clone())
            for hook in tuple((param._backward_hooks or {}).values()):
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            param.grad = gradient if param.grad is None else param.grad + gradient

    def _tensors_of(self, views: list[GradientView]) -> Sequence[torch.Tensor]:
        """The gradients of these views, in order."""
        sizes = self.plan.split_sizes
        if sizes is not None and len(views) == self.plan.num_assigned:
            return self._segments[0].split_with_sizes(sizes)
        return [self._tensor_of(view) for view in views]

    def _tensor_of(self, view: GradientView) -> torch.Tensor:
        segment = self._segments[view.segment]
        return segment if view.is_segment else segment.as_strided(view.shape, view.strides, view.start)

    def _add_to_existing(self, views: list[GradientView]) -> None:
        sums: list[torch.Tensor] = []
        for view in views:
            existing = view.slot.sharded.grad
            assert existing is not None
            sums.append(local_part(existing))
        stream = self._streams.reduce
        with stream:
            if self.plan.home.is_offloaded:
                # order: the transfer before the sum, because the host adds
                self._streams.host_waits_for(stream.record_event())
            add_all(sums, [self._tensor_of(view) for view in views])


def run_user_hooks(slots: list[Slot]) -> None:
    """Runs the users' post-accumulate hooks, after the gradients have been assigned.

    All ranks run the same hooks, because an optimizer that steps in a hook may communicate: on a rank that has no
    element of the parameter, the hook sees an empty gradient.
    """
    for slot in slots:
        param = slot.sharded
        has_none = param.grad is None and param.numel() == 0
        if has_none:
            param.grad = torch.empty_like(param, dtype=param.grad_dtype)
        for hook in tuple((post_accumulate_hooks(param) or {}).values()):
            hook(param)
        if has_none:
            param.grad = None
