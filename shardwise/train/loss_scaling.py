"""Scales the loss of a run in fp16, so that small gradients do not vanish; a step whose gradients overflow is skipped.

The scale halves after a step that was skipped and doubles after 2000 that were not. It is in the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import CheckpointError
from shardwise.training_step.grad_scaler import ShardedGradScaler

__all__ = ["LossScaling"]

_SMALLEST = 1.0


class LossScaling:
    """The scale of the loss, the same on every rank, and the number of steps skipped so far."""

    def __init__(self, device: torch.device) -> None:
        self._scaler = ShardedGradScaler(device.type)
        # The scaler makes its tensors when it first scales, and not all ranks of a pipeline have a loss to scale.
        self._scaler.scale(torch.zeros((), device=device))
        self.skipped = 0

    @property
    def scale(self) -> float:
        return self._scaler.get_scale()

    def scaled(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Optimizer) -> None:
        """Divides the gradients by the scale, and notes on all ranks whether any of them overflowed."""
        self._scaler.unscale_(optimizer)

    def update(self) -> bool:
        """Sets the scale of the next step; returns whether the gradients overflowed, which a smaller scale can help."""
        before = self.scale
        self._scaler.update()
        overflowed = self.scale < before
        self.skipped += overflowed
        return overflowed and before > _SMALLEST

    def state(self) -> dict[str, Any]:
        state = self._scaler.state_dict()
        return {"scale": state["scale"], "good_steps": state["_growth_tracker"], "skipped": self.skipped}

    def load(self, saved: Mapping[str, Any], where: str) -> None:
        """Restores a state; raises CheckpointError if it is none."""
        try:
            scale, good_steps, skipped = (
                float(saved["scale"]),
                int(saved["good_steps"]),
                int(saved["skipped"]),
            )
            if not 0 < scale < math.inf:
                raise ValueError(f"the scale is {scale}")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"its loss scaling cannot be read: {type(error).__name__}: {error}",
                where=where,
                fix="resume from another checkpoint",
            ) from None
        state = {**self._scaler.state_dict(), "scale": scale, "_growth_tracker": good_steps}
        self._scaler.load_state_dict(state)
        self.skipped = skipped
