"""Steps large CPU tensors in cache-sized blocks: the same arithmetic, on memory that is still in the cache.

On a CPU, torch's optimizers make a dozen passes over each tensor, one per operation. A tensor larger than the cache
is read from memory in every pass:

    whole    [ m = …             ][ v = …             ][ p = …             ]
    blocks   [ m ][ v ][ p ]  [ m ][ v ][ p ]  [ m ][ v ][ p ]  [ m ][ v ][ p ]

During a step, the optimizer's parameter groups hold blocks, which are views of the tensors and of their state, instead
of the tensors. Blocks start at multiples of the vector width, so that every element is stepped by the same instruction
as without blocks. This needs an element-wise optimizer and kernels that run on one thread (torchrun's default): with
several threads, torch splits each tensor between them, at other places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["BlockedStep"]

# A block's parameter, gradient and two states take 2 MB, the L2 cache of many CPUs. For tensors of one or two blocks,
# the extra calls would cost what is saved.
_BLOCK_BYTES = 512 * 1024
_LEAST_BYTES = 2 * _BLOCK_BYTES


class BlockedStep:
    """Steps an optimizer, its large tensors in blocks, by calling ``step`` (default: the optimizer's own)."""

    def __init__(self, optim: Optimizer, step: Callable[..., Any] | None = None) -> None:
        self._optim = optim
        self._step = step
        self._blocks: dict[Tensor, _Blocks] = {}

    def __call__(self, **kwargs: Any) -> Any:
        if torch.get_num_threads() > 1:
            return (self._step or self._optim.step)(**kwargs)
        groups = self._optim.param_groups
        params = [group["params"] for group in groups]
        installed: list[_Blocks] = []
        try:
            for group, tensors in zip(groups, params, strict=True):
                # foreach and fused kernels make fewer passes already.
                if not (group.get("foreach") or group.get("fused")):
                    group["params"] = self._split_large(tensors, installed)
            return (self._step or self._optim.step)(**kwargs)
        finally:
            for group, tensors in zip(groups, params, strict=True):
                group["params"] = tensors
            for blocks in installed:
                blocks.remove(self._optim.state)

    def _split_large(self, tensors: list[Tensor], installed: list[_Blocks]) -> list[Tensor]:
        result: list[Tensor] = []
        for tensor in tensors:
            blocks = self._blocks_of(tensor)
            if blocks is None:
                result.append(tensor)
            else:
                blocks.install(tensor, self._optim.state)
                installed.append(blocks)
                result.extend(blocks.parts)
        return result

    def _blocks_of(self, tensor: Tensor) -> _Blocks | None:
        if tensor.numel() * tensor.element_size() < _LEAST_BYTES or tensor.device.type != "cpu":
            return None
        grad = tensor.grad
        if grad is None or grad.layout is not torch.strided or grad.stride() != tensor.stride():
            return None
        # In the first step there is no state yet: the optimizer creates it for the whole tensor.
        state = self._optim.state.get(tensor)
        if not state:
            return None
        blocks = self._blocks.get(tensor)
        if blocks is None or not blocks.are_current(tensor, state):
            blocks = self._blocks[tensor] = _Blocks(tensor, state)
        return blocks if blocks.strides_match else None


class _Blocks:
    """The blocks of one tensor and of those of its states that have its shape."""

    def __init__(self, tensor: Tensor, state: dict[str, Any]) -> None:
        self._whole = state
        self._address = tensor.data_ptr()
        self._per_element = {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and value.dim() and value.shape == tensor.shape
        }
        # With equal strides, equal positions in memory are equal elements.
        self.strides_match = all(value.stride() == tensor.stride() for value in self._per_element.values())
        self._block_numel = _BLOCK_BYTES // tensor.element_size()
        self.parts = self._cut(tensor)
        self._cuts = {
            name: self._cut(value) for name, value in self._per_element.items() if self.strides_match
        }

    def are_current(self, tensor: Tensor, state: dict[str, Any]) -> bool:
        """Whether the blocks are still views of this tensor and this state."""
        return (
            state is self._whole
            and tensor.data_ptr() == self._address
            and all(state.get(name) is value for name, value in self._per_element.items())
        )

    def install(self, tensor: Tensor, states: dict[Tensor, Any]) -> None:
        """Gives each block its gradient, and its state in the optimizer's ``states``."""
        assert tensor.grad is not None
        others = {name: value for name, value in self._whole.items() if name not in self._per_element}
        for number, (part, grad) in enumerate(zip(self.parts, self._cut(tensor.grad), strict=True)):
            part.grad = grad
            state = {name: cuts[number] for name, cuts in self._cuts.items()}
            for name, value in others.items():
                # Step counts and the like: every block has its own copy; the first block has the original.
                state[name] = value.clone() if number and isinstance(value, Tensor) else value
            states[part] = state

    def remove(self, states: dict[Tensor, Any]) -> None:
        """Removes the blocks' gradients and states, and copies new state back into the tensor's."""
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
        return list(in_memory_order.split(self._block_numel))
