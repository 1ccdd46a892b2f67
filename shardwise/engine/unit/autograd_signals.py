"""A *pass* is one forward of a unit and the backward through it. Its signals:

    outputs' gradient arrives   the weights are needed: gather them, and prefetch the next
    inputs' gradients are done  the weights are no longer needed: reduce what has come in, free

The second signal is a hook on views of the inputs, which are passed on in their place; a module that writes to its
input in place keeps working (it loses the signal, and is served at the end of backward). In a chain of units no view is
needed: what one unit gives out and the next takes in has a hook already, the first signal of the one before. Where no
input needs a gradient, complete gradients of all parameters are the signal instead.

Outputs may be written to in place, too (an activation function does). Of a view, autograd then makes another node, and
the hook stays with the one that backward no longer comes to; what it is a view of has a hook for that case.

A backward that builds a graph (``create_graph``) may be followed by one through it: it comes to a pass by the gradients
of its inputs, before it comes to its outputs.

The graph holds the pass (through its hooks) and the pass holds its window. A pass holds nothing of the graph that leads
back to itself: at most the node that its input came from, which backward reaches later.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor, is_grad_enabled
from torch.autograd.graph import register_multi_grad_hook

from shardwise.engine.step.joint_units import with_backward
from shardwise.engine.tensor_trees import InputSwaps, tensors_in
from shardwise.plan.schedule import Window
from shardwise.torch_internals import (
    current_backward,
    do_aside,
    hook_gradient,
    hook_of_gradient,
    unrecorded_view,
)

if TYPE_CHECKING:
    from shardwise.engine.unit.hooks import UnitHooks
    from shardwise.engine.unit.unit import Unit


class Visit:
    """One forward of a unit, as its backward will find it."""

    __slots__ = (
        "__weakref__",
        "before",
        "family",
        "follower",
        "has_input_signal",
        "held",
        "hooks",
        "input_node",
        "is_open",
        "is_unseen",
        "num_outputs",
        "place",
        "seen_in",
        "window",
    )

    def __init__(self, hooks: UnitHooks, window: Window) -> None:
        self.hooks = hooks
        self.window = window
        # The units that the window's numbers stand for; another root may adopt this unit before backward comes.
        self.family = hooks.unit.root.family
        # Units that forward holds for this pass, until it ends.
        self.held: tuple[Unit, ...] = ()
        self.place: int | None = None
        self.is_open = False
        self.has_input_signal = False
        self.num_outputs = 0
        # The last backward that came to an output which is a view.
        self.seen_in = -1
        # Whether there may be a backward through it that no output of it will announce.
        self.is_unseen = False
        # The pass whose one input is this one's one output: that gradient arrives when the follower is done.
        self.follower: weakref.ref[Visit] | None = None
        # The pass that this one follows, and the node of what it gave out.
        self.before: Visit | None = None
        self.input_node: Any = None

    # --- forward --------------------------------------------------------------------------------------------------

    def signal_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], swaps: InputSwaps) -> Any:
        """Passes the inputs on as views of themselves that tell when all their gradients are done."""
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            # What most blocks take: nothing to walk, nothing to rebuild.
            if not args[0].requires_grad:
                return args, kwargs
            self.has_input_signal = True
            if self._follows(args[0]):
                return args, kwargs
            view = unrecorded_view(args[0])
            hook_gradient(view, self.inputs_gradients_are_done)
            return (view,), kwargs
        inputs = {id(tensor): tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad}
        if not inputs:
            return args, kwargs
        self.has_input_signal = True
        if len(inputs) == 1 and self._follows(*inputs.values()):
            return args, kwargs
        views = {key: unrecorded_view(tensor) for key, tensor in inputs.items()}
        signals = list(views.values())
        if len(signals) == 1:
            hook_gradient(signals[0], self.inputs_gradients_are_done)
        else:
            register_multi_grad_hook(signals, self.inputs_gradients_are_done, mode="all")
        return swaps.change(lambda tensor: views.get(id(tensor), tensor), (args, kwargs))

    def _follows(self, tensor: Tensor) -> bool:
        """Whether another pass's first signal can serve as this one's second.

        For the first that takes the tensor in: backward comes to it last, when the gradient is complete.
        """
        signal = hook_of_gradient(tensor)
        before = getattr(signal, "__self__", None)
        if not isinstance(before, Visit) or before.window is not self.window:
            return False
        if before.num_outputs != 1 or before.follower is not None or len(before.hooks.unit.modules) > 1:
            return False
        if self.hooks.unit.root.in_backward:
            # A forward that is run again: its graph is not the one that backward goes through.
            return False
        before.follower = weakref.ref(self)
        self.before, self.input_node = before, tensor.grad_fn
        return True

    def signal_outputs(self, output: Any, recomputes: bool) -> Any:
        """Hooks the outputs, whose gradient tells that backward has come to this pass."""
        for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
            if tensor.requires_grad:
                self._signal_output(tensor)
        unit = self.hooks.unit
        if not self.num_outputs:
            self.expect_unseen_backward()
            return self._with_backward(output) if unit.root.joint_units is not None else output
        # Joint units have no place in the order: they are there, and ranks may run different ones.
        if self.place is None and not recomputes and not unit.is_joint:
            self.place = self.window.ran(unit.number)
        if not self.has_input_signal:
            unit.gradients.watch(self.hooks.on_gradient)
        return output

    def _signal_output(self, tensor: Tensor) -> None:
        self.num_outputs += 1
        base = tensor._base
        if base is None or base.grad_fn is None:
            hook_gradient(tensor, self.outputs_gradient_arrives)
        else:
            hook_gradient(tensor, self.views_gradient_arrives)
            base.register_hook(self.bases_gradient_arrives)

    def signal_side_outputs(self, tensors: list[Tensor]) -> None:
        """Hooks what forward has left elsewhere than in its output, unless an earlier pass has left it there."""
        for tensor in tensors:
            if tensor.grad_fn is not None:
                before = getattr(hook_of_gradient(tensor), "__self__", None)
                if not isinstance(before, Visit) or before.hooks is not self.hooks:
                    self._signal_output(tensor)

    def expect_unseen_backward(self) -> None:
        """What was computed may have left in an object that we cannot look into, or as somebody's attribute.

        Its backward then finds the parameters where they are, and their gradients tell that it has begun.
        """
        gradients = self.hooks.unit.gradients
        self.is_unseen = self.has_input_signal or gradients.num_trainable > 0
        gradients.watch(self.hooks.on_gradient)

    def _with_backward(self, output: Any) -> Any:
        """A rank that has run nothing that is trained takes part in backward all the same, if the root may part."""
        unit = self.hooks.unit
        if unit.is_top:
            output = with_backward(output)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    hook_gradient(tensor, self.outputs_gradient_arrives)
        return output

    # --- backward -------------------------------------------------------------------------------------------------

    def outputs_gradient_arrives(self, gradient: Tensor) -> None:
        follower = self.follower() if self.follower is not None else None
        if follower is not None:
            follower.inputs_gradients_are_done(gradient)
        do_aside(self.hooks.pre_backward, self)

    def views_gradient_arrives(self, gradient: Tensor) -> None:
        self.seen_in = current_backward()
        self.outputs_gradient_arrives(gradient)

    def bases_gradient_arrives(self, gradient: Tensor) -> None:
        if self.seen_in != current_backward():
            self.views_gradient_arrives(gradient)

    def inputs_gradients_are_done(self, gradients: Any) -> None:
        if is_grad_enabled():
            self._await_second_backward(gradients)
        do_aside(self.hooks.post_backward, self)

    def _await_second_backward(self, gradients: Any) -> None:
        """With ``create_graph``: a backward through these gradients needs the weights that they were computed with."""
        for gradient in tensors_in(gradients):
            if gradient.requires_grad:
                hook_gradient(gradient, self._gradients_gradient_arrives)

    def _gradients_gradient_arrives(self, gradient: Tensor) -> None:
        do_aside(self.hooks.pre_backward, self)
