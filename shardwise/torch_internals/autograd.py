"""Autograd: the backward that is running now, and hooks on gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.autograd import Variable

# Returns the id of the backward that this thread is running, or -1.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def inside_backward() -> bool:
    """Returns whether this thread is running a backward."""
    return current_backward() != -1


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Registers a hook on a non-leaf tensor like ``register_hook``, without a handle to remove it: twice as fast."""
    # Read once: each access creates a Python object for the node.
    node = tensor.grad_fn
    if tensor._backward_hooks is None and node is not None:
        # Not a plain dict: handles of other hooks, which are numbered from 0, hold it weakly. Item assignment takes
        # half the time of passing a list.
        hooks: OrderedDict[int, Any] = OrderedDict()
        hooks[-1] = hook
        tensor._backward_hooks = hooks
        node._register_hook_dict(tensor)
    else:
        tensor.register_hook(hook)


def hook_of_gradient(tensor: torch.Tensor) -> Callable[[torch.Tensor], Any] | None:
    """Returns the hook that ``hook_gradient`` registered on ``tensor``, if any."""
    hooks = tensor._backward_hooks
    return None if hooks is None else hooks.get(-1)


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs ``callback`` once, at the end of the backward that is running."""
    Variable._execution_engine.queue_callback(callback)


# Returns whether the running backward executes a node, the ``grad_fn`` of some tensor.
backward_executes: Callable[[Any], bool] = torch._C._will_engine_execute_node


def backward_reaches(leaf: torch.Tensor) -> bool:
    """Returns whether the running backward computes a gradient of ``leaf``."""
    # A leaf's node is not exposed, but a view created in grad mode points to it. ``get_gradient_edge`` does the same
    # and takes three times as long. A tensor subclass may have no views.
    was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    follower = leaf.view_as(leaf) if type(leaf) is torch.nn.Parameter else _Follower.apply(leaf)
    torch._C._set_grad_enabled(was_enabled)
    node = follower.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert node is not None
    try:
        return backward_executes(node)
    except RuntimeError:
        # torch has no answer where ``autograd.grad`` was asked for this very gradient.
        return True


class _Follower(torch.autograd.Function):
    """Makes a tensor whose node points to its input's, without any operation on the input."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None


def preserved_version(tensor: torch.Tensor) -> Any:
    """Returns a context in which writing to ``tensor`` does not increment its version."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]


# Returns the hooks registered with ``register_post_accumulate_grad_hook``.
post_accumulate_hooks: Callable[[torch.Tensor], Mapping[int, Callable[[torch.Tensor], None]] | None] = cast(
    Any, torch.Tensor
)._post_accumulate_grad_hooks.__get__
