"""Mixed precision of a wrapper's modules: casts of buffers, and modules that compute in full precision all the same.

Parameters, gradients and the inputs of units are cast by the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.engine.tensor_trees import InputSwaps, map_tensors, tensors_in
from shardwise.torch_internals import buffers_of

_BUFFER_DTYPES = "_shardwise_buffer_dtypes"


def cast_buffers(modules: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
    """Casts floating-point buffers, and records their dtypes for state dicts."""
    if dtype is None:
        return
    for module in modules:
        for name, buffer in buffers_of(module).items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                module.__dict__.setdefault(_BUFFER_DTYPES, {})[name] = buffer.dtype
                buffers_of(module)[name] = buffer.to(dtype)


def original_buffer_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes that a module's buffers had before ``cast_buffers``, by name."""
    dtypes: dict[str, torch.dtype] = module.__dict__.get(_BUFFER_DTYPES, {})
    return dtypes


def compute_in_full_precision(module: nn.Module) -> None:
    """Adds hooks that cast a module's inputs to float32 and its output back to the inputs' dtype."""
    casts = _FullPrecisionHooks()
    module.register_forward_pre_hook(casts.before, with_kwargs=True)
    module.register_forward_hook(casts.after, always_call=True)


class _FullPrecisionHooks:
    def __init__(self) -> None:
        # One entry for each running call, with the dtype of its inputs: a module may call itself.
        self._calls: list[tuple[torch.dtype | None, InputSwaps]] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtypes = [tensor.dtype for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
        swaps = InputSwaps((args, kwargs))
        self._calls.append((dtypes[0] if dtypes else None, swaps))
        return swaps.change(partial(_cast, torch.float32), (args, kwargs))

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        dtype, swaps = self._calls.pop()
        swaps.put_back()
        return output if dtype is None else map_tensors(partial(_cast, dtype), output)


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
