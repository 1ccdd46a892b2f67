"""The root of a model: its units, what they have in flight, and the phase of the step. One on each rank.

A new unit is its own root. The first forward of an outer unit adopts the units below it: they share side streams, order
and phase. Forward and backward call a root through the units' hooks, optimizers through its agreement.

Memory in flight, on a device whose host runs ahead: a freed unit keeps its memory until the compute stream has passed
it. The gather stream reclaims that memory before it gathers the next unit but one.

    compute   | unit 0 | unit 1 | unit 2 |
    gather    | 1 |    | 2 |▲   | 3 |▲             ▲ waits until compute has left unit 0, then unit 1
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardwise import trace
from shardwise.comm.streams import StreamEvent, side_streams_for, take_workspaces
from shardwise.engine.reduce.exact_sums import check_model
from shardwise.engine.reduce.reduce_in_flight import Lender, ReduceInFlight, run_user_hooks
from shardwise.engine.reduce.reduce_plan import ReducePlan
from shardwise.engine.step.agreement import StepAgreement
from shardwise.engine.step.joint_units import JointUnits
from shardwise.engine.unit.autograd_signals import Visit, Window
from shardwise.engine.unit.binding import Slot, clean_name
from shardwise.engine.unit.collective_names import CollectiveNames
from shardwise.engine.unit.interfaces import Position
from shardwise.engine.unit.membership import units_of
from shardwise.errors import StateError
from shardwise.planning.lifecycle import GATHERING, SHARDED, UNSHARDED
from shardwise.torch_internals import aside, backward_executes, inside_backward, queue_end_of_backward

if TYPE_CHECKING:
    from shardwise.engine.unit.unit import Unit


class _EndOfBackward:
    """Runs when a backward ends. If the backward raised, it is dropped without a call, which is how we notice."""

    def __init__(self, root: Root) -> None:
        self._root: Root | None = root

    def __call__(self) -> None:
        root, self._root = self._root, None
        assert root is not None
        try:
            aside(root.end_backward)()
        except BaseException as error:
            root.break_off(f"{type(error).__name__} at the end of backward")
            raise

    def __del__(self) -> None:
        if self._root is not None:
            self._root.break_off_backward()


def _is_reached(reference: weakref.ref[Unit]) -> bool:
    unit = reference()
    return unit is not None and unit.gradients.are_reached_by_backward()


# A recorded step must know every root in it.
class _Collecting(threading.local):
    roots: list[Root] | None = None


_collecting = _Collecting()


@contextmanager
def collect_roots(roots: list[Root]) -> Iterator[None]:
    """Within it, adds each root whose forward begins on this thread to ``roots``, in order."""
    outer, _collecting.roots = _collecting.roots, roots
    try:
        yield
    finally:
        _collecting.roots = outer


class Root:
    """The step of one model on one rank."""

    def __init__(self, top: Unit, name: str) -> None:
        # Weak, like all references from a root to its units: modules own them, and a user who keeps one module or
        # parameter must not keep the memory of the whole model.
        self._top = weakref.ref(top)
        self.streams = side_streams_for(top.mesh.device)
        self.in_forward = False
        self.in_backward = False
        self.expects_backward = True
        self.ends_backward = False
        self.is_last_backward = True
        self.window = Window()
        # The visit that the running backward has reached last.
        self.reached: Visit | None = None
        self._unit_refs: list[weakref.ref[Unit]] = []
        self.has_adopted = False
        # Freed units whose memory is still to be reclaimed, the oldest first, with the end of their last compute.
        self._freed: dict[Unit, StreamEvent] = {}
        # Reduces in flight, the oldest first.
        self.reduces: deque[ReduceInFlight] = deque()
        self._is_offloaded = False
        self.post_optim_event: torch.Event | None = None
        self.agreement = StepAgreement(top)
        # Only where ranks may run different units.
        self.joint_units: JointUnits | None = None
        self._adopt(top, name)

    # --- units ----------------------------------------------------------------------------------------------------

    @property
    def top(self) -> Unit:
        """The outermost unit, whose forward is the model's."""
        top = self._top()
        assert top is not None, "a root was used after its model was gone"
        return top

    @property
    def units(self) -> list[Unit]:
        return [unit for reference in self._unit_refs if (unit := reference()) is not None]

    def _adopt(self, unit: Unit, name: str, model: int = 1) -> None:
        top, number = self.top, len(self._unit_refs)
        names = CollectiveNames(name, len(unit.slots), model)
        is_outermost = unit is top or unit in top.hooks.companions
        unit.adopt(self, Position(number, name, names, unit is top, is_outermost))
        self._unit_refs.append(weakref.ref(unit))

    def adopt_units(self) -> None:
        """Adopts all units of the model, names them, and checks that all ranks hold the same model; once."""
        if self.has_adopted:
            return
        names: dict[Unit, str] = {self.top: ""}
        for module in self.top.modules:
            for name, child in module.named_modules():
                for unit in units_of(child):
                    names.setdefault(unit, clean_name(name))
        for unit in names:
            if unit.root is self:
                continue
            if unit.root.agreement.is_broken:
                # It ran alone and raised: that step is over.
                unit.root.recover()
            elif unit.root.is_busy:
                raise StateError(
                    f"unit '{unit.name}' is in the middle of a step of its own",
                    where=f"first forward of the model around it, rank {unit.rank}",
                    fix="finish its backward before the outer model runs for the first time",
                )
        model = self.agreement.register_units(names)
        self._unit_refs = []
        for unit, name in names.items():
            self._adopt(unit, name, model)
        check_model(self.units, f"first forward, rank {self.top.rank}")
        self.agreement.check_units()
        self._is_offloaded = any(unit.home.is_offloaded for unit in self.units)
        self.has_adopted = True
        self.update_joint_units()
        take_workspaces(self.top.mesh.device)

    def update_joint_units(self) -> None:
        """Reads again which units are joint."""
        if self.joint_units is not None:
            self.joint_units.end_backward()
        joint = [unit for unit in self.units if unit.settings.is_joint]
        self.joint_units = JointUnits(joint) if joint else None

    @property
    def is_busy(self) -> bool:
        return self.in_forward or self.in_backward

    # --- forward --------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Begins a step: recovers from one that raised, adopts units, and orders gathers after the optimizer."""
        self.recover()
        self.agreement.check_not_torn()
        self.adopt_units()
        self._note_begun()
        self.in_forward = True
        self.agreement.begin_forward()
        self.expects_backward = torch.is_grad_enabled()
        self.window = Window()
        # order: the optimizer's writes before the gathers of this step, because they read the shards
        if self.post_optim_event is None:
            self.streams.gather.wait_compute()
        else:
            self.streams.gather.wait_event(self.post_optim_event)
            self.post_optim_event = None
        if self.joint_units is not None:
            self.joint_units.begin_forward()

    def _note_begun(self) -> None:
        roots = _collecting.roots
        if roots is not None and self not in roots:
            roots.append(self)

    def begin_unit_alone(self) -> None:
        """Begins a forward of one unit outside of the model's; recovers if the model's last step raised."""
        has_ended = self.in_backward or self.agreement.is_broken
        if has_ended and not any(unit.hooks.is_running for unit in self.units):
            self.recover()

    def end_forward(self) -> None:
        """Ends the model's forward: frees prefetched units that did not run."""
        for unit in self.units:
            if unit.hooks.has_several:
                unit.hooks.end_partial_forward()
            if unit.state is GATHERING and unit.buffers.gather.is_prefetch:
                # It was prefetched and not run; it would be stale later.
                unit.reshard(trace.IN_FORWARD)
        self.in_forward = False
        if self.joint_units is not None and not self.expects_backward:
            self.joint_units.end_forward()
        self._reclaim(0)
        if self._is_offloaded and not torch.is_grad_enabled():
            # order: the gathers' transfers before the host, because it may write the shards and no backward waits
            self.streams.host_waits_for(self.streams.gather.record_event())

    # --- memory ---------------------------------------------------------------------------------------------------

    def make_room(self, unit: Unit, prefetch: bool) -> None:
        """Reclaims memory of freed units before ``unit`` is gathered.

        A gather on demand may overlap the unit computed now, whose memory is then the last to be reclaimed; a prefetch
        is already one unit ahead.
        """
        if not (self.in_forward or self.in_backward):
            # order: writes to the shards before this gather, because no step began that would have waited for them
            self.streams.gather.wait_compute()
        for reduction in self.reduces:
            if reduction.lender is unit.buffers:
                reduction.return_memory()
        if self._freed:
            self._reclaim(0 if prefetch or unit in self._freed else 1)

    def free_after_compute(self, unit: Unit) -> None:
        """Frees a unit's full parameters as soon as the compute stream has passed them."""
        if not self.streams.host_runs_ahead:
            unit.buffers.gather.free()
            return
        self._freed[unit] = self.streams.record_compute()
        if unit.gathered.has_moved or (self.in_backward and not unit.gradients.may_borrow()):
            # At once: the unit makes new buffers next; or packs its gradients, and the next gather takes this memory.
            self._reclaim(0)

    def lend_freed(self, unit: Unit, plan: ReducePlan) -> Lender | None:
        """Lends the memory of ``unit``, if it has just been freed, to rows, which compute packs, if they fit."""
        if unit in self._freed and unit.gradients.may_borrow(plan):
            del self._freed[unit]
            return unit.buffers
        return None

    def free_before_prefetch(self) -> None:
        """Reclaims what freed units have lent to rows, so that the next gather finds that memory."""
        for reduction in self.reduces:
            if reduction.lender is not None:
                reduction.return_memory()
        if self._freed:
            self._reclaim(0)

    def _reclaim(self, keep: int) -> None:
        while len(self._freed) > keep:
            freed = next(iter(self._freed))
            event = self._freed.pop(freed)
            # order: compute's last use before the memory goes back to the stream, because the next gather writes it
            self.streams.gather.wait_event(event)
            # Returns the memory to the stream it was allocated on, whatever stream is current.
            freed.buffers.gather.free()

    # --- backward -------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Begins a backward, and queues ``end_backward`` to run when autograd is done."""
        self.in_backward = True
        self.agreement.begin_backward()
        queue_end_of_backward(_EndOfBackward(self))
        if self.joint_units is not None:
            self.joint_units.begin_backward()

    def reduce_stash(self) -> None:
        """Reduces gradients that backwards without sync have kept back, when no backward with sync will follow."""
        for unit in self.units:
            if weakref.ref(unit) in self.window and not unit.keeps_after_forward():
                unit.gradients.check_some_have_come()
        self.in_backward = True
        self.agreement.begin_backward()
        _EndOfBackward(self)()

    def prefetch_before(self, unit: Unit, visit: Visit) -> None:
        """Starts to gather what this backward uses next."""
        if unit.settings.backward_prefetch is not None:
            for chosen in unit.settings.backward_prefetch:
                chosen.issue_gather(trace.IN_PRE_BACKWARD, prefetch=True)
        elif (next_used := self._next_in_backward(unit, visit)) is not None:
            for needed in next_used.needs:
                if needed.settings.gathers_in_backward:
                    needed.issue_gather(trace.IN_PRE_BACKWARD, prefetch=True)

    def _next_in_backward(self, unit: Unit, visit: Visit) -> Unit | None:
        """Returns the unit that this backward reaches after ``visit``, a visit of ``unit``."""
        if visit.place is None:
            return None
        before = visit.before
        if (
            before is not None
            and before.place == visit.place - 1
            and before.hooks.unit is not unit
            and backward_executes(visit.input_node)
        ):
            # In a chain of units one look at the graph is enough; otherwise each unit's parameters are asked.
            return before.hooks.unit
        reference: weakref.ref[Unit] | None = visit.window.before(visit.place, _is_reached)
        return None if reference is None else reference()

    def finish_earlier_reduces(self, plan: ReducePlan, max_inputs: int) -> None:
        """Finishes as many reduces as needed before one of ``plan`` is issued.

        At most ``max_inputs`` reduces may have their input in memory; with replicas, one more may be in its all-reduce.
        """
        reduces = self.reduces
        if max_inputs == 1 and plan.mesh.replicate is None:
            while reduces:
                self._finish_oldest_reduce()
            return
        while any(reduction.plan is plan for reduction in reduces):
            self._finish_oldest_reduce()
        scattering = [reduction for reduction in reduces if reduction.is_scattering]
        for reduction in scattering[: max(0, len(scattering) + 1 - max_inputs)]:
            reduction.advance()
        while len(reduces) > max_inputs or (reduces and reduces[0].is_done):
            self._finish_oldest_reduce()

    def _finish_oldest_reduce(self) -> None:
        reduction = self.reduces.popleft()
        hooked = reduction.finish()
        if hooked:
            self._run_hooks(reduction, hooked)
        for listener in reduction.listeners():
            wait = partial(self.streams.host_waits_for, self.streams.reduce.record_event())
            listener(wait, self.is_last_backward)

    def _run_hooks(self, reduction: ReduceInFlight, hooked: list[Slot]) -> None:
        stream = self.streams.reduce
        if reduction.plan.home.is_offloaded:
            # order: the transfer before the hooks, because they read the gradients on the host
            self.streams.host_waits_for(stream.record_event())
        with stream:
            run_user_hooks(hooked)
        stepped = stream.record_event()
        # order: an optimizer that steps in a hook before later gathers, because it writes the shards
        self.streams.gather.wait_event(stepped)
        # order: that optimizer before compute, because compute's allocator reuses gradients that the hook dropped
        self.streams.compute_waits_for(stepped)

    def end_backward(self) -> None:
        """Reduces and frees what no signal did, and makes the compute stream wait for the gradients."""
        units = self.units
        with torch.no_grad():
            self.ends_backward = True
            for unit in reversed(units):
                unit.hooks.flush()
            self.ends_backward = False
            while self.reduces:
                self._finish_oldest_reduce()
            if self.is_last_backward:
                if self.joint_units is not None:
                    self.joint_units.end_backward()
                for unit in units:
                    if unit.state is not SHARDED:
                        unit.end_step()
            self._reclaim(0)
            reduced = self.streams.reduce.record_event()
            # order: reduced gradients before what follows backward, because clipping and the optimizer read them
            self.streams.compute_waits_for(reduced)
            for channel in self.agreement.channels:
                channel.last_event = reduced
            if self._is_offloaded:
                # order: the last transfers before the host goes on, because it steps the optimizer
                self.streams.host_waits_for(reduced)
        self.in_backward = False
        self.reached = None

    # --- recovery -------------------------------------------------------------------------------------------------

    def break_off(self, what: str) -> None:
        """Tells peers that this rank has left its step."""
        if self.is_busy:
            self.agreement.break_off(what)

    def break_off_forward(self, error: BaseException) -> None:
        """Ends a forward that raised: tells peers, and frees what was kept for a backward that will not come."""
        if self.in_forward:
            self.break_off(f"{type(error).__name__} in forward: {error}"[:500])
            self.in_forward = False
            for unit in self.units:
                unit.hooks.release_partial_forward()
                if unit.state is UNSHARDED and not unit.gathered.holders:
                    unit.reshard(trace.IDLE)

    def break_off_backward(self) -> None:
        """Notes that a backward raised, and tells peers. Units stay gathered until the next step; users may write."""
        self.break_off("its backward raised")
        for unit in self.units:
            if unit.state is UNSHARDED:
                unit.gathered.keep()

    def recover(self) -> None:
        """Resets the root if the last step raised, here or on another rank.

        Then a phase has not ended, or a channel has begun a new epoch. A forward that raised keeps the stash of
        earlier micro-batches.
        """
        if self.is_busy or self.agreement.is_broken:
            self.reset(drops_stash=self.in_backward)

    def reset(self, drops_stash: bool = True) -> None:
        """Drops the current step: shards all parameters, and drops what is in flight and incomplete gradients."""
        if self.in_backward and inside_backward():
            raise StateError(
                "a step cannot be reset while its backward runs",
                where=f"rank {self.top.rank}",
                fix="let the exception leave backward() first",
            )
        self.break_off("it began a new step before the last one had ended")
        with torch.no_grad():
            abandoned = list(self.reduces)
            self.reduces.clear()
            unlanded = {reduction.plan for reduction in abandoned if not reduction.abandon()}
            for unit in self.units:
                unit.abandon_step(drops_stash)
                unit.gradients.forget_reduces(unlanded)
            self._reclaim(0)
        if self.joint_units is not None:
            self.joint_units.forget()
        self.agreement.clear_failure()
        self.in_forward = self.in_backward = self.ends_backward = False
        self.reached = None
