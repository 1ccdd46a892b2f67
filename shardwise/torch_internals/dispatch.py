"""Dispatch modes and libraries of kernels: running the engine's own work unseen by what records a forward."""

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


def view_aside(tensor: torch.Tensor) -> torch.Tensor:
    """A view of all of ``tensor``, unseen by modes that record a forward: run again, it may need none."""
    if _dispatch_modes():
        with _unrecorded():
            return tensor.view_as(tensor)
    return tensor.view_as(tensor)


def defaults_of(op: str) -> tuple[Any, ...]:
    """The default value of each argument of an operation; None for those that have none."""
    namespace, name = op.split("::")
    schema = getattr(getattr(torch.ops, namespace), name).default._schema
    return tuple(argument.default_value for argument in schema.arguments)


def passing_library(namespace: str) -> Any:
    """A library of kernels that goes when the context ends, and its kernels with it."""
    return torch.library._scoped_library(namespace, "IMPL")


def modes_are_watching() -> bool:
    """Whether a dispatch mode is on, such as one that counts collectives."""
    return torch._C._len_torch_dispatch_stack() > 0


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Runs collectives past torch's dispatch modes, so that control traffic is not counted as the model's."""
    with _disable_current_modes():
        yield


# Modes that watch every operation of a forward, to replay it or to save what it writes to.
_RECORDING_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode, _CloneArgBeforeMutateMode)


_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def do_aside(work: Callable[[A], R], given: A) -> R:
    """Does the engine's own work, which is no part of what the model computes.

    Recorded with a forward, it would be missed or met again when that is replayed; and inside a transform of
    ``torch.func`` it would act on tensors of that transform. Whoever counts collectives still sees them.
    """
    if _dispatch_modes() or peek_interpreter_stack() is not None:
        with _unrecorded(), temporarily_clear_interpreter_stack():
            return work(given)
    return work(given)


@contextmanager
def _unrecorded() -> Iterator[None]:
    modes = []
    while torch._C._len_torch_dispatch_stack():
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
