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
from shardwise.frontends.fully_shard import FSDPModule, UnshardHandle, fully_shard
from shardwise.frontends.norms import clip_grad_norm_
from shardwise.policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

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
    "clip_grad_norm_",
    "fully_shard",
    "trace",
]
