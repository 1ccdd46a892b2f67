"""Autograd: the backward that is running now, and hooks on gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.autograd import Variable

# The number of the backward that this thread is running right now; -1 if it is running none.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def inside_backward() -> bool:
    """Whether this thread is running a backward right now."""
    return current_backward() != -1


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """``register_hook`` for a tensor that is no leaf, without the handle that would remove it: half the price."""
    # Asked for once: Python's side of a node is made for whoever asks, and goes with them.
    node = tensor.grad_fn
    if tensor._backward_hooks is None and node is not None:
        # Handles of other hooks are numbered from 0; and they hold this dict weakly, which a plain dict forbids.
        # Filled item by item, which takes half the time of a list of them.
        hooks: OrderedDict[int, Any] = OrderedDict()
        hooks[-1] = hook
        tensor._backward_hooks = hooks
        node._register_hook_dict(tensor)
    else:
        tensor.register_hook(hook)


def hook_of_gradient(tensor: torch.Tensor) -> Callable[[torch.Tensor], Any] | None:
    """What ``hook_gradient`` hooked on ``tensor``, if it did."""
    hooks = tensor._backward_hooks
    return None if hooks is None else hooks.get(-1)


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs ``callback`` once when the backward that is running now has ended."""
    Variable._execution_engine.queue_callback(callback)


# Whether the backward that is running now executes a node, the ``grad_fn`` of some tensor.
backward_passes: Callable[[Any], bool] = torch._C._will_engine_execute_node


def backward_reaches(leaf: torch.Tensor) -> bool:
    """Whether the backward that is running now gives ``leaf`` a gradient."""
    # A leaf's node is not exposed; a view made in grad mode points to it. ``get_gradient_edge`` does the same at
    # three times the price.
    was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    view_node = leaf.view_as(leaf).grad_fn
    torch._C._set_grad_enabled(was_enabled)
    assert view_node is not None
    node = view_node.next_functions[0][0]
    assert node is not None
    return backward_passes(node)


def unchanged_to_autograd(tensor: torch.Tensor) -> Any:
    """A context in which writing to ``tensor`` does not raise its version."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]


# The hooks a user registered with ``register_post_accumulate_grad_hook``.
post_accumulate_hooks: Callable[[torch.Tensor], Mapping[int, Callable[[torch.Tensor], None]] | None] = cast(
    Any, torch.Tensor
)._post_accumulate_grad_hooks.__get__
