"""A root: the units of one model, what they have in flight, and the step they are in.

A unit is born as its own root. The first forward of an outer unit adopts the units below it; from then on they share
lanes, order and phase. Everything here is owned by one rank.

Memory in flight, on a device whose host runs ahead: a unit that is let go keeps its memory until the compute stream
has passed it, and the gather lane takes that memory back before it gathers the next but one.

    compute   | unit 0 | unit 1 | unit 2 |
    gather    | 1 |    | 2 |▲   | 3 |▲             ▲ waits until compute has left unit 0, then unit 1
"""

from __future__ import annotations

import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardwise import trace
from shardwise.comm.collectives.agreement import check_same_model
from shardwise.comm.streams import StreamEvent, side_streams_for, take_workspaces
from shardwise.engine.exact.exact_sums import check_model
from shardwise.engine.reduce.reduce_in_flight import ReduceInFlight, run_user_hooks
from shardwise.engine.reduce.reduce_plan import ReducePlan, ReduceSettings
from shardwise.engine.step.agreement import StepAgreement
from shardwise.engine.step.graph_capture import report_root
from shardwise.engine.step.joint_units import JointUnits
from shardwise.engine.unit.binding import Slot, clean_name, units_of
from shardwise.engine.unit.collective_names import CollectiveNames
from shardwise.errors import StateError
from shardwise.plan.lifecycle import SHARDED, UNSHARDED
from shardwise.plan.schedule import Window
from shardwise.torch_internals import backward_executes, do_aside, inside_backward, queue_end_of_backward

if TYPE_CHECKING:
    from shardwise.engine.reduce.gradient_buffer import Presence
    from shardwise.engine.unit.autograd_signals import Visit
    from shardwise.engine.unit.unit import Unit


class _EndOfBackward:
    """Runs when a backward ends. One that raises drops it unrun, which is the only sign that it did."""

    def __init__(self, root: Root) -> None:
        self._root: Root | None = root

    def __call__(self) -> None:
        root, self._root = self._root, None
        assert root is not None
        try:
            do_aside(Root.end_backward, root)
        except BaseException as error:
            root.break_off(f"{type(error).__name__} at the end of backward")
            raise

    def __del__(self) -> None:
        if self._root is not None:
            self._root.break_off_backward()


def _is_reached(family: list[weakref.ref[Unit]], number: int) -> bool:
    unit = family[number]()
    return unit is not None and unit.gradients.are_reached_by_backward()


