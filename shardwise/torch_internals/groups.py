"""Process groups: their backends, stores, timeouts and the collectives that have no public name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions


def all_gather_call(group: dist.ProcessGroup) -> Callable[..., Any]:
    """The group's own gather into one tensor; Python-made groups only know the newer of its two names."""
    return getattr(group, "all_gather_single", None) or group._allgather_base


def reduce_scatter_call(group: dist.ProcessGroup) -> Callable[..., Any]:
    return getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that serves ``device`` in this group; a group made in Python is its own backend."""
    try:
        return str(backend_of(group, device).name())
    except RuntimeError:
        return str(group.name())


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend itself: its collectives go past torch's dispatcher."""
    return group._get_backend(device)


def timeout_seconds_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long the group waits for a rank by itself."""
    try:
        options = getattr(backend_of(group, device), "options", None)
    except RuntimeError:
        # A group made in Python has no backend, and waits as long as torch does by default.
        options = None
    timeout: timedelta = getattr(options, "_timeout", dist.constants.default_pg_timeout)
    return timeout.total_seconds()


def num_issued(group: dist.ProcessGroup) -> int | None:
    """How much this process has issued on all its groups; None where the calling thread cannot see the group's rank."""
    groups = list(dist.distributed_c10d._world.pg_map)
    if group not in groups:
        return None
    try:
        return sum(int(cast(Any, each)._get_sequence_number_for_group()) for each in groups)
    except RuntimeError:
        # A backend that does not count.
        return None


def finished_work() -> Any:
    """A collective's handle, as torch's dispatcher takes it, with nothing left to wait for."""
    over: torch.futures.Future[list[Any]] = torch.futures.Future()
    over.set_result([])
    return torch._C._distributed_c10d._create_work_from_future(over).boxed()  # type: ignore[attr-defined]


def store_of(group: dist.ProcessGroup, purpose: str) -> Any:
    """The store through which the group's ranks found each other, under a prefix of this group and purpose.

    By a connection of its own: one that somebody waits on answers nobody else.
    """
    store = dist.PrefixStore(purpose, dist.distributed_c10d._world.pg_map[group][1].clone())  # type: ignore[attr-defined]
    # Nobody waits for a note that is not there; this is for a store that has gone.
    store.set_timeout(timedelta(seconds=3))
    return store


def is_destroyed(group: dist.ProcessGroup) -> bool:
    return group not in dist.distributed_c10d._world.pg_map


def name_of(group: dist.ProcessGroup) -> str:
    """The same on all ranks of the group, and no other group's."""
    return group.group_name


def debugs_in_detail() -> bool:
    """Whether ``torch.distributed`` was asked to look closely (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    return bool(dist.get_debug_level() == dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]


def symmetric_memory(group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """An allocator of NCCL's symmetric memory, which every rank of ``group`` must call alike."""
    from torch.distributed import _symmetric_memory as memory

    memory.set_backend("NCCL")

    def allocate(size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = memory.empty(*size, dtype=dtype, device=device)
        memory.rendezvous(made, group)
        return made

    return allocate


def issue_grouped_broadcasts(
    group: dist.ProcessGroup, device: torch.device, tensors_by_source: Sequence[Sequence[torch.Tensor]]
) -> dist.Work:
    """Each rank's tensors to all the others, as one operation of the backend (NCCL runs it as one kernel)."""
    group._start_coalescing(device)
    for source, tensors in enumerate(tensors_by_source):
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.asyncOp = True
        for tensor in tensors:
            # The group's own method: torch's wrapper of it checks what was checked when the exchange was planned.
            group.broadcast([tensor], options)
    return group._end_coalescing(device)
