"""The hooks of a unit: what happens before and after its modules' forwards, and as backward reaches and leaves it.

An API calls ``pre_forward`` and ``post_forward`` around each forward; autograd calls the rest through the signals of
``autograd_signals``. A unit whose backward gave no signal is reduced and freed in ``flush``, when backward ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

# Imported by name because every unit uses them in every step: attribute look-ups on ``torch`` are slow.
import torch
from torch import Tensor, is_grad_enabled, nn

from shardwise import trace
from shardwise.engine.tensor_trees import (
    NO_SWAPS,
    InputSwaps,
    cast_inputs,
    change_inputs,
    map_tensors,
    tensors_in,
)
from shardwise.engine.unit.autograd_signals import GraphAttributes, Visit
from shardwise.engine.unit.unit import Unit
from shardwise.planning.lifecycle import GATHERING, KEEP, UNSHARDED
from shardwise.torch_internals import aside, current_backward, inside_backward, untraced


def _weak_hook(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Returns a hook that does not keep its owner alive.

    torch holds a parameter's hooks where Python's garbage collector cannot see them: a strong reference back to the
    parameter would leak the whole model and its process groups.
    """
    reference = weakref.WeakMethod(method)

    def call(param: Tensor) -> None:
        alive = reference()
        if alive is not None:
            aside(alive)(param)

    return call


def _without_parameters(unit: Unit, output: Any) -> Any:
    """Copies outputs that are parameters of the unit, or views of them: ``reshard`` frees their memory."""
    is_freed = unit.buffers.shares_memory
    if type(output) is Tensor:
        return output.clone() if is_freed(output) else output
    if any(_is_plain(tensor) and is_freed(tensor) for tensor in tensors_in(output)):
        return map_tensors(
            lambda tensor: tensor.clone() if _is_plain(tensor) and is_freed(tensor) else tensor, output
        )
    return output


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor or type(tensor) is nn.Parameter