class Root:
    """The step of one model on one rank."""

    def __init__(self, top: Unit) -> None:
        # Weak, as all that leads from a root to its units: modules own them, and somebody who keeps one module or
        # parameter of a model must not keep the memory of all.
        self._top = weakref.ref(top)
        self.streams = side_streams_for(top.mesh.device)
        self.in_forward = False
        self.in_backward = False
        self.expects_backward = True
        self.ends_backward = False
        self.is_last_backward = True
        self.window = Window()
        self.family: list[weakref.ref[Unit]] = []
        self._has_adopted = False
        self._leaving: deque[tuple[Unit, StreamEvent]] = deque()
        self._in_flight: deque[ReduceInFlight] = deque()
        # Reduces that are through, but whose rows the lane may still read.
        self._reduced: deque[ReduceInFlight] = deque()
        self._is_offloaded = False
        self.post_optim_event: torch.Event | None = None
        self.agreement = StepAgreement(top)
        # Only where ranks may run different units.
        self.joint_units: JointUnits | None = None
        self._adopt(top)

    # --- the family -----------------------------------------------------------------------------------------------

    @property
    def top(self) -> Unit:
        """The outermost unit, whose forward is the model's."""
        top = self._top()
        assert top is not None, "a root was used after its model was gone"
        return top

    @property
    def units(self) -> list[Unit]:
        return [unit for reference in self.family if (unit := reference()) is not None]

    def _adopt(self, unit: Unit) -> None:
        unit.root = self
        unit.is_top = unit is self._top()
        unit.number = len(self.family)
        self.family.append(weakref.ref(unit))

    def adopt_units(self) -> None:
        """Adopts every unit below, names them by their place in the model, and checks that all ranks mean the same."""
        if self._has_adopted:
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
                # It ran alone and raised: that step has ended all the same.
                unit.root.recover()
            elif unit.root.is_busy:
                raise StateError(
                    f"unit '{unit.name}' is in the middle of a step of its own",
                    where=f"first forward of the model around it, rank {unit.rank}",
                    fix="finish its backward before the outer model runs for the first time",
                )
        model = self.agreement.register_units(names)
        self.family = []
        for unit, name in names.items():
            unit.name = name
            unit.collective_names = CollectiveNames(name, len(unit.slots), model)
            self._adopt(unit)
        check_model(self.units, f"first forward, rank {self.top.rank}")
        self._check_agreement()
        self._is_offloaded = any(unit.is_offloaded for unit in self.units)
        self._has_adopted = True
        self.update_joint_units()
        take_workspaces(self.top.mesh.device)

    def update_joint_units(self) -> None:
        if self.joint_units is not None:
            self.joint_units.end_backward()
        joint = [unit for unit in self.units if unit.is_joint]
        self.joint_units = JointUnits(joint) if joint else None

    def _check_agreement(self) -> None:
        lines_of_mesh: dict[int, list[str]] = {}
        meshes = {id(unit.mesh): unit.mesh for unit in self.units}
        for unit in self.units:
            lines = lines_of_mesh.setdefault(id(unit.mesh), [])
            lines.extend(unit.descriptions())
        for key, mesh in meshes.items():
            for calls in (mesh.shard, mesh.replicate):
                if calls is not None:
                    check_same_model(lines_of_mesh[key], calls, mesh.device)

    @property
    def is_busy(self) -> bool:
        return self.in_forward or self.in_backward

    # --- forward --------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        self.recover()
        self.agreement.check_not_torn()
        self.adopt_units()
        report_root(self)
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

    def begin_alone(self) -> None:
        """A unit of the model runs by itself; it is the first to notice that the model's last step broke off."""
        has_ended = self.in_backward or self.agreement.is_broken
        if has_ended and not any(unit.hooks.is_running for unit in self.units):
            self.recover()

    def end_forward(self) -> None:
        for unit in self.units:
            if unit.has_several:
                unit.hooks.end_without_the_rest()
            if unit.prefetched:
                # It was not run after all, and would be stale when it is.
                unit.reshard(trace.IN_FORWARD)
        self.in_forward = False
        if self.joint_units is not None and not self.expects_backward:
            self.joint_units.end_forward()
        self._take_back(0)
        if self._is_offloaded and not torch.is_grad_enabled():
            # order: the gathers' transfers before the host goes on, because no backward will wait for them and the
            # host may write the shards
            self.streams.host_waits_for(self.streams.gather.record_event())

    # --- memory ---------------------------------------------------------------------------------------------------

    def make_room(self, unit: Unit, prefetch: bool) -> None:
        """Takes back memory that compute has left before ``unit`` is gathered.

        A gather on demand may run beside the unit computed now, whose own memory is then the last one leaving; a
        prefetch is one ahead already.
        """
        if not (self.in_forward or self.in_backward):
            # order: writes to the shards before this gather, because no step began that would have waited for them
            self.streams.gather.wait_compute()
        if self._leaving:
            self._take_back(0 if prefetch or any(leaving is unit for leaving, _ in self._leaving) else 1)

    def free_after_compute(self, unit: Unit) -> None:
        """Frees a unit's full parameters, as soon as the compute stream has passed them."""
        if self.streams.host_runs_ahead:
            self._leaving.append((unit, self.streams.record_compute()))
        else:
            unit.buffers.free()

    def _take_back(self, keep: int) -> None:
        while len(self._leaving) > keep:
            gone, event = self._leaving.popleft()
            # order: compute's last use before the memory goes back to the lane, because the next gather writes it
            self.streams.gather.wait_event(event)
            # To the lane it was taken on, whatever stream is current.
            gone.buffers.free()

    # --- backward -------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        self.in_backward = True
        self.agreement.begin_backward()
        queue_end_of_backward(_EndOfBackward(self))
        if self.joint_units is not None:
            self.joint_units.begin_backward()

    def prefetch_before(self, unit: Unit, visit: Visit) -> None:
        """Gathers ahead what this backward uses next."""
        if unit.backward_prefetch is not None:
            for chosen in unit.backward_prefetch:
                chosen.issue_gather(trace.IN_PRE_BACKWARD, prefetch=True)
        elif (next_used := self._next_in_backward(unit, visit)) is not None:
            for needed in next_used.needs:
                if needed.gathers_in_backward:
                    needed.issue_gather(trace.IN_PRE_BACKWARD, prefetch=True)

    def _next_in_backward(self, unit: Unit, visit: Visit) -> Unit | None:
        """The unit that this backward comes to after ``visit``, a pass of ``unit``."""
        if visit.place is None:
            return None
        before = visit.before
        if (
            before is not None
            and before.place == visit.place - 1
            and before.hooks.unit is not unit
            and backward_executes(visit.input_node)
        ):
            # In a chain of units one look at the graph tells; otherwise parameters do, by their gradients.
            return before.hooks.unit
        number = visit.window.before(visit.place, partial(_is_reached, visit.family))
        return None if number is None else visit.family[number]()

    def start_reduce(
        self,
        plan: ReducePlan,
        settings: ReduceSettings,
        gradients: list[torch.Tensor | None],
        present: Presence,
        max_inputs: int,
        codes: tuple[int, int],
    ) -> None:
        """Starts a reduce, once those before it have made room for it.

        As many may be waiting for their own row as there may be input buffers; with replicas, one more may be waiting
        for theirs meanwhile.
        """
        if self._in_flight:
            self._make_way(plan, max_inputs)
        reduction = plan.begin(settings, self.streams, codes)
        reduction.issue(gradients, present)
        self._in_flight.append(reduction)

    def _make_way(self, plan: ReducePlan, max_inputs: int) -> None:
        in_flight = self._in_flight
        if max_inputs == 1 and plan.mesh.replicate is None:
            while in_flight:
                self._finish_oldest_reduce()
            return
        while any(reduction.plan is plan for reduction in in_flight):
            self._finish_oldest_reduce()
        scattering = [reduction for reduction in in_flight if reduction.is_scattering]
        for reduction in scattering[: max(0, len(scattering) + 1 - max_inputs)]:
            reduction.advance()
        while len(in_flight) > max_inputs or (in_flight and in_flight[0].is_done):
            self._finish_oldest_reduce()

    def _finish_oldest_reduce(self) -> None:
        reduction = self._in_flight.popleft()
        hooked = reduction.finish()
        if self.streams.host_runs_ahead:
            # Compute has waited for the packing of this one, which comes after all of those before it.
            self._let_rows_go()
            self._reduced.append(reduction)
        if hooked:
            self._run_hooks(reduction, hooked)
        if self.is_last_backward and (listener := reduction.listener()) is not None:
            listener(partial(self.streams.host_waits_for, self.streams.reduce.record_event()))

    def _run_hooks(self, reduction: ReduceInFlight, hooked: list[Slot]) -> None:
        stream = self.streams.reduce
        if reduction.plan.is_offloaded:
            # order: the transfer before the hooks, because they read the gradients on the host
            self.streams.host_waits_for(stream.record_event())
        with stream:
            run_user_hooks(hooked)
        stepped = stream.record_event()
        # order: an optimizer that steps in a hook before later gathers, because it writes the shards
        self.streams.gather.wait_event(stepped)
        # order: that optimizer before compute, because compute's allocator reuses gradients that the hook let go of
        self.streams.compute_waits_for(stepped)

    def _let_rows_go(self) -> None:
        while self._reduced:
            self._reduced.popleft().let_rows_go()

    def end_backward(self) -> None:
        """Flushes what no signal has reduced or freed, and lets the compute stream see the gradients."""
        with torch.no_grad():
            self.ends_backward = True
            for unit in reversed(self.units):
                unit.hooks.flush()
            self.ends_backward = False
            while self._in_flight:
                self._finish_oldest_reduce()
            if self.is_last_backward:
                if self.joint_units is not None:
                    self.joint_units.end_backward()
                for unit in self.units:
                    if unit.state is not SHARDED:
                        unit.end_step()
            self._take_back(0)
            reduced = self.streams.reduce.record_event()
            # order: reduced gradients before what follows backward, because clipping and the optimizer read them
            self.streams.compute_waits_for(reduced)
            for channel in self.agreement.channels:
                channel.last_event = reduced
            self._let_rows_go()
            if self._is_offloaded:
                # order: the last transfers before the host goes on, because it steps the optimizer
                self.streams.host_waits_for(reduced)
        self.in_backward = False

    # --- the optimizer --------------------------------------------------------------------------------------------

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.agreement.before_optimizer(optimizer, self.in_backward)

    def after_optimizer(self) -> None:
        self.agreement.after_optimizer()

    # --- recovery -------------------------------------------------------------------------------------------------

    def break_off(self, what: str) -> None:
        """Tells peers that this rank has left the step it was in."""
        if self.is_busy:
            self.agreement.break_off(what)

    def break_off_forward(self, error: BaseException) -> None:
        """The model's forward raised: peers are told, and nothing is kept for a backward that will not come."""
        if self.in_forward:
            self.break_off(f"{type(error).__name__} in forward: {error}"[:500])
            self.in_forward = False
            for unit in self.units:
                unit.hooks.forget_the_rest()
                if unit.state is UNSHARDED and not unit.holders:
                    unit.reshard(trace.IDLE)

    def break_off_backward(self) -> None:
        """A backward raised: peers are told. Units are sharded when the next step begins; users may write till then."""
        self.break_off("its backward raised")
        for unit in self.units:
            if unit.state is UNSHARDED:
                unit.keep()

    def recover(self) -> None:
        """Forgets the last step if it raised before its end, here or on another rank.

        A forward or backward that ends well says so; a wire that left its path has begun a new epoch. What earlier
        micro-batches put by is not part of a forward that raised.
        """
        if self.is_busy or self.agreement.is_broken:
            self.reset(drops_held=self.in_backward)

    def reset(self, drops_held: bool = True) -> None:
        """Forgets a step that broke off: parameters sharded, nothing in flight, no gradient half way."""
        if self.in_backward and inside_backward():
            raise StateError(
                "a step cannot be reset while its backward runs",
                where=f"rank {self.top.rank}",
                fix="let the exception leave backward() first",
            )
        self.break_off("it began a new step before that one had ended")
        with torch.no_grad():
            in_flight = [self._in_flight.popleft() for _ in range(len(self._in_flight))]
            unlanded = {reduction.plan for reduction in in_flight if not reduction.abandon()}
            if self.streams.host_runs_ahead:
                # alive: their rows, until compute has waited for the next reduce
                self._reduced.extend(in_flight)
            for unit in self.units:
                unit.abandon_step(drops_held)
                unit.gradients.forget_reduces(unlanded)
            self._take_back(0)
        if self.joint_units is not None:
            self.joint_units.forget()
        self.agreement.mend()
        self.in_forward = self.in_backward = self.ends_backward = False
