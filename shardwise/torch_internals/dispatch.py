"""Dispatch modes and kernel libraries; and running the engine's own work unseen by modes that record a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import _CloneArgBeforeMutateMode
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

A = TypeVar("A")
R = TypeVar("R")


num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def unrecorded_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of ``tensor``, unseen by modes that record a forward: its replay may need no such view."""
    if num_dispatch_modes():
        with _unrecorded():
            return tensor.view_as(tensor)
    return tensor.view_as(tensor)


def defaults_of(op: str) -> tuple[Any, ...]:
    """Returns the default values of an operator's arguments; None for those without one."""
    namespace, name = op.split("::")
    schema = getattr(getattr(torch.ops, namespace), name).default._schema
    return tuple(argument.default_value for argument in schema.arguments)


def scoped_library(namespace: str) -> Any:
    """Returns a context with a library whose kernels are removed when it ends."""
    return torch.library._scoped_library(namespace, "IMPL")


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Disables dispatch modes, so that control traffic is not counted as the model's."""
    with _disable_current_modes():
        yield


# Modes that record every operation of a forward, to replay it or to save what it overwrites.
_RECORDING_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode, _CloneArgBeforeMutateMode)


def do_aside(work: Callable[[A], R], given: A) -> R:
    """Does work of the engine that is not part of the model's computation, and returns its result.

    If a mode recorded that work with a forward, a replay would repeat it, or miss it; and a transform of ``torch.func``
    would apply to its tensors. Modes that count collectives still see it.
    """
    if num_dispatch_modes() or peek_interpreter_stack() is not None:
        with _unrecorded(), temporarily_clear_interpreter_stack():
            return work(given)
    return work(given)


@contextmanager
def _unrecorded() -> Iterator[None]:
    modes = []
    while num_dispatch_modes():
        modes.append(_pop_mode())
    seen = [mode for mode in reversed(modes) if not isinstance(mode, _RECORDING_MODES)]
    for mode in seen:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in seen:
            _pop_mode()
        for mode in reversed(modes):
            _push_mode(mode)
