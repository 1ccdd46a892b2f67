"""Mixed precision of a wrapper's modules: casts of buffers, and modules that compute in full precision all the same.

Parameters, gradients and the inputs of units are cast by the engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.engine.tensor_trees import InputSwaps, map_tensors, tensors_in
from shardwise.engine.unit.unit import Unit
from shardwise.policies import MixedPrecisionPolicy
from shardwise.torch_internals import buffers_of
from shardwise.wrapper.options import MixedPrecision

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


def full_in_eval() -> bool:
    """Whether wrappers made now compute in full precision in eval mode."""
    return os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL", "") == "1"


class EvalPrecision:
    """The precision of one wrapper that computes in full precision in eval mode."""

    def __init__(self, unit: Unit, modules: Iterable[nn.Module], precision: MixedPrecision) -> None:
        self._unit = unit
        self._policy = unit.settings.precision
        self._slots = [(slot, slot.compute_dtype, slot.is_cast) for slot in unit.slots]
        self._modules = list(modules)
        self._buffer_dtype = precision.buffer_dtype
        self._is_full = False

    def follow(self, training: bool) -> None:
        """Switches precision if the module has gone to eval mode, or back; between steps."""
        if self._is_full is not training:
            return
        self._is_full = not training
        for slot, compute_dtype, is_cast in self._slots:
            slot.is_cast = is_cast and training
            slot.compute_dtype = compute_dtype if slot.is_cast else slot.stored_dtype
        self._unit.rebuild(precision=self._policy if training else MixedPrecisionPolicy())
        for module in self._modules:
            for name, dtype in original_buffer_dtypes(module).items():
                buffer = buffers_of(module)[name]
                if buffer is not None:
                    buffers_of(module)[name] = buffer.to(self._buffer_dtype if training else dtype)


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
