"""Restores gradients and buffers after a step that raised (``TrustPolicy.undoes_steps``).

Parameters need no copy: forward and backward do not write them. Gradients are copied when a backward begins, buffers
(such as running statistics) when a forward begins; an optimizer's step drops the copies.
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
    """Copies of one model's gradients and buffers from before its step."""

    def __init__(self) -> None:
        self._gradients: list[tuple[Slot, torch.Tensor | None, torch.Tensor | None, int]] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Copies the buffers when a forward begins; gradients from before that forward are no longer restored."""
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

    def restore(self) -> None:
        with torch.no_grad():
            for slot, gradient, values, version in self._gradients:
                # A gradient that nobody wrote to keeps its version, which others compare.
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
