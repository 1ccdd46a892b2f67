"""``ShardedTensor``: the older kind of sharded tensor, in which torch's FSDP saves shards without a mesh."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as ShardedTensor


def group_of_sharded_tensor(value: ShardedTensor) -> tuple[dist.ProcessGroup, torch.device]:
    """Returns the process group that a sharded tensor is spread over, and a device on which that group communicates."""
    group = value._process_group
    kind = dist.distributed_c10d._get_object_coll_device(group)
    if kind == "cpu":
        return group, torch.device(kind)
    return group, torch.device(kind, torch.get_device_module(kind).current_device())
