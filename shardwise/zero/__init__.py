"""ZeRO: an optimizer whose state is shared out over the ranks."""

from shardwise.zero.optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