class UnitHooks:
    """The hooks of one unit on its modules, parameters and activations."""

    def __init__(self, unit: Unit, companions: tuple[Unit, ...] = ()) -> None:
        self.unit = unit
        # Units of the same modules on other meshes; they are among the unit's ``needs``, and have no visits of their
        # own.
        self.companions = companions
        # The calls that are running, the innermost last: a module may call itself. Each has its visit, None for a unit
        # that needs no gather, and the inputs that were swapped for it.
        self._calls: list[tuple[Visit | None, InputSwaps]] = []
        self._attributes = GraphAttributes()
        self._open_visits: list[Visit] = []
        # How many gradients have arrived in the backward that opened the first of those visits.
        self._arrived = 0
        self._backward = -1
        self._owes_event = False
        # A unit of several modules is gathered for the first of them and released after the last: the modules that
        # are still to run in this forward of the model, and the visit that they share.
        self._modules_to_run: set[nn.Module] = set()
        self._shared_visit: Visit | None = None
        self.on_gradient = _weak_hook(self._gradient_arrived)
        self.has_several = len(unit.modules) > 1
        device = unit.mesh.device
        # On a CPU inputs need no move.
        self._input_device = None if device.type == "cpu" else device
        self.read_settings()

    def read_settings(self) -> None:
        """Reads what is copied from the unit's settings."""
        precision = self.unit.settings.precision
        self._input_dtype = precision.param_dtype if precision.cast_forward_inputs else None
        self._output_dtype = precision.output_dtype

    # --- forward --------------------------------------------------------------------------------------------------
    # An API calls these around each forward of a module of the unit, outside of what torch.compile traces:
    # ``pre_forward``, then ``post_forward``, or ``forward_raised`` if either the forward or ``post_forward`` raised.

    @property
    def is_running(self) -> bool:
        """Whether a forward of one of the unit's modules is running."""
        return bool(self._calls)

    @untraced
    def pre_forward(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        input_dtype: torch.dtype | None = None,
    ) -> Any:
        """Gathers the parameters; returns the inputs moved, cast and hooked. If it raises, the call has not begun.

        ``input_dtype`` is the dtype to cast inputs to in this call, unless the unit's policy names one.
        """
        unit, root = self.unit, self.unit.root
        # Only inputs of the whole model may be on another device.
        enters = self._input_device is not None and (unit.position.is_top or not root.in_forward)
        visit: Visit | None
        if root.in_backward and inside_backward():
            visit = aside(self._gather_for_recompute)()
        elif self.has_several and self._calls:
            # A module that calls itself, or another of the unit's: one visit for all of them.
            visit = self._calls[-1][0]
        elif self._modules_to_run:
            visit = self._shared_visit
        else:
            visit = aside(self._begin_forward)(module)
        is_usual = not kwargs and len(args) == 1 and isinstance(args[0], Tensor)
        swaps = NO_SWAPS if is_usual else InputSwaps((args, kwargs))
        self._calls.append((visit, swaps))
        try:
            if enters:
                args, kwargs = change_inputs(
                    lambda tensor: tensor.to(self._input_device), args, kwargs, swaps
                )
            dtype = self._input_dtype or input_dtype
            if dtype is not None:
                args, kwargs = cast_inputs(dtype, args, kwargs, swaps)
            if visit is not None and is_grad_enabled():
                args, kwargs = visit.signal_inputs(args, kwargs, swaps)
        except BaseException as error:
            self.forward_raised(module, error)
            raise
        return args, kwargs

    def _begin_forward(self, module: nn.Module) -> Visit | None:
        """Begins a visit: holds and gathers what the unit's modules show, and prefetches."""
        unit = self.unit
        is_outermost = unit.position.is_top and not self._calls
        is_within_model = unit.root.in_forward and not unit.position.is_top
        visit: Visit | None = None
        try:
            if is_outermost:
                unit.root.begin_forward()
            elif not unit.root.in_forward:
                unit.root.begin_unit_alone()
            if unit.needs or unit.position.is_top:
                visit = Visit(self, unit.root.window)
                while visit.held is not unit.needs:
                    # A gather may find parameters tied to another unit's, and add that unit to ``needs``.
                    needs = unit.needs
                    for needed in needs[len(visit.held) :]:
                        needed.gathered.hold_for_forward()
                        visit.held = (*visit.held, needed)
                        needed.issue_gather(trace.IN_FORWARD, in_forward=True)
                    visit.held = needs
            if unit.settings.forward_prefetch and unit.root.in_forward:
                self._prefetch_in_forward()
            for needed in unit.needs:
                needed.wait_gather()
        except BaseException as error:
            for needed in () if visit is None else visit.held:
                if needed.gathered.release():
                    needed.abandon_gather()
            if is_outermost:
                unit.root.break_off_forward(error)
            raise
        if self.has_several:
            # Within a forward of the model the other modules follow; a call outside of it stands alone.
            self._modules_to_run = set(unit.modules) if is_within_model else {module}
            self._shared_visit = visit
        recorder = unit.settings.recorder
        if recorder is not None and unit.slots:
            recorder.add(trace.PRE_FORWARD, unit.name, trace.IN_FORWARD, unit.rank)
        return visit

    def _prefetch_in_forward(self) -> None:
        for chosen in self.unit.settings.forward_prefetch:
            chosen.issue_gather(trace.IN_FORWARD, in_forward=True, prefetch=True)
            if chosen.root is not self.unit.root:
                # Another root: the end of this forward will not free it if it stays unused.
                chosen.gathered.keep()

    def _gather_for_recompute(self) -> Visit | None:
        """Gathers for activation checkpointing, which runs forward again inside backward; that backward frees."""
        unit = self.unit
        for needed in unit.needs:
            needed.issue_gather(trace.IN_PRE_BACKWARD)
            needed.wait_gather()
            needed.gathered.reveal()
        return Visit(self, unit.root.window) if unit.needs else None

    def _cast_output(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._output_dtype) if tensor.is_floating_point() else tensor

    @untraced
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Hooks the outputs and releases the parameters; returns the outputs, cast and hooked."""
        unit, (visit, swaps) = self.unit, self._calls[-1]
        recomputes = unit.root.in_backward and inside_backward()
        if self._output_dtype is not None:
            output = map_tensors(self._cast_output, output)
        for needed in unit.needs:
            if needed.settings.after_forward is not KEEP:
                output = _without_parameters(needed, output)
        if visit is not None and is_grad_enabled():
            found = self._attributes.graph_tensors(module)
            if swaps is not NO_SWAPS:
                found = found + swaps.written()
            if found:
                inputs = {id(tensor) for tensor in (*args, *swaps.known)}
                visit.signal_side_outputs([tensor for tensor in found if id(tensor) not in inputs])
            output = visit.signal_outputs(output, recomputes)
        if not recomputes:
            self._modules_to_run.discard(module)
            if self._is_last_call():
                aside(self._end_forward)(visit)
        self._leave_call()
        return output

    def _leave_call(self) -> None:
        _, swaps = self._calls.pop()
        if swaps is not NO_SWAPS:
            swaps.put_back()

    def _is_last_call(self) -> bool:
        """Whether the call that is about to return is the last of its visit."""
        return not self._modules_to_run and (
            len(self._calls) < 2 or self._calls[-2][0] is not self._calls[-1][0]
        )

    def _end_forward(self, visit: Visit | None) -> None:
        unit = self.unit
        self._shared_visit = None
        recorder = unit.settings.recorder
        if recorder is not None and unit.slots:
            recorder.add(trace.POST_FORWARD, unit.name, trace.IN_FORWARD, unit.rank)
        if visit is not None:
            self._release(visit)
        if unit.position.is_top and len(self._calls) < 2:
            unit.root.end_forward()

    def _release(self, visit: Visit, has_raised: bool = False) -> None:
        """Frees what a visit held in forward, unless somebody else holds it or it is kept for backward."""
        held, visit.held = visit.held, ()
        for needed in held:
            if visit.is_unseen and not has_raised:
                needed.gathered.awaits_unseen_backward = True
            if needed.gathered.release():
                # What had been computed when forward raised may still be used in this step.
                is_kept = is_grad_enabled() if has_raised else needed.gathered.awaits_unseen_backward
                if is_kept:
                    needed.gathered.keep(is_hidden=not is_grad_enabled())
                elif needed.keeps_after_forward():
                    is_hidden = needed.form.hides_kept and needed.settings.after_forward is not KEEP
                    needed.gathered.keep(is_hidden=is_hidden or not is_grad_enabled())
                else:
                    needed.reshard(trace.IN_FORWARD, keep_part=not has_raised)

    def end_partial_forward(self) -> None:
        """Ends the unit's forward when the model's forward ends without having run all of the unit's modules."""
        if self._modules_to_run:
            self._modules_to_run.clear()
            self._end_forward(self._shared_visit)

    def release_partial_forward(self) -> None:
        """Releases the unit when the model's forward raised: its modules that were still to run will not."""
        if self._modules_to_run:
            self._modules_to_run.clear()
            shared, self._shared_visit = self._shared_visit, None
            if shared is not None:
                self._release_after_error(shared)

    def forward_raised(self, module: nn.Module, error: BaseException) -> None:
        """Releases the unit after its forward raised: the caller may catch the exception and go on.

        If the whole model's forward raised, peers are told.
        """
        visit, root = self._calls[-1][0], self.unit.root
        if not (root.in_backward and inside_backward()):
            self._modules_to_run.discard(module)
            if self._modules_to_run and visit is not None and is_grad_enabled():
                # Other modules follow, and this one may have stored something that backward starts from.
                visit.expect_unseen_backward()
            if self._is_last_call():
                self._shared_visit = None
                if visit is not None:
                    aside(self._release_after_error)(visit)
        self._leave_call()
        if self.unit.position.is_top and not self._calls:
            root.break_off_forward(error)

    def _release_after_error(self, visit: Visit) -> None:
        """Releases what a visit held after its forward raised; watches for gradients of what it had computed."""
        if is_grad_enabled():
            self.unit.gradients.watch(self.on_gradient)
        self._release(visit, has_raised=True)

    # --- backward -------------------------------------------------------------------------------------------------

    def pre_backward(self, visit: Visit) -> None:
        """Gathers the parameters when backward reaches the outputs of a visit, and prefetches for the next unit."""
        unit = self.unit
        root = unit.root
        if not root.in_backward:
            root.begin_backward()
        if visit.is_open:
            return
        visit.is_open = True
        if not self._open_visits:
            self._arrived = 0
            self._backward = current_backward()
            if unit.state is not UNSHARDED and unit.gradients.have_come():
                unit.gradients.check_were_announced()
        self._open_visits.append(visit)
        root.reached = visit
        for needed in unit.needs:
            if needed.root is not root and not needed.root.in_backward:
                # No model around both has run yet; this backward's end must end that root's backward, too.
                needed.root.begin_backward()
            needed.gathered.hold()
            if needed.settings.gathers_in_backward:
                needed.issue_gather(trace.IN_PRE_BACKWARD)
        for needed in unit.needs:
            needed.wait_gather()
        root.free_before_prefetch()
        recorder = unit.settings.recorder
        if recorder is not None and unit.slots:
            recorder.add(trace.PRE_BACKWARD, unit.name, trace.IN_PRE_BACKWARD, unit.rank)
        if not unit.settings.prefetches_late:
            root.prefetch_before(unit, visit)

    def post_backward(self, visit: Visit) -> None:
        """Frees and reduces when the inputs' gradients are done: backward has left this visit."""
        unit = self.unit
        if not visit.is_open:
            if visit.is_unseen:
                # Only now do we know that backward has passed the unit.
                unit.gathered.awaits_unseen_backward = False
            return
        self._close(visit)
        unit.gradients.reduce()
        for companion in self.companions:
            companion.gradients.reduce()
        if unit.settings.recorder is not None:
            self._report(unit.settings.recorder)
        if unit.settings.prefetches_late and unit.root.reached is visit:
            # Otherwise backward has been in what ran inside this unit, which is before it in the order of forward.
            unit.root.prefetch_before(unit, visit)

    def _gradient_arrived(self, param: Tensor) -> None:
        """Counts complete gradients; where no input gives a signal, the last one starts the reduce.

        Backward may still need a frozen parameter, or one tied to another unit's: then the parameters stay gathered
        until backward ends.
        """
        if not self.unit.root.in_backward:
            self.unit.root.begin_backward()
        if not self._open_visits or current_backward() != self._backward:
            # A reentrant checkpoint runs a backward inside this one: more gradients of the parameter may follow.
            return
        self._arrived += 1
        if self._arrived != self.unit.gradients.num_trainable:
            return
        if any(visit.has_input_signal for visit in self._open_visits):
            return
        self._owes_event = True
        if not self.unit.gradients.some_are_frozen and len(self.unit.needs) == 1:
            for visit in tuple(self._open_visits):
                self._close(visit)
        self.unit.gradients.reduce()

    def flush(self) -> None:
        """Reduces, frees and reports at the end of backward what gave no signal."""
        unit = self.unit
        if unit.state is GATHERING and unit.buffers.gather.is_prefetch and unit.gradients.have_come():
            unit.gradients.check_were_announced()
        if self._open_visits:
            self._owes_event = True
        for visit in tuple(self._open_visits):
            self._close(visit)
        if unit.gradients.reduce():
            self._owes_event = True
        if self._owes_event:
            unit.gathered.awaits_unseen_backward = False
        unit.gradients.reduce_the_rest()
        if self._owes_event and unit.settings.recorder is not None:
            self._report(unit.settings.recorder)
        self._owes_event = False

    def _report(self, recorder: trace.Recorder) -> None:
        unit = self.unit
        if unit.slots:
            recorder.add(trace.POST_BACKWARD, unit.name, trace.IN_POST_BACKWARD, unit.rank)

    def _close(self, visit: Visit) -> None:
        visit.is_open = False
        self._open_visits.remove(visit)
        for needed in self.unit.needs:
            if needed.gathered.release():
                if needed.settings.frees_after_backward:
                    needed.reshard(trace.IN_POST_BACKWARD)
                else:
                    needed.gathered.keep(is_hidden=not needed.stays_in_view)

    def forget(self) -> None:
        """Drops what a step that raised left behind."""
        for visit in self._open_visits:
            visit.is_open = False
        self._open_visits.clear()
        self._calls.clear()
        self._modules_to_run.clear()
        self._shared_visit = None
        self._owes_event = False
        self._arrived = 0
