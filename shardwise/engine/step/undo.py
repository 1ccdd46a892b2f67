"""What a step that breaks off is put back to: gradients and buffers as they were before it.

Parameters need no keeping, forward and backward do not write them. Gradients are kept from the beginning of a backward
to the moment an optimizer may use it, buffers (running statistics, say) from the beginning of the forward.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine.reduce.gradient_buffer import gradient_version
from shardwise.engine.unit.binding import Slot
from shardwise.torch_internals import buffers_of, local_of


class Undo:
    """The state of one model before its step."""

    def __init__(self) -> None:
        self._gradients: list[tuple[Slot, torch.Tensor | None, torch.Tensor | None, int]] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep_buffers(self, modules: Iterable[nn.Module]) -> None:
        """A forward begins, and with it a step that can be undone; what came before it stays."""
        self._gradients = []
        with torch.no_grad():
            self._buffers = [
                (buffer, buffer.clone())
                for top in modules
                for module in top.modules()
                for buffer in buffers_of(module).values()
                if buffer is not None
            ]

    def keep_gradients(self, slots: Iterable[Slot]) -> None:
        with torch.no_grad():
            self._gradients = [_kept(slot) for slot in slots]

    def forget(self) -> None:
        self._gradients, self._buffers = [], []

    def put_back(self) -> None:
        with torch.no_grad():
            for slot, gradient, values, version in self._gradients:
                # One that nobody wrote to is left alone: others can see that.
                if gradient is not None and values is not None and gradient_version(gradient) != version:
                    _local(gradient).copy_(values)
                slot.sharded.grad = gradient
            for buffer, values in self._buffers:
                buffer.copy_(values)
        self.forget()


def _kept(slot: Slot) -> tuple[Slot, torch.Tensor | None, torch.Tensor | None, int]:
    gradient = slot.sharded.grad
    if gradient is None:
        return slot, None, None, 0
    return slot, gradient, _local(gradient).clone(), gradient_version(gradient)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor
