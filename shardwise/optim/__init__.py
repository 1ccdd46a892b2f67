"""Optimizers that step a unit's shards as one tensor."""

from shardwise.optim.elementwise_classes import elementwise
from shardwise.optim.flat_optimizer import flat

__all__ = ["elementwise", "flat"]
