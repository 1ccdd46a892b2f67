"""The options of ``FullyShardedDataParallel``, as enums and records with torch's names.

``STRATEGIES`` says what each sharding strategy means for the engine; no other code asks which strategy it is.
``WrapperOptions`` holds the keywords of one wrapper, checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.errors import ConfigError, ConfigTypeError
from shardwise.planning.lifecycle import FREE, KEEP, AfterForward
from shardwise.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, as_record
from shardwise.torch_internals import BatchNorm


class ShardingStrategy(Enum):
    """What is sharded, and over which ranks.

    FULL_SHARD shards parameters, gradients and optimizer state, and frees parameters after forward. SHARD_GRAD_OP
    keeps parameters until the end of backward. NO_SHARD shards nothing: gradients are averaged over all ranks. The
    hybrid strategies shard within a group of ranks and replicate across groups.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


@dataclass(frozen=True)
class Strategy:
    """What a sharding strategy means for the engine. ``num_axes``: of the mesh that it needs."""

    shards: bool
    after_forward: AfterForward
    num_axes: int = 1


STRATEGIES = {
    ShardingStrategy.FULL_SHARD: Strategy(True, FREE),
    ShardingStrategy.SHARD_GRAD_OP: Strategy(True, KEEP),
    ShardingStrategy.NO_SHARD: Strategy(False, KEEP),
    ShardingStrategy.HYBRID_SHARD: Strategy(True, FREE, num_axes=2),
    ShardingStrategy._HYBRID_SHARD_ZERO2: Strategy(True, KEEP, num_axes=2),
}


class TrainingState(Enum):
    """What a wrapper is in the middle of; a value of ``FullyShardedDataParallel.training_state``."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


class BackwardPrefetch(Enum):
    """When backward gathers the next unit: before it computes the gradients of the current unit, or after."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass
class CPUOffload:
    """``offload_params`` keeps shards and their gradients, hence also the optimizer state, in host memory."""

    offload_params: bool = False


@dataclass
class MixedPrecision:
    """The dtypes of a unit.

    Attributes:
        param_dtype: dtype of full parameters, hence of compute and of the gather. None: each parameter's own.
        reduce_dtype: dtype in which gradients are summed over ranks. None: the dtype they were computed in.
        buffer_dtype: dtype of floating-point buffers. None: their own. State dicts always have the original dtype.
        keep_low_precision_grads: keep gradients in the dtype they were reduced in, for optimizers that accept it.
        cast_forward_inputs: cast floating-point inputs of every unit to ``param_dtype``.
        cast_root_forward_inputs: cast those of the outermost unit.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    # Modules that compute in full precision.
    _module_classes_to_ignore: Sequence[type[nn.Module]] = field(default_factory=lambda: (BatchNorm,))

    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(
            self.param_dtype, self.reduce_dtype, cast_forward_inputs=self.cast_forward_inputs
        )


E = TypeVar("E", bound=Enum)


def as_choice(kind: type[E], value: Any, where: str) -> E:
    """Returns ``value`` as a member of ``kind``; accepts torch's enum of the same name."""
    if isinstance(value, kind):
        return value
    if isinstance(value, Enum) and type(value).__name__ == kind.__name__ and value.name in kind.__members__:
        return kind[value.name]
    raise ConfigTypeError(
        f"{value!r} is not a {kind.__name__}",
        where=where,
        fix=f"pass one of {', '.join(f'{kind.__name__}.{name}' for name in kind.__members__)}",
    )


@dataclass(frozen=True)
class WrapperOptions:
    """The keywords of ``FullyShardedDataParallel`` that ``auto_wrap_policy`` may set for each module, checked."""

    process_group: Any
    sharding_strategy: ShardingStrategy
    cpu_offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision
    device_id: int | torch.device | None
    forward_prefetch: bool
    use_orig_params: bool
    device_mesh: Any
    param_init_fn: Callable[[nn.Module], Any] | None
    sync_module_states: bool
    limit_all_gathers: bool
    exact: bool

    @staticmethod
    def read(given: Mapping[str, Any], module: nn.Module, where: str) -> WrapperOptions:
        """Checks the options of one module; accepts torch's enums and records."""
        if unknown := set(given) - set(OPTION_NAMES):
            raise ConfigTypeError(
                f"auto_wrap_policy returned unknown options {sorted(unknown)} for a {type(module).__name__}",
                where=where,
                fix=f"return only options among {sorted(OPTION_NAMES)}",
            )
        init_fn = given["param_init_fn"]
        if init_fn is not None and not callable(init_fn):
            raise ConfigError(
                f"param_init_fn is a {type(init_fn).__name__}",
                where=where,
                fix="pass a function that allocates and initializes a module",
            )
        strategy = given["sharding_strategy"] or ShardingStrategy.FULL_SHARD
        offload, prefetch, precision = (
            given[name] for name in ("cpu_offload", "backward_prefetch", "mixed_precision")
        )
        checked = {
            "sharding_strategy": as_choice(ShardingStrategy, strategy, where),
            "cpu_offload": CPUOffload() if offload is None else as_record(CPUOffload, offload, where),
            "backward_prefetch": None if prefetch is None else as_choice(BackwardPrefetch, prefetch, where),
            "mixed_precision": MixedPrecision()
            if precision is None
            else as_record(MixedPrecision, precision, where),
        }
        return WrapperOptions(**{**given, **checked})

    @property
    def strategy(self) -> Strategy:
        return STRATEGIES[self.sharding_strategy]

    def offload_policy(self, device: torch.device) -> OffloadPolicy:
        if self.cpu_offload.offload_params:
            return CPUOffloadPolicy(pin_memory=device.type == "cuda")
        return OffloadPolicy()


OPTION_NAMES = tuple(option.name for option in fields(WrapperOptions))
