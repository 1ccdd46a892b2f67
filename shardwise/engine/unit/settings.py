"""What users chose for a unit: one record for the unit, one for its reduces; and where its shards live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise import trace
from shardwise.comm.collectives.custom import HookedCollectives
from shardwise.comm.collectives.group import AllReduceHook, GroupCollectives
from shardwise.comm.mesh import DataMesh
from shardwise.planning.lifecycle import AfterForward
from shardwise.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy


@dataclass(frozen=True, slots=True)
class UnitSettings:
    """What users chose for a unit; ``Unit.configure`` replaces it as a whole."""

    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    after_forward: AfterForward
    gather_calls: GroupCollectives
    # Whether a user set ``after_forward`` after sharding: then it holds for the root, too.
    after_forward_is_explicit: bool = False
    frees_after_backward: bool = True
    gathers_in_backward: bool = True
    # Units, as in ``backward_prefetch``.
    forward_prefetch: tuple[Any, ...] = ()
    # None: the unit that ran before this one in forward.
    backward_prefetch: tuple[Any, ...] | None = None
    # Prefetch in backward after this unit's reduce, instead of before its compute.
    prefetches_late: bool = False
    # Whether all ranks gather and reduce the unit, whichever of them run it (``engine/step/joint_units``).
    is_joint: bool = False
    recorder: trace.Recorder | None = None


@dataclass
class ReduceSettings:
    """What users set for a unit's reduces; read when one is issued."""

    calls: GroupCollectives
    divide_factor: float | None = None
    sums_only: bool = False
    all_reduces: bool = True
    includes_unused: bool = False
    # Used instead of the mesh's own collectives over replicas.
    replicate_calls: GroupCollectives | None = None
    hook: AllReduceHook | None = None
    hook_stream: torch.cuda.Stream | None = None
    # Called when a unit's gradients have been assigned, with a function that waits until the host may read them, and
    # whether this is the last backward of the step.
    listeners: dict[int, Callable[[Callable[[], None], bool], None]] = field(default_factory=dict)
    # A user's function that reduces, with its state.
    comm_hook: tuple[Callable[..., object], object] | None = None

    def use_hook(
        self,
        shard: GroupCollectives,
        replicate: GroupCollectives | None,
        state: object,
        hook: Callable[..., object],
    ) -> None:
        """Replaces the reduce, including its division, by a user's function."""
        self.comm_hook = (hook, state)
        self.divide_factor, self.sums_only = 1.0, True
        if replicate is None:
            self.calls = HookedCollectives(shard, state, hook)
        else:
            self.replicate_calls = HookedCollectives(replicate, state, hook)


@dataclass(frozen=True, slots=True)
class ShardHome:
    """Where a unit's shards live: on the device of its mesh or, offloaded, on the host, perhaps in pinned memory."""

    device: torch.device
    is_offloaded: bool
    pins: bool


def shard_home(mesh: DataMesh, offload: OffloadPolicy) -> ShardHome:
    host = torch.device("cpu")
    if not isinstance(offload, CPUOffloadPolicy) or mesh.device == host:
        return ShardHome(mesh.device, is_offloaded=False, pins=False)
    return ShardHome(host, is_offloaded=True, pins=offload.pin_memory)
