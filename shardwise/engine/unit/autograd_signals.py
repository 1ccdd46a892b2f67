"""How a unit learns, from autograd hooks, when backward reaches it and leaves it.

A *visit* is one forward of a unit and the backward through it. It has two signals:

    outputs' gradient arrives   the parameters are needed: gather them, and prefetch the next unit's
    inputs' gradients are done  the parameters are no longer needed: reduce the gradients, free the parameters

The second signal is a hook on views of the inputs; the module gets the views. A module that writes to its input in
place still works: it loses the signal, and is reduced at the end of backward. In a chain of units no view is needed:
the output of one unit is the input of the next, and already carries the first signal of the one before. Where no input
needs a gradient, the signal is that the gradients of all parameters are complete.

Outputs may be written to in place, too, as by an activation function. If the output is a view, autograd then makes a
new node, and the hook stays on a node that backward no longer reaches; a hook on the base covers that case.

With ``create_graph``, a second backward may run through the graph of the first. It reaches a visit through the
gradients of its inputs, before it reaches the outputs.

A forward may also store tensors in attributes of its modules, beside its output: an auxiliary loss, for example.
Backward may reach the unit through one of them first, so they get hooks like outputs.

The order of units is recorded per root forward, in a *window*:

    window of one forward     layers.0   layers.1   layers.2   (root)
    backward is here                                   ▲
    prefetch                                ◀──────────┘   the nearest earlier unit that this backward will use

The graph holds the visit (through its hooks), and the visits of a forward own their window: it is freed with their
graph, so a forward without a backward leaves nothing behind. A visit never references a part of the graph that leads
back to itself: at most the node that produced its input, which backward reaches later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.autograd.graph import register_multi_grad_hook

from shardwise.engine.tensor_trees import NO_SWAPS, InputSwaps, map_tensors, tensors_in
from shardwise.engine.unit.membership import units_of
from shardwise.torch_internals import (
    aside,
    buffers_of,
    current_backward,
    hook_gradient,
    hook_of_gradient,
    unrecorded_view,
)

if TYPE_CHECKING:
    from shardwise.engine.unit.hooks import UnitHooks
    from shardwise.engine.unit.unit import Unit


class Window:
    """The order in which units ran in one root forward. What stands for a unit is the caller's choice."""

    __slots__ = ("__weakref__", "_units")

    def __init__(self) -> None:
        self._units: list[Any] = []

    def ran(self, unit: Any) -> int:
        """Records that ``unit`` has run; returns its position."""
        self._units.append(unit)
        return len(self._units) - 1

    def __contains__(self, unit: Any) -> bool:
        return unit in self._units

    def before(self, position: int, wanted: Callable[[Any], bool]) -> Any:
        """The nearest ``wanted`` unit that ran before ``position``, which a backward there prefetches; None if none."""
        units = self._units
        current = units[position]
        for earlier in range(position - 1, -1, -1):
            unit = units[earlier]
            if unit != current and wanted(unit):
                return unit
        return None


