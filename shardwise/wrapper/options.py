"""What users of ``FullyShardedDataParallel`` choose, as records with torch's names.

A strategy is a value: what it means for the engine is written down here once, and nothing else asks which one it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.errors import ConfigTypeError
from shardwise.plan.schedule import FREE, KEEP, AfterForward
from shardwise.policies import MixedPrecisionPolicy
from shardwise.torch_internals import BatchNorm


class ShardingStrategy(Enum):
    """What is sharded, and over whom.

    FULL_SHARD shards parameters, gradients and optimizer state, and frees parameters after forward. SHARD_GRAD_OP
    keeps them until backward has passed. NO_SHARD shards nothing: gradients are summed over all ranks. The hybrids
    shard within a group of ranks and replicate over the groups.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


@dataclass(frozen=True)
class Strategy:
    """A strategy as the engine needs it. ``num_axes``: of the mesh it runs on."""

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


class BackwardPrefetch(Enum):
    """When backward gathers the next unit: before it computes the present one's gradients, or after."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass(frozen=True)
class CPUOffload:
    """``offload_params`` keeps shards, their gradients and so the optimizer's state in host memory."""

    offload_params: bool = False


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a unit.

    Attributes:
        param_dtype: dtype of full parameters, hence of compute and of the gather. None: each parameter's own.
        reduce_dtype: dtype in which gradients are summed over ranks. None: the dtype they were computed in.
        buffer_dtype: dtype of floating-point buffers. None: their own. State dicts hold them in their own dtype.
        keep_low_precision_grads: leaves gradients in the dtype they were reduced in, for optimizers that take them so.
        cast_forward_inputs: casts floating-point inputs of every unit to ``param_dtype``.
        cast_root_forward_inputs: casts those of the outermost unit.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    # Modules that compute in full precision all the same.
    _module_classes_to_ignore: Sequence[type[nn.Module]] = field(default_factory=lambda: (BatchNorm,))

    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(
            self.param_dtype, self.reduce_dtype, cast_forward_inputs=self.cast_forward_inputs
        )


E = TypeVar("E", bound=Enum)


def as_choice(kind: type[E], value: Any, where: str) -> E:
    """``value`` as one of ``kind``; torch's enum of the same name is taken too."""
    if isinstance(value, kind):
        return value
    if isinstance(value, Enum) and type(value).__name__ == kind.__name__ and value.name in kind.__members__:
        return kind[value.name]
    raise ConfigTypeError(
        f"{value!r} is no {kind.__name__}",
        where=where,
        fix=f"pass one of {', '.join(f'{kind.__name__}.{name}' for name in kind.__members__)}",
    )


R = TypeVar("R")


def as_record(kind: type[R], value: Any, where: str) -> R:
    """``value`` as a record of ``kind``; torch's record of the same name and fields is taken too."""
    if isinstance(value, kind):
        return value
    if type(value).__name__ == kind.__name__ and hasattr(value, "__dataclass_fields__"):
        names = kind.__dataclass_fields__  # type: ignore[attr-defined]
        return kind(**{name: getattr(value, name) for name in names if hasattr(value, name)})
    raise ConfigTypeError(
        f"{value!r} is no {kind.__name__}", where=where, fix=f"pass a shardwise.{kind.__name__}"
    )
