"""ZeRO: an optimizer whose state is sharded over the ranks, and its overlap with DistributedDataParallel."""

from shardwise.zero.optimizer import ZeroRedundancyOptimizer
from shardwise.zero.overlap import hook_with_zero_step, hook_with_zero_step_interleaved

__all__ = ["ZeroRedundancyOptimizer", "hook_with_zero_step", "hook_with_zero_step_interleaved"]
