"""Stepping large tensors block by block: the same arithmetic, on memory that is still in the cache.

On a CPU torch's optimizers make a dozen passes over each tensor, one an operation. What is larger than the cache
comes from memory in every one of them:

    whole    [ m = …             ][ v = …             ][ p = …             ]
    blocks   [ m ][ v ][ p ]  [ m ][ v ][ p ]  [ m ][ v ][ p ]  [ m ][ v ][ p ]

For the time of a step the optimizer is shown blocks, tensors over the same memory with parts of the same state, in
place of the tensors it was given. Blocks begin where vector instructions do, so that every element is stepped by the
instruction that would have stepped it. It is for optimizers that update each element by itself, and for kernels that
run on one thread, as torchrun starts them: several share a tensor out among themselves, and cut it elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["BlockedStep"]

# A block's parameter, gradient and two states come to 2 MB, the second cache of many CPUs. What is no larger than a
# block or two misses it less often, and more calls would cost what is saved.
_BLOCK_BYTES = 512 * 1024
_LEAST_BYTES = 2 * _BLOCK_BYTES


class BlockedStep:
    """Steps one optimizer, its large tensors in blocks; ``step`` is what steps it, its own unless given."""

    def __init__(self, optim: Optimizer, step: Callable[..., Any] | None = None) -> None:
        self._optim = optim
        self._step = step
        self._blocks: dict[Tensor, _Blocks] = {}

    def __call__(self, **kwargs: Any) -> Any:
        if torch.get_num_threads() > 1:
            return (self._step or self._optim.step)(**kwargs)
        groups = self._optim.param_groups
        given = [group["params"] for group in groups]
        shown: list[_Blocks] = []
        try:
            for group, tensors in zip(groups, given, strict=True):
                # Kernels for many tensors at once, or for all operations at once, have passes of their own.
                if not (group.get("foreach") or group.get("fused")):
                    group["params"] = self._in_blocks(tensors, shown)
            return (self._step or self._optim.step)(**kwargs)
        finally:
            for group, tensors in zip(groups, given, strict=True):
                group["params"] = tensors
            for blocks in shown:
                blocks.withdraw(self._optim.state)

    def _in_blocks(self, tensors: list[Tensor], shown: list[_Blocks]) -> list[Tensor]:
        result: list[Tensor] = []
        for tensor in tensors:
            blocks = self._blocks_of(tensor)
            if blocks is None:
                result.append(tensor)
            else:
                blocks.show(tensor, self._optim.state)
                shown.append(blocks)
                result.extend(blocks.parts)
        return result

    def _blocks_of(self, tensor: Tensor) -> _Blocks | None:
        if tensor.numel() * tensor.element_size() < _LEAST_BYTES or tensor.device.type != "cpu":
            return None
        grad = tensor.grad
        if grad is None or grad.layout is not torch.strided or grad.stride() != tensor.stride():
            return None
        # Without state this is the first step, and the optimizer is about to make it, for the whole tensor.
        state = self._optim.state.get(tensor)
        if not state:
            return None
        blocks = self._blocks.get(tensor)
        if blocks is None or not blocks.lie_in(tensor, state):
            blocks = self._blocks[tensor] = _Blocks(tensor, state)
        return blocks if blocks.are_true else None


class _Blocks:
    """The blocks of one tensor, with their parts of those states that have an element for each of its elements."""

    def __init__(self, tensor: Tensor, state: dict[str, Any]) -> None:
        self._whole = state
        self._address = tensor.data_ptr()
        self._per_element = {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and value.dim() and value.shape == tensor.shape
        }
        # Whether states lie in memory as the tensor does: then equal positions are equal elements.
        self.are_true = all(value.stride() == tensor.stride() for value in self._per_element.values())
        self._step_numel = _BLOCK_BYTES // tensor.element_size()
        self.parts = self._cut(tensor)
        self._cuts = {name: self._cut(value) for name, value in self._per_element.items() if self.are_true}
        self._states: list[dict[str, Any]] = [{} for _ in self.parts]

    def lie_in(self, tensor: Tensor, state: dict[str, Any]) -> bool:
        """Whether tensor and state are still where the blocks were cut."""
        return (
            state is self._whole
            and tensor.data_ptr() == self._address
            and all(state.get(name) is value for name, value in self._per_element.items())
        )

    def show(self, tensor: Tensor, states: dict[Tensor, Any]) -> None:
        assert tensor.grad is not None
        others = {name: value for name, value in self._whole.items() if name not in self._per_element}
        for number, (part, grad) in enumerate(zip(self.parts, self._cut(tensor.grad), strict=True)):
            part.grad = grad
            state = {name: cuts[number] for name, cuts in self._cuts.items()}
            for name, value in others.items():
                # A count of steps, say: each block counts for itself, and the first one counts for the whole.
                state[name] = value.clone() if number and isinstance(value, Tensor) else value
            states[part] = self._states[number] = state

    def withdraw(self, states: dict[Tensor, Any]) -> None:
        """Takes back what was shown, with what the optimizer made of it."""
        for number, part in enumerate(self.parts):
            part.grad = None
            state = states.pop(part)
            for name, cuts in self._cuts.items():
                if state[name] is not cuts[number]:
                    cuts[number].copy_(state[name])
            if number == 0:
                self._whole.update(
                    {name: value for name, value in state.items() if name not in self._per_element}
                )

    def _cut(self, tensor: Tensor) -> list[Tensor]:
        in_memory_order = tensor.detach().as_strided((tensor.numel(),), (1,))
        return list(in_memory_order.split(self._step_numel))
