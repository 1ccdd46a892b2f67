"""What a local state dict holds of shards: this rank's own elements, and where in the whole they stand.

Saved with ``torch.save`` they are plain tensors, a file for each rank. ``torch.distributed.checkpoint`` saves every
rank's under one name, and gives each rank its own back.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from shardwise.engine.checkpoint_span import CheckpointSpan
from shardwise.engine.unit.flat_form import FlatSlot
from shardwise.engine.unit.unit import Unit


class LocalShard(CheckpointSpan):
    """Elements of a parameter, or of its optimizer's state, that one rank holds."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What is saved must load without shardwise, and with torch.load(weights_only=True).
        return self.elements.__reduce_ex__(protocol)


def local_shard_of(unit: Unit, slots: list[FlatSlot], value: torch.Tensor) -> torch.Tensor:
    """``value``, which is cut like the shard of these slots; plain where the rank holds all of it."""
    shard = unit.mesh.shard
    if shard.world == 1:
        return value
    slot = slots[0]
    if not slot.is_shown:
        return LocalShard.of(value, shard.rank * value.numel(), shard.world * value.numel())
    return LocalShard.of(value, slot.span.start, prod(slot.shape))
