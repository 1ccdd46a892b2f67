"""Mixed precision where modules and their inputs meet it: casts of inputs and buffers, modules that are left out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardwise.engine.tensor_trees import InputSwaps, map_tensors, tensors_in
from shardwise.torch_internals import buffers_of

_BUFFER_DTYPES = "_shardwise_buffer_dtypes"


def cast_floats(dtype: torch.dtype, value: Any) -> Any:
    """``value`` with its floating-point tensors in ``dtype``."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def cast_buffers(modules: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
    """Casts floating-point buffers, and remembers what they were for state dicts."""
    if dtype is None:
        return
    for module in modules:
        for name, buffer in buffers_of(module).items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                module.__dict__.setdefault(_BUFFER_DTYPES, {})[name] = buffer.dtype
                buffers_of(module)[name] = buffer.to(dtype)


def own_buffer_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes that a module's buffers had before they were cast."""
    known: dict[str, torch.dtype] = module.__dict__.get(_BUFFER_DTYPES, {})
    return known


def compute_as_stored(module: nn.Module) -> None:
    """Has a module that is left out of mixed precision take its inputs in full precision, and hand back what it got."""
    casts = _Casts()
    module.register_forward_pre_hook(casts.before, with_kwargs=True)
    module.register_forward_hook(casts.after, always_call=True)


class _Casts:
    def __init__(self) -> None:
        # One for each call that is running: a module may call itself.
        self._calls: list[tuple[torch.dtype | None, InputSwaps]] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = [tensor.dtype for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
        swaps = InputSwaps((args, kwargs))
        self._calls.append((given[0] if given else None, swaps))
        return swaps.change(_in_float32, (args, kwargs))

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        dtype, swaps = self._calls.pop()
        swaps.put_back()
        return output if dtype is None else cast_floats(dtype, output)


def _in_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
