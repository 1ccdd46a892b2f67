"""Optimizer steps in fewer or faster kernel calls: several tensors as one, or one tensor in cache-sized blocks."""

from shardwise.optim.elementwise_classes import elementwise
from shardwise.optim.flat_optimizer import flat

__all__ = ["elementwise", "flat"]
