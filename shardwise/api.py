"""The public names of ``shardwise``, which imports them from here on their first use.

So ``shardwise --help`` answers without importing torch.
"""

from shardwise import optim, trace
from shardwise.compat import Installation, install, uninstall
from shardwise.composable.fsdp_module import FSDPModule, UnshardHandle
from shardwise.composable.fully_shard import fully_shard
from shardwise.errors import (
    CheckpointError,
    ConfigAssertionError,
    ConfigError,
    ConfigTypeError,
    NonFiniteGradients,
    PeerFailure,
    RankDisagreement,
    ShardwiseError,
    StateAssertionError,
    StateError,
    StateTypeError,
)
from shardwise.forecast import auto as _auto  # noqa: F401  makes plans for fully_shard(plan=...)
from shardwise.forecast.choice import Choice, choose
from shardwise.forecast.plan import Plan, plan
from shardwise.forward_methods import register_fsdp_forward_method, share_comm_ctx
from shardwise.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    TrustPolicy,
    set_trust,
)
from shardwise.training_step.clip_grad_norm import clip_grad_norm_
from shardwise.training_step.cuda_graph import CapturedStep, capture
from shardwise.training_step.grad_scaler import ShardedGradScaler
from shardwise.training_step.planned_memory import planned_memory
from shardwise.training_step.uneven_batches import uneven
from shardwise.version import __version__
from shardwise.wrapper.optim_state_load import OptimStateKeyType
from shardwise.wrapper.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from shardwise.wrapper.state_dict_types import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from shardwise.wrapper.wrap_policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from shardwise.wrapper.wrapper import FullyShardedDataParallel
from shardwise.zero import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CapturedStep",
    "CheckpointError",
    "Choice",
    "ConfigAssertionError",
    "ConfigError",
    "ConfigTypeError",
    "CustomPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "Installation",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "NonFiniteGradients",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "PeerFailure",
    "Plan",
    "RankDisagreement",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "ShardwiseError",
    "StateAssertionError",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StateError",
    "StateTypeError",
    "TrustPolicy",
    "UnshardHandle",
    "ZeroRedundancyOptimizer",
    "__version__",
    "always_wrap_policy",
    "capture",
    "choose",
    "clip_grad_norm_",
    "enable_wrap",
    "fully_shard",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "install",
    "lambda_auto_wrap_policy",
    "optim",
    "plan",
    "planned_memory",
    "register_fsdp_forward_method",
    "set_trust",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "trace",
    "transformer_auto_wrap_policy",
    "uneven",
    "uninstall",
    "wrap",
]
