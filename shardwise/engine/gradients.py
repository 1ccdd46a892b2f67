"""Gradients of shards that are made once and used again in every step.

A unit's reduced row is its gradient buffer; each shard's gradient is a DTensor over its part of it. Making those
anew in every backward is the largest single cost of a reduce on the host. So they are kept: the buffer's memory comes
with the reduce and goes when the next forward finds the gradients dropped (``zero_grad``), the objects stay.

Used again only when nobody else has them: a gradient that a user still holds, whole or in part, keeps its memory and
its values, and the unit makes new ones for itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import torch

from shardwise.engine.binding import Slot
from shardwise.engine.storage import Elastic
from shardwise.torch_internals import dtensor, local_of


class Part(Protocol):
    """Where a slot's gradient lies in the row."""

    @property
    def slot(self) -> Slot: ...

    @property
    def start(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def strides(self) -> tuple[int, ...]: ...


class KeptGradients:
    """The gradient buffer of one set of slots, with its DTensors."""

    def __init__(
        self, parts: Sequence[Part], row_numel: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._memory = Elastic(row_numel * dtype.itemsize, device)
        self.row = self._memory.tensor(dtype, 0, (row_numel,))
        self._slots = [part.slot for part in parts]
        self.of_slot = {
            part.slot: dtensor(
                self._memory.tensor(dtype, part.start * dtype.itemsize, part.shape, part.strides),
                part.slot.spec,
                outline=part.slot.local,
            )
            for part in parts
        }
        self._gradients = list(self.of_slot.values())
        self._watched = [*self._gradients, *map(local_of, self._gradients)]
        self._own_refs = [sys.getrefcount(tensor) for tensor in self._watched]
        self._own_uses = self._memory.num_uses()

    @property
    def are_at_rest(self) -> bool:
        """Whether their memory went, which it only does when nobody has them any more."""
        return not self._memory.is_grown

    def are_shown(self) -> bool:
        """Whether a parameter has one of these for its gradient now."""
        for slot, gradient in zip(self._slots, self._gradients, strict=True):  # noqa: SIM110 - in every step
            if slot.sharded.grad is gradient:
                return True
        return False

    def are_held(self) -> bool:
        """Whether anyone but the unit holds one of these, or memory of theirs."""
        refs = [sys.getrefcount(tensor) for tensor in self._watched]
        return refs != self._own_refs or self._memory.num_uses() != self._own_uses

    def grow(self) -> None:
        self._memory.grow()

    def rest(self) -> None:
        """Lets the memory go if the gradients were dropped."""
        if not self.are_at_rest and not self.are_shown() and not self.are_held():
            self._memory.shrink()
