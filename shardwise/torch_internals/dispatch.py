"""Dispatch modes, kernel libraries and torch.compile; and keeping the engine's own work out of what they record."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import _CloneArgBeforeMutateMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

A = TypeVar("A")
R = TypeVar("R")


# The kernels that ``scaled_dot_product_attention`` chooses from on CUDA.
flash_attention: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention: Callable[..., Any] = torch.ops.aten._scaled_dot_product_efficient_attention

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


# --- torch.compile ------------------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Excludes ``function`` and everything it calls from torch.compile, at no cost for eager calls."""
    return _untraced(function, _FrameAction.SKIP)


def untraced_itself(function: F) -> F:
    """Excludes ``function`` from torch.compile, but not what it calls."""
    return _untraced(function, _FrameAction.DEFAULT)


def _untraced(function: F, below: _FrameAction) -> F:
    # What ``torch.compiler.disable`` does, without its wrapper around every call.
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, below))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "shardwise gathers and reduces here"  # type: ignore[attr-defined]
    return function


def is_within_compiled() -> bool:
    """Returns whether this thread is inside a call of a compiled function."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == dynamo.__file__:
            return True
        frame = frame.f_back
    return False
