"""torch.compile: excludes functions from tracing, and tells whether compiled code is running."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

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
