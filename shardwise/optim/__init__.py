"""Optimizers that step a unit's shards as one tensor."""

from shardwise.optim.elementwise import elementwise
from shardwise.optim.flat import flat

__all__ = ["elementwise", "flat"]
