"""What programs read of a wrapper: the options it was made with, and some attributes that torch does not document."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.collectives.group import GroupCollectives
from shardwise.engine.unit.unit import Unit
from shardwise.wrapper.flat_handle import FlatHandle, flat_parameters
from shardwise.wrapper.model_methods import ModelMethods
from shardwise.wrapper.options import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    TrainingState,
)
from shardwise.wrapper.summon_full_params import is_summoned
from shardwise.wrapper.wrapper_plan import WrapperPlan


class ReadAttributes(ModelMethods):
    """A base class of ``FullyShardedDataParallel``: its attributes that are only read.

    A property hides an attribute of the same name of the wrapped module, as in torch: ask ``.module`` for that.
    """

    _plan: WrapperPlan
    _unit: Unit

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """What is sharded, and when parameters are freed."""
        return self._plan.options.sharding_strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The dtypes to compute and reduce in."""
        return self._plan.options.mixed_precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """Whether shards are kept in host memory."""
        return self._plan.options.cpu_offload

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When backward gathers the next unit."""
        return self._plan.options.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """Whether forward gathers the next unit early."""
        return self._plan.options.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        """As given; memory in flight is always bounded."""
        return self._plan.options.limit_all_gathers

    @property
    def training_state(self) -> TrainingState:
        """What this wrapper is in the middle of."""
        if is_summoned(self._unit):
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.FORWARD_BACKWARD if self._unit.root.is_busy else TrainingState.IDLE

    @property
    def compute_device(self) -> torch.device:
        """The device that forward and backward run on."""
        return self._plan.mesh.device

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that parameters are sharded over; with NO_SHARD, the ranks that hold a copy."""
        return self._collectives.group

    @property
    def rank(self) -> int:
        """This process's rank in ``process_group``."""
        return self._collectives.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in ``process_group``."""
        return self._collectives.world

    @property
    def _collectives(self) -> GroupCollectives:
        mesh, shards = self._plan.mesh, self._plan.options.strategy.shards
        return mesh.shard if shards or mesh.replicate is None else mesh.replicate

    # --- what libraries read, though it is not public ---------------------------------------------------------------

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.slots)

    @property
    def params(self) -> list[nn.Parameter]:
        """The flat parameters of this wrapper; none if all parameters are in inner wrappers or ignored."""
        return flat_parameters(self._unit)

    @property
    def _flat_param(self) -> nn.Parameter | None:
        return next(iter(self.params), None)

    @property
    def _handle(self) -> FlatHandle | None:
        return FlatHandle(self._unit) if self._has_params else None

    @property
    def _is_root(self) -> bool:
        return not self._is_inner

    @property
    def _device_mesh(self) -> DeviceMesh | None:
        mesh: DeviceMesh | None = self._plan.options.device_mesh
        return mesh

    @property
    def _inter_node_pg(self) -> dist.ProcessGroup | None:
        mesh = self._plan.mesh
        is_hybrid = self._plan.options.strategy.num_axes == 2
        return mesh.replicate.group if is_hybrid and mesh.replicate is not None else None

    @property
    def _use_orig_params(self) -> bool:
        return self._plan.options.use_orig_params

    @property
    def _comm_hook(self) -> Callable[..., object] | None:
        hook = self._unit.gradients.settings.comm_hook
        return None if hook is None else hook[0]

    @property
    def _comm_hook_state(self) -> object:
        hook = self._unit.gradients.settings.comm_hook
        return None if hook is None else hook[1]
