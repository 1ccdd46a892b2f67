"""One reduce of a unit's gradients under way: its stages, from full gradients to gradients given out.

What it does was decided beforehand: how rows are laid out, summed and divided is told in ``reduce``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import is_grad_enabled
from torch.distributed.tensor import DTensor

from shardwise.comm.collectives.group import Work, drain
from shardwise.comm.streams import SideStreams, StreamEvent
from shardwise.engine.reduce.gradient_buffer import GradientBuffer, GradientView, Presence
from shardwise.engine.unit.binding import Slot
from shardwise.torch_internals import (
    add_all,
    local_of,
    post_accumulate_hooks,
    with_torch_function,
    without_torch_function,
)

if TYPE_CHECKING:
    from shardwise.engine.reduce.reduce_plan import ReducePlan, ReduceSettings


class PartialSum(NamedTuple):
    """A sum over the shard axis that still waits for its replicas, and whose gradients are in it."""

    row: torch.Tensor
    parts: list[GradientView]

    def zeroed(
        self, shards: Container[torch.Tensor], set_to_none: bool, run_starts: Sequence[int]
    ) -> PartialSum | None:
        """What is left of it when the gradients of these shards are zeroed; None if nothing is."""
        zeroed = [part for part in self.parts if part.slot.sharded in shards]
        for part in zeroed:
            self.row.as_strided(part.shape, part.strides, run_starts[part.run] + part.start).zero_()
        if not set_to_none:
            return self
        left = [part for part in self.parts if part not in zeroed]
        return PartialSum(self.row, left) if left else None


class ReduceInFlight:
    """One reduce under way.

    ``advance`` takes it a stage further: the own row arrives, then the replicas' sum, then gradients are given out.
    Where collectives take their place in a stream, all of that is issued at once and only the last stage is left.
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
        self._puts_off = plan.mesh.replicate is not None and not settings.all_reduces
        self._work: Work | None = None
        self._gradients: Sequence[torch.Tensor | None] = ()
        self._runs: Sequence[torch.Tensor] = ()
        # Set when it is issued.
        self._received: list[GradientView]
        self._buffer: GradientBuffer | None
        self._own_row: torch.Tensor | None
        self._packed: StreamEvent
        self._read_late: list[torch.Tensor] = []

    def issue(self, gradients: list[torch.Tensor | None], present: Presence) -> None:
        """Packs the gradients and starts the reduce-scatter."""
        plan, stream = self.plan, self._streams.reduce
        if present is None or self._settings.includes_unused:
            self._received = plan.parts
        else:
            self._received = [part for part in plan.parts if any(present[member] for member in part.members)]
        if is_grad_enabled():
            # backward(create_graph=True): the graph goes on from the gradients, not through their reduce.
            gradients = [None if gradient is None else gradient.detach() for gradient in gradients]
        calls, division = self._settings.calls, self._division
        # From the compute stream's memory, where backward is just letting go of activations.
        plan.rows.grow_in(calls.lend(plan.rows.size_bytes))
        plan.filled_by = self
        self._buffer = None if self._puts_off else plan.buffer_to_fill()
        if self._buffer is not None:
            self._buffer.grow()
            self._own_row = self._buffer.row
        else:
            self._own_row = self._make_own_row()
        # order: gradients before their packing, because backward writes them on the compute stream
        stream.wait_compute()
        if self._streams.host_runs_ahead:
            # alive: the gradients, until compute has waited for their packing and may reuse their memory
            self._gradients = gradients
            # alive: what the lane reads after that, until compute has waited for what comes after it on the lane
            self._read_late.append(self._own_row)
        with stream:
            for each in plan.slices:
                if self._work is not None:
                    # order: a slice's reduce before the next one is packed, because both use the same rows; others may
                    # read what they were lent for longer than that, so what comes next is lent anew
                    self._work.wait()
                    plan.rows.grow_in(calls.lend(plan.rows.size_bytes))
                each.pack.fill(gradients, is_complete=present is None)
                self._packed = stream.record_event()
                if division.before != 1.0:
                    each.rows.div_(division.before)
                self._work = calls.issue_reduce_scatter(
                    each.of(self._own_row), each.rows, division.group_averages, self._code
                )
            if calls.ordered_by_stream:
                self._receive_own_row()
                if self._work is not None:
                    self._receive_replicas()

    def _make_own_row(self) -> torch.Tensor:
        plan = self.plan
        return torch.empty(plan.row_numel, dtype=plan.sum_dtype, device=plan.mesh.device)

    def let_gradients_go(self) -> None:
        """Lets compute's allocator have the full gradients' memory back."""
        if self._gradients:
            # order: packing before compute, because compute's allocator reuses the gradients' memory from here on
            self._streams.compute_waits_for(self._packed)
            self._gradients = ()

    def let_rows_go(self) -> None:
        """Lets compute's allocator have the rows' memory back, once compute has waited for later work of the lane."""
        self._read_late.clear()
        if self.plan.filled_by is self:
            self.plan.filled_by = None
            self.plan.rows.shrink()

    def advance(self) -> None:
        """Takes the next stage, if there is one left."""
        self.let_gradients_go()
        if self.is_done:
            return
        with self._streams.reduce:
            if self.is_scattering:
                self._receive_own_row()
            elif self._work is not None:
                self._receive_replicas()

    def finish(self) -> list[Slot]:
        """Takes the remaining stages and puts the gradients in place; returns the slots that users hooked."""
        self.advance()
        while not self.is_done:
            self.advance()
        return self._give_out()

    def listener(self) -> Callable[[Callable[[], None]], None] | None:
        """Whom to tell that gradients are in place, if any are."""
        return self._settings.listener if self._received else None

    def abandon(self) -> bool:
        """Lets the collective land and drops what it brings; False if it may still land later."""
        self.let_gradients_go()
        if self._work is not None:
            with self._streams.reduce:
                if not drain(self._work):
                    return False
        if not self._streams.host_runs_ahead:
            self.let_rows_go()
        return True

    # Stages are taken on the reduce lane.

    def _receive_own_row(self) -> None:
        plan, streams = self.plan, self._streams
        assert self._work is not None
        assert self._own_row is not None
        self._work.wait()
        self._work = None
        if not streams.host_runs_ahead:
            self.let_rows_go()
        if plan.partial is not None:
            self._own_row.add_(plan.partial.row)
            self._read_late.append(plan.partial.row)
            all_parts = {part.slot: part for part in (*plan.partial.parts, *self._received)}
            self._received = list(all_parts.values())
            plan.partial = None
        self.is_scattering = False
        if self._puts_off:
            plan.partial = PartialSum(self._own_row, self._received)
            self._received, self._own_row = [], None
            self.is_done = True
        elif plan.mesh.replicate is not None:
            # order: the shard axis's sum before the replicas', because they add up its result
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
        # order: the replicas' sum before its division, because gradients are given out on the reduce lane
        self._streams.reduce.wait_event(self._streams.replicate.record_event())
        self._divide(self._own_row)

    def _divide(self, own_row: torch.Tensor) -> None:
        if self._settings.hook is not None:
            self._run_all_reduce_hook(own_row)
        if self._division.after != 1.0:
            own_row.div_(self._division.after)
        self._runs = [own_row] if self.plan.is_one_run else self._cast_runs(own_row)
        self._own_row = None
        self.is_done = True

    def _run_all_reduce_hook(self, own_row: torch.Tensor) -> None:
        hook, stream = self._settings.hook, self._settings.hook_stream
        assert hook is not None
        if stream is None:
            hook(own_row)
            return
        # order: the reduced row before the hook, because it reads and writes it
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            hook(own_row)
        # order: the hook before the division, because gradients are what the hook made of them
        torch.cuda.current_stream().wait_stream(stream)

    def _cast_runs(self, own_row: torch.Tensor) -> list[torch.Tensor]:
        """The own row in the dtypes of the shards and where they live, each run in memory of its own."""
        plan = self.plan
        runs = []
        for dtype, start, numel in plan.runs:
            source = own_row[start : start + numel]
            if source.is_complex() and not dtype.is_complex:
                # Real gradients that travelled beside complex ones, as these: there is nothing in their other half.
                source = source.real
            if plan.is_offloaded:
                # Cast where it is fast, then one transfer; the host waits for it before anyone reads.
                target = torch.empty(numel, dtype=dtype, device=plan.shard_device, pin_memory=plan.pins)
                runs.append(target.copy_(source.to(dtype), non_blocking=plan.pins))
            else:
                runs.append(source.to(dtype, copy=True))
        return runs

    def _give_out(self) -> list[Slot]:
        given: list[GradientView] = []
        added: list[GradientView] = []
        hooked: list[Slot] = []
        with without_torch_function():
            for part in self._received:
                param = part.slot.sharded
                if post_accumulate_hooks(param):
                    hooked.append(part.slot)
                if part.is_none:
                    continue
                if param._backward_hooks:
                    self._give_through_hooks(part)
                else:
                    (given if param.grad is None else added).append(part)
            if added:
                self._add_to_existing(added)
            if self._buffer is not None and given:
                self._buffer.lend(given)
            else:
                for part, gradient in zip(given, self._cut(given), strict=False):
                    part.slot.sharded.grad = part.slot.gradient(gradient)
        self._runs = ()
        return hooked

    def _give_through_hooks(self, part: GradientView) -> None:
        """Gives out a gradient as the hooks of ``register_hook`` change it."""
        param, stream = part.slot.sharded, self._streams.reduce
        with stream, with_torch_function():
            if self.plan.is_offloaded:
                # order: the transfer before the hooks, because they read the gradient on the host
                self._streams.host_waits_for(stream.record_event())
            gradient = part.slot.gradient(self._gradient(part).clone())
            for hook in tuple((param._backward_hooks or {}).values()):
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            param.grad = gradient if param.grad is None else param.grad + gradient

    def _cut(self, parts: list[GradientView]) -> Sequence[torch.Tensor]:
        """The gradients of these parts, in their order."""
        numels = self.plan.part_numels
        if numels is not None and len(parts) == self.plan.num_given:
            return self._runs[0].split_with_sizes(numels)
        return [self._gradient(part) for part in parts]

    def _gradient(self, part: GradientView) -> torch.Tensor:
        run = self._runs[part.run]
        return run if part.is_run else run.as_strided(part.shape, part.strides, part.start)

    def _add_to_existing(self, parts: list[GradientView]) -> None:
        held: list[torch.Tensor] = []
        for part in parts:
            existing = part.slot.sharded.grad
            assert existing is not None
            held.append(local_of(existing) if isinstance(existing, DTensor) else existing)
        stream = self._streams.reduce
        with stream:
            if self.plan.is_offloaded:
                # order: the transfer before the sum, because the host adds
                self._streams.host_waits_for(stream.record_event())
            add_all(held, [self._gradient(part) for part in parts])


def run_user_hooks(slots: list[Slot]) -> None:
    """Runs the users' post-accumulate hooks, now that the gradients are in place.

    All ranks run the same hooks, because an optimizer that steps in one meets its peers: where a rank has no element
    of the parameter, the hook finds an empty gradient for as long as it runs.
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
