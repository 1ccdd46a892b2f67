"""What a wrapper was made with, under the names that torch's has: for programs that ask their model."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.comm.collectives.group import GroupCollectives
from shardwise.policies import CPUOffloadPolicy
from shardwise.wrapper.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from shardwise.wrapper.wrapper_plan import WrapperPlan


class WrapperOptions:
    """The options of one wrapper, to be read: they are settled when it is made."""

    # Names of the class come before those of the module inside, as in torch's: a layer that has a ``rank`` of its own
    # is asked through ``.module``.

    _wrapping: WrapperPlan

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """What is sharded, and when parameters are freed."""
        return self._wrapping.sharding_strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The dtypes that it computes and reduces in."""
        return self._wrapping.precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """Whether shards are kept in host memory."""
        return CPUOffload(offload_params=isinstance(self._wrapping.offload, CPUOffloadPolicy))

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When backward gathers the next unit."""
        return self._wrapping.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """Whether forward gathers the next unit early."""
        return self._wrapping.forward_prefetch

    @property
    def compute_device(self) -> torch.device:
        """The device that forward and backward run on."""
        return self._wrapping.mesh.device

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that it shards over; with NO_SHARD, those that hold a copy."""
        return self._calls.group

    @property
    def rank(self) -> int:
        """This rank's number in ``process_group``."""
        return self._calls.rank

    @property
    def world_size(self) -> int:
        """How many ranks are in ``process_group``."""
        return self._calls.world

    @property
    def _calls(self) -> GroupCollectives:
        mesh, shards = self._wrapping.mesh, self._wrapping.strategy.shards
        return mesh.shard if shards or mesh.replicate is None else mesh.replicate
