"""The dispatcher's kernels and modes, and functions that torch.compile leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# The kernels that ``scaled_dot_product_attention`` chooses from on CUDA.
flash_attention: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention: Callable[..., Any] = torch.ops.aten._scaled_dot_product_efficient_attention


def defaults_of(op: str) -> tuple[Any, ...]:
    """Returns the default values of an operator's arguments; None for those without one."""
    namespace, name = op.split("::")
    schema = getattr(getattr(torch.ops, namespace), name).default._schema
    return tuple(argument.default_value for argument in schema.arguments)


def scoped_library(namespace: str) -> Any:
    """Returns a context with a library whose kernels are removed when it ends."""
    return torch.library._scoped_library(namespace, "IMPL")


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
