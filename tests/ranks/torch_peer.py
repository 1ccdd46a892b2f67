"""torch's `fully_shard` behind the names the tests use; only ever loaded to check the tests themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardwise.trace import Recorder

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "record",
]


def fully_shard(module: Any, **kwargs: Any) -> Any:
    mesh = kwargs.pop("mesh", None) or init_device_mesh("cpu", (dist.get_world_size(),))
    return torch_fully_shard(module, mesh=mesh, **kwargs)


@contextmanager
def record(model: Any) -> Iterator[Recorder]:
    """Gathers and post-backwards of torch's engine as our events (in processes only: it patches a class)."""
    recorder = Recorder()
    originals = {name: getattr(FSDPParamGroup, name) for name in ("unshard", "post_backward", "reshard")}

    def unshard(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._all_gather_result is None and not self.is_unsharded:
            add("unshard", self)
        return originals["unshard"](self, *args, **kwargs)

    def reshard(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_unsharded and not (
            self._training_state.name == "FORWARD" and not self._reshard_after_forward
        ):
            add("reshard", self)
        return originals["reshard"](self, *args, **kwargs)

    def post_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = originals["post_backward"](self, *args, **kwargs)
        add("post_backward", self)
        return result

    def add(kind: str, group: Any) -> None:
        recorder.add(kind, group._module_fqn or "", group._training_state.name.lower(), dist.get_rank())

    try:
        FSDPParamGroup.unshard = unshard
        FSDPParamGroup.reshard = reshard
        FSDPParamGroup.post_backward = post_backward
        yield recorder
    finally:
        for name, original in originals.items():
            setattr(FSDPParamGroup, name, original)