class Visit:
    """One forward of a unit, as its backward will find it."""

    __slots__ = (
        "__weakref__",
        "before",
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
        # Units held for this visit until its forward ends.
        self.held: tuple[Unit, ...] = ()
        self.place: int | None = None
        self.is_open = False
        self.has_input_signal = False
        self.num_outputs = 0
        # The last backward that reached an output which is a view.
        self.seen_in = -1
        # Whether backward may pass through it without reaching a hooked output.
        self.is_unseen = False
        # The visit whose only input is this one's only output: that gradient arrives when the follower is done.
        self.follower: weakref.ref[Visit] | None = None
        # The visit that this one follows, and the node of its output.
        self.before: Visit | None = None
        self.input_node: Any = None

    # --- forward --------------------------------------------------------------------------------------------------

    def signal_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], swaps: InputSwaps) -> Any:
        """Returns the inputs as views whose hooks tell when all their gradients are done.

        In a unit of several modules that run one after the other, backward is done with the first of them last: the
        inputs of the others only announce a second backward.
        """
        is_first = not self.has_input_signal
        done = self.inputs_gradients_are_done if is_first else self.later_inputs_gradients_are_done
        if swaps is NO_SWAPS:
            # The usual input of a block: nothing to walk, nothing to rebuild.
            if not args[0].requires_grad:
                return args, kwargs
            self.has_input_signal = True
            if is_first and self._follows(args[0]):
                return args, kwargs
            view = unrecorded_view(args[0])
            hook_gradient(view, done)
            return (view,), kwargs
        inputs = {id(tensor): tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad}
        if not inputs:
            return args, kwargs
        self.has_input_signal = True
        if is_first and len(inputs) == 1 and self._follows(*inputs.values()):
            return args, kwargs
        views = {key: unrecorded_view(tensor) for key, tensor in inputs.items()}
        signals = list(views.values())
        if len(signals) == 1:
            hook_gradient(signals[0], done)
        else:
            register_multi_grad_hook(signals, done, mode="all")
        return swaps.change(lambda tensor: views.get(id(tensor), tensor), (args, kwargs))

    def _follows(self, tensor: Tensor) -> bool:
        """Whether another visit's first signal can serve as this one's second.

        Only for the first visit that takes the tensor as input: backward reaches that one last, when the gradient is
        complete.
        """
        signal = hook_of_gradient(tensor)
        before = getattr(signal, "__self__", None)
        if not isinstance(before, Visit) or before.window is not self.window:
            return False
        if before.num_outputs != 1 or before.follower is not None or len(before.hooks.unit.modules) > 1:
            return False
        if self.hooks.unit.root.in_backward:
            # A recomputed forward: backward does not run through its graph.
            return False
        before.follower = weakref.ref(self)
        self.before, self.input_node = before, tensor.grad_fn
        return True

    def signal_outputs(self, output: Any, recomputes: bool) -> Any:
        """Hooks the outputs: the first of their gradients tells that backward has reached this visit."""
        for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
            if tensor.requires_grad:
                self._signal_output(tensor)
        unit = self.hooks.unit
        if not self.num_outputs:
            self.expect_unseen_backward()
            return self._with_backward(output) if unit.root.joint_units is not None else output
        # Joint units have no place in the order: they are gathered anyway, and ranks may run different ones.
        if self.place is None and not recomputes and not unit.settings.is_joint:
            self.place = self.window.ran(weakref.ref(unit))
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
        """Hooks tensors that forward stored elsewhere than in its output, unless an earlier visit stored them."""
        for tensor in tensors:
            if tensor.grad_fn is not None:
                before = getattr(hook_of_gradient(tensor), "__self__", None)
                if not isinstance(before, Visit) or before.hooks is not self.hooks:
                    self._signal_output(tensor)

    def expect_unseen_backward(self) -> None:
        """Keeps the parameters gathered: results may be in an object that we cannot look into, or in an attribute.

        A backward from there finds the parameters gathered, and their gradients tell that it has begun.
        """
        gradients = self.hooks.unit.gradients
        self.is_unseen = self.has_input_signal or gradients.num_trainable > 0
        gradients.watch(self.hooks.on_gradient)

    def _with_backward(self, output: Any) -> Any:
        """Gives the output of a root with joint units a backward on a rank that ran nothing trainable."""
        unit = self.hooks.unit
        if unit.position.is_top:
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
        aside(self.hooks.pre_backward)(self)

    def views_gradient_arrives(self, gradient: Tensor) -> None:
        self.seen_in = current_backward()
        self.outputs_gradient_arrives(gradient)

    def bases_gradient_arrives(self, gradient: Tensor) -> None:
        if self.seen_in != current_backward():
            self.views_gradient_arrives(gradient)

    def inputs_gradients_are_done(self, gradients: Any) -> None:
        if is_grad_enabled():
            self._await_second_backward(gradients)
        aside(self.hooks.post_backward)(self)

    def later_inputs_gradients_are_done(self, gradients: Any) -> None:
        if is_grad_enabled():
            self._await_second_backward(gradients)

    def _await_second_backward(self, gradients: Any) -> None:
        """With ``create_graph``: hooks the gradients, because a backward through them needs the parameters again."""
        for gradient in tensors_in(gradients):
            if gradient.requires_grad:
                hook_gradient(gradient, self._gradients_gradient_arrives)

    def _gradients_gradient_arrives(self, gradient: Tensor) -> None:
        aside(self.hooks.pre_backward)(self)


# Attributes that every module has, which never hold a result.
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


class GraphAttributes:
    """The attributes of a unit's modules that hold tensors with a graph after a forward.

    Searching all attributes in every forward would take too long: the first forward finds those that hold such tensors,
    later ones read only these.
    """

    def __init__(self) -> None:
        self._known: dict[nn.Module, list[tuple[dict[str, Any], str]]] = {}

    def graph_tensors(self, module: nn.Module) -> list[Tensor]:
        """Returns the tensors in such attributes of ``module`` and of the modules below it in the same unit."""
        known = self._known.get(module)
        if known is None:
            known = self._known[module] = []
            _look_through(module, known)
        if not known:
            return []
        return [tensor for attributes, name in known for tensor in tensors_in(attributes.get(name))]


def _look_through(module: nn.Module, found: list[tuple[dict[str, Any], str]]) -> None:
    for attributes in (module.__dict__, buffers_of(module)):
        for name, value in attributes.items():
            if name not in _OF_EVERY_MODULE and any(
                tensor.grad_fn is not None for tensor in tensors_in(value)
            ):
                found.append((attributes, name))
    for child in module.children():
        if not units_of(child):
            _look_through(child, found)


class _Tied(torch.autograd.Function):
    """Identity, with a backward that leads nowhere."""

    @staticmethod
    def forward(ctx: Any, end: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None


def with_backward(output: Any) -> Any:
    """Returns ``output`` with a graph, so that ``backward()`` can be called though nothing trainable ran."""
    end = torch.zeros((), requires_grad=True, device="cpu")

    def tie(tensor: Tensor) -> Tensor:
        tied: Tensor = _Tied.apply(end, tensor) if tensor.is_floating_point() else tensor
        return tied

    return map_tensors(tie, output)
