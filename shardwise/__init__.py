"""shardwise: train PyTorch models too big for one device, by sharding parameters, gradients and optimizer state."""

from shardwise import trace
from shardwise.errors import (
    CheckpointError,
    ConfigError,
    ConfigTypeError,
    RankDisagreement,
    ShardwiseError,
    StateError,
)
from shardwise.frontends.entry_points import register_fsdp_forward_method, share_comm_ctx
from shardwise.frontends.fully_shard import fully_shard
from shardwise.frontends.module import FSDPModule, UnshardHandle
from shardwise.frontends.norms import clip_grad_norm_
from shardwise.policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from shardwise.zero import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved

__all__ = [
    "CPUOffloadPolicy",
    "CheckpointError",
    "ConfigError",
    "ConfigTypeError",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "RankDisagreement",
    "ShardwiseError",
    "StateError",
    "UnshardHandle",
    "ZeroRedundancyOptimizer",
    "clip_grad_norm_",
    "fully_shard",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "trace",
]
