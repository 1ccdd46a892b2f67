"""What users chose for a unit, as one record that is replaced as a whole; and where its shards live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise import trace
from shardwise.comm.collectives.group import GroupCollectives
from shardwise.comm.mesh import DataMesh
from shardwise.planning.schedule import AfterForward
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
