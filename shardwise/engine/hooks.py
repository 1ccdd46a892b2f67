"""Where forward and backward touch a unit: its modules' forwards, its parameters' gradients, and its passes' signals.

Whatever gave no signal is flushed when backward ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

# By their own names, because every unit asks for them in every step: ``torch`` may make names up, which is why Python
# searches all of it each time.
from torch import Tensor, is_grad_enabled, nn

from shardwise import trace
from shardwise.engine.passes import Pass
from shardwise.engine.structure import map_tensors, tensors_in
from shardwise.engine.unit import Unit
from shardwise.errors import StateError
from shardwise.plan.lifecycle import GATHERING, UNSHARDED
from shardwise.plan.schedule import KEEP
from shardwise.torch_internals import inside_backward, untraced


def _held_weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A hook that does not keep its owner alive.

    torch holds a parameter's hooks where Python's garbage collector cannot look: a hook that leads back to the
    parameter would keep the whole model, and its process groups, for good.
    """
    reference = weakref.WeakMethod(method)

    def call(param: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(param)

    return call


def _without_parameters(unit: Unit, output: Any) -> Any:
    """Copies outputs that are parameters of the unit, or views of them: their memory goes when it is freed."""
    goes = unit.memory.takes_along
    if type(output) is Tensor:
        return output.clone() if goes(output) else output
    if any(_is_plain(tensor) and goes(tensor) for tensor in tensors_in(output)):
        return map_tensors(
            lambda tensor: tensor.clone() if _is_plain(tensor) and goes(tensor) else tensor, output
        )
    return output


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor or type(tensor) is nn.Parameter


class Hooks:
    """The hooks of one unit on its modules, parameters and activations."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._visit: Pass | None = None
        self._open: list[Pass] = []
        self._arrived = 0
        self._owes_report = False
        # Modules that still have to run in this forward of the model: a unit of several frees after the last.
        self._still_to_run: set[nn.Module] = set()
        self.on_gradient = _held_weakly(self._gradient_arrived)
        precision = unit.precision
        self._input_dtype = precision.param_dtype if precision.cast_forward_inputs else None
        self._output_dtype = precision.output_dtype
        device = unit.mesh.device
        # On a CPU they are there already.
        self._input_device = None if device.type == "cpu" else device

    # --- forward --------------------------------------------------------------------------------------------------
    # A face calls these around each forward of a module of the unit, outside of what torch.compile traces.

    @untraced
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self.unit
        if unit.root.in_backward and inside_backward():
            self._gather_for_recompute()
        elif not self._still_to_run:
            if self._input_device is not None and (unit.root.top is unit or not unit.root.in_forward):
                args, kwargs = self._move_inputs(args, kwargs)
            self._begin_forward(module)
        if self._input_dtype is not None:
            args, kwargs = self._cast_inputs(args, kwargs)
        visit = self._visit
        if visit is not None and not visit.has_input_signal and is_grad_enabled():
            args, kwargs = visit.signal_inputs(args, kwargs)
        return args, kwargs

    def _begin_forward(self, module: nn.Module) -> None:
        unit = self.unit
        if len(unit.modules) > 1:
            # Its other modules follow within the forward of a model around them; a call outside it is for itself.
            self._still_to_run = set(unit.modules) if unit.root.in_forward else {module}
        if unit.root.top is unit:
            unit.root.begin_forward()
        root = unit.root
        if unit.needs or root.top is unit:
            self._visit = Pass(self, root.window)
        for needed in unit.needs:
            if needed.state is UNSHARDED and needed.holders == 0 and (needed.is_unseen or needed.is_stale()):
                needed.reshard(trace.IN_FORWARD)
            needed.holders += 1
            needed.issue_gather(trace.IN_FORWARD, in_forward=True)
        for chosen in unit.forward_prefetch:
            chosen.issue_gather(trace.IN_FORWARD, in_forward=True, prefetch=True)
        for needed in unit.needs:
            needed.wait_gather()
        if unit.recorder is not None and unit.slots:
            unit.recorder.add(trace.PRE_FORWARD, unit.name, trace.IN_FORWARD, unit.rank)

    def _gather_for_recompute(self) -> None:
        """Activation checkpointing runs forward again inside backward: what it gathers, that backward frees."""
        unit = self.unit
        self._visit = Pass(self, unit.root.window) if unit.needs else None
        for needed in unit.needs:
            needed.issue_gather(trace.IN_PRE_BACKWARD)
            needed.wait_gather()

    def _move_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What enters the model comes from wherever batches are made."""
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            return (args[0].to(self._input_device),), kwargs
        return map_tensors(self._move_input, (args, kwargs))

    def _move_input(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._input_device)

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            # What most blocks take, and most often from a block before it that computed in the same dtype.
            return (args if args[0].dtype is self._input_dtype else (self._cast_input(args[0]),)), kwargs
        return map_tensors(self._cast_input, (args, kwargs))

    def _cast_input(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._input_dtype) if tensor.is_floating_point() else tensor

    def _cast_output(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._output_dtype) if tensor.is_floating_point() else tensor

    @untraced
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        unit, visit = self.unit, self._visit
        recomputes = unit.root.in_backward and inside_backward()
        if self._output_dtype is not None:
            output = map_tensors(self._cast_output, output)
        for needed in unit.needs:
            if needed.after_forward is not KEEP:
                output = _without_parameters(needed, output)
        if visit is not None and is_grad_enabled():
            output = visit.signal_outputs(output, recomputes)
        if recomputes:
            return output
        self._still_to_run.discard(module)
        if not self._still_to_run:
            self._end_forward()
        return output

    def _end_forward(self) -> None:
        unit, visit = self.unit, self._visit
        self._visit = None
        if unit.recorder is not None and unit.slots:
            unit.recorder.add(trace.POST_FORWARD, unit.name, trace.IN_FORWARD, unit.rank)
        is_unseen = visit is not None and visit.is_unseen
        for needed in unit.needs:
            needed.holders -= 1
            needed.is_unseen |= is_unseen
            if needed.holders == 0:
                if needed.is_unseen or needed.keeps_after_forward():
                    needed.keep()
                else:
                    needed.reshard(trace.IN_FORWARD, keep_part=True)
        if unit.root.top is unit:
            unit.root.end_forward()

    def end_without_the_rest(self) -> None:
        """The model's forward is over, and some modules of the unit were not in it: they may come by themselves."""
        if self._still_to_run:
            self._still_to_run.clear()
            self._end_forward()

    def broke_off(self, error: BaseException) -> None:
        """A forward of the unit raised: if it was the whole model's, peers are told."""
        root = self.unit.root
        if root.top is self.unit and root.in_forward:
            root.break_off(f"{type(error).__name__} in forward: {error}"[:500])

    # --- backward -------------------------------------------------------------------------------------------------

    def pre_backward(self, visit: Pass) -> None:
        unit = self.unit
        root = unit.root
        if not root.in_backward:
            root.begin_backward()
        if visit.is_open:
            return
        visit.is_open = True
        if not self._open:
            self._arrived = 0
        self._open.append(visit)
        for needed in unit.needs:
            needed.holders += 1
            if needed.gathers_in_backward:
                needed.issue_gather(trace.IN_PRE_BACKWARD)
        for needed in unit.needs:
            needed.wait_gather()
        if unit.recorder is not None and unit.slots:
            unit.recorder.add(trace.PRE_BACKWARD, unit.name, trace.IN_PRE_BACKWARD, unit.rank)
        if not unit.prefetches_late:
            root.prefetch_before(unit, visit)

    def post_backward(self, visit: Pass) -> None:
        """The inputs' gradients are done, so nothing of this pass is left in backward."""
        if not visit.is_open:
            return
        unit = self.unit
        unit.gradients.reduce()
        if unit.recorder is not None:
            self._report(unit.recorder)
        if unit.prefetches_late:
            unit.root.prefetch_before(unit, visit)
        self._close(visit)

    def _gradient_arrived(self, param: Tensor) -> None:
        """Counts complete gradients: all of them let the reduce start where no input gives a signal.

        A frozen sibling may still be waiting for its turn in backward; the weights then stay until backward ends.
        """
        if not self.unit.root.in_backward:
            self.unit.root.begin_backward()
        self._arrived += 1
        if self._arrived != self.unit.gradients.num_trainable or not self._open:
            return
        if any(visit.has_input_signal for visit in self._open):
            return
        self.unit.gradients.reduce()
        self._owes_report = True
        if not self.unit.gradients.some_are_frozen:
            for visit in tuple(self._open):
                self._close(visit)

    def flush(self) -> None:
        """The end of backward: reduces, frees and reports what gave no signal."""
        unit = self.unit
        if unit.prefetched and unit.state is GATHERING and unit.gradients.have_come():
            self._refuse_unannounced_gradients()
        if unit.gradients.reduce() or self._open:
            self._owes_report = True
        unit.gradients.reduce_the_rest()
        if self._owes_report and unit.recorder is not None:
            self._report(unit.recorder)
        for visit in tuple(self._open):
            self._close(visit)
        self._owes_report = False

    def _refuse_unannounced_gradients(self) -> None:
        """They were computed with whatever was in the memory that the weights were on their way to."""
        unit = self.unit
        unit.gradients.drop()
        raise StateError(
            f"backward went through unit '{unit.name}' before its weights were there: its outputs did not tell",
            where=f"end of backward, rank {unit.rank}",
            fix="leave the hooks that outputs of sharded modules carry where they are; where a graph is to be cut, "
            "detach()",
        )

    def _report(self, recorder: trace.Recorder) -> None:
        unit = self.unit
        if unit.slots:
            recorder.add(trace.POST_BACKWARD, unit.name, trace.IN_POST_BACKWARD, unit.rank)

    def _close(self, visit: Pass) -> None:
        visit.is_open = False
        self._open.remove(visit)
        for needed in self.unit.needs:
            needed.holders -= 1
            if needed.holders == 0:
                if needed.frees_after_backward:
                    needed.reshard(trace.IN_POST_BACKWARD)
                else:
                    needed.keep()

    def forget(self) -> None:
        """Drops what a broken-off step left behind."""
        for visit in self._open:
            visit.is_open = False
        self._open.clear()
        self._still_to_run.clear()
        self._visit = None
        self._owes_report = False
        self._arrived = 0
